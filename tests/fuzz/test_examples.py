"""Bad options that were once a traceback, a hang, or taken without a word: each with its line, before PyTorch."""

import dataclasses
from pathlib import Path

import pytest

from flashpoint.hardware import cores
from flashpoint.lab.config import BUILT_IN_PROBES
from flashpoint.lab.probes.runner import BUILT_IN
from tests.fuzz.judge import laid_out, run

ABOUT_SIZE = "the run needs at least "
EXAMPLES: dict[str, str] = {
    "model=null": "model=null: give the name of one option: gpt2_124m, ignite, laptop",
    "attn=null": "attn=null: give the name of one option: fa4, fa4_fixed, flash_attn",
    "experiment=null": "experiment=null: give the name of one option: demo_cpu",
    "attn=[flash_bf16,sdpa]": "attn=[flash_bf16,sdpa]: give the name of one option",
    "-m attn=range(1,5)": "attn=range(1,5): give names of options: fa4, fa4_fixed, flash_attn",
    "-m attn=flash_bf16,2": "attn=flash_bf16,2: give names of options: fa4",
    "attn=../attn/sdpa": "attn=../attn/sdpa: give the name of one option",
    "hydra/launcher=null": "hydra/launcher=null: give the name of one option",
    "~train": "~train: nothing of the configuration can be left out",
    "=3": "=3: no key; give KEY=VALUE",
    "--nothing": "unrecognized arguments: --nothing",
    "--resolve": "ValueError: The --resolve flag can only be used",
    "hydra.searchpath=[nowhere]": "nowhere: no folder of YAML files",
    "-m seed=range(0)": "the sweep has no run",
    "-m attn=glob(zzz*)": "the sweep has no run",
    "-m run_name=same seed=1,2": "run_name=same: 2 runs of one sweep cannot have one name",
    "seed=${seed}": "Recursive interpolation detected",
    "train.batch_size=999999999999": ABOUT_SIZE,
    "model.context=100000000": ABOUT_SIZE,
    "train.log_interval=1000000000000": ABOUT_SIZE,
    "model.n_layer=10000000000": ABOUT_SIZE,
    "model.vocab_size=100000000000 data.vocab_size=300": ABOUT_SIZE,
    "model.d_model=1048576 model.n_head=8192": ABOUT_SIZE,
    "train.steps=99999999999999": ABOUT_SIZE,
    "train.steps=99999999999999999999": "train.steps=99999999999999999999: give an integer of 64 bits",
    "train.steps=9999999999999999": "train.steps × train.batch_size × model.context: more tokens than 64 bits count",
    "train.threads=100000": f"train.threads=100000: this machine has {cores()} cores; give {4 * cores()} or less",
    "data.workers=100000": "data.workers=100000: this machine has",
    "detector.window=99999999999": "detector.window=99999999999: give more than 0 and 1,000,000 or less",
    "checkpoints.budget_gib=1e300": "checkpoints.budget_gib=1e+300: give 0, or ",
    "checkpoints.budget_gib=1e-9": "checkpoints.budget_gib=1e-09: a checkpoint takes",
    "train.lr=1e300": "train.lr=1e+300: give 0, or ",
    "probes.attention=[ties,ties]": "probes.attention: ties is there more than once",
    "probes.attention=[nothing]": "probes.attention: no probe named nothing",
    "probes.attention=[x.py:A]": "probes.attention=x.py:A: x.py is no file",
    "run_name=..": "run_name=..: a name cannot begin with '.'",
    "run_name=reference": "run_name=reference: reserved",
    "run_name=old": "run_name=old: runs/old exists",
    "run_name=a/b": "run_name=a/b: a name cannot hold /",
    "run_name=-x": "run_name=-x: a name cannot begin with '-'",
    f"run_name={'x' * 300}": "a name of 300 bytes; give at most 200",
    "run_name=\udcff": "holds a control character, or a byte that is no UTF-8",
    "runs_dir=": "runs_dir=: empty; give a name",
    "runs_dir=file/runs": "file is no folder; choose another runs_dir",
    "runs_dir=/proc/runs": "choose another runs_dir",
    "data.root=/dev/null": "/dev/null is no folder; choose another data.root",
    "data=text data.path=nowhere": "nowhere: No such file or directory",
    "attn.name=../../evil": "attn.name=../../evil: give a name of 1 to 200 characters without / and \\",
    "attn.layers=[1] attn.elsewhere=../attn/sdpa": "attn.elsewhere=../attn/sdpa: no such variant",
    "tracking.project=": "tracking.project=: empty; give a name",
    "from_step=3": "from_step=3 needs replay=RUN",
    "replay=nowhere": "nowhere: no run there",
    "train.device=cuda": "train.device=cuda: no CUDA device is visible",
    "hydra/launcher=slurm hydra.launcher.dry_run=true": "hydra/launcher=slurm: launches the runs of a sweep, and one",
    "-m hydra/launcher=gpus hydra.launcher.sweep=../x seed=1": "hydra.launcher.sweep=../x: a name cannot hold /",
    "-m hydra/launcher=gpus hydra.launcher.sweep=old seed=1": "hydra.launcher.sweep=old: runs/old is no sweep",
    "-m hydra/launcher=gpus hydra.launcher.sweep=. seed=1": "hydra.launcher.sweep=.: a name cannot begin with '.'",
    "-m hydra/launcher=gpus hydra.launcher.runs_per_gpu=100000 seed=1": "runs_per_gpu=100000: give 1 or more, 1000 at",
}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_example_is_one_line_told_before_pytorch_and_writes_nothing(tmp_path: Path) -> None:
    from tests.fuzz.of_options import KIND

    wrong = {}
    for options, told in EXAMPLES.items():
        arguments = ("experiment=laptop", "tracking=disabled", *options.split(" "))
        arguments = arguments[options.startswith("experiment=") :]
        with laid_out(KIND, arguments, tmp_path) as (tree, laid):
            command = dataclasses.replace(laid, may_write=())
            ending = run(command, tree)
        if ending.status != 2 or ending.faults(command) or ending.pytorch or told not in ending.err:
            wrong[options] = f"{ending.status} {ending.faults(command)} {ending.out_of_place(command)} {ending.err}"
    assert not wrong, "\n".join(f"{options}: {how}" for options, how in wrong.items())


def test_the_probes_are_those_that_the_configuration_names() -> None:
    assert tuple(BUILT_IN) == BUILT_IN_PROBES
