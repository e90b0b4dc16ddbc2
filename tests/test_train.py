"""``train.py`` end to end: record, replay, refuse and sweep. Each run is a process of its own.

``recorded`` starts ``train.py`` as a user does, imports and all.
"""

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from flashpoint.lab.build_config import build_config
from flashpoint.lab.training.remarks import tell_of_a_small_corpus, tell_what_kind_of_run
from flashpoint.runs.chain import Chain
from flashpoint.runs.folder import RunFolder
from tests.composed import CONFIGS, composed_values
from tests.conftest import TINY, Command, environment
from tests.verdicts import assert_one_line, losses_of, metrics_of, outcome_of


def test_a_run_leaves_every_record_and_its_outcome_line(recorded: Path) -> None:
    run = recorded / "runs/original"
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["outcome"], outcome["step"], outcome["onset_step"]) == ("stable", 12, None)
    assert outcome["val_step"] == 12
    losses = losses_of(run)
    assert len(losses) == 12
    assert losses[-1] == pytest.approx(outcome["loss"])
    assert losses[-1] < losses[0] - 0.2
    logged = {name for line in metrics_of(run) for name in line}
    assert {"grad_norm", "update_norm", "clip_factor", "lr", "tokens_per_second", "val_loss"} <= logged
    assert {"w_q_spectral_norm", "qk_spectral_norm", "delta_error_sum", "tied_rows", "entropy"} <= logged
    assert (run / "curves.png").is_file()
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["environment"]["torch"]
    assert json.loads((run / "config.json").read_text())["attn"]["name"] == "flash_bf16"


def test_the_chain_holds_the_losses_and_gradient_norms_on_file(recorded: Path) -> None:
    run = recorded / "runs/original"
    chain = Chain.read(run / "chain.bin")
    logged = [(line["loss"], line["grad_norm"]) for line in metrics_of(run) if "loss" in line]
    taken = np.stack([chain.records["loss"], chain.records["grad_norm"]], 1).view("<f4")
    assert np.array_equal(taken, np.array(logged, "<f4"))
    assert (chain.records["state"] != 0).tolist() == [(step + 1) % 4 == 0 for step in range(len(logged))]
    assert json.loads((run / "outcome.json").read_text())["chain_digest"] == chain.digests[-1].hex()


@pytest.mark.slow
def test_replay_is_bitwise(recorded: Path, train: Command) -> None:
    result = train("replay=runs/original", "run_name=again", tiny=False, cwd=recorded)
    outcome_of(result)
    first, second = (json.loads((recorded / f"runs/{name}/outcome.json").read_text()) for name in ("original", "again"))
    assert "equal to runs/original, bit for bit, over 12 steps" in result.stderr
    for name in ("digest", "chain_digest", "weights_digest", "tape_digest", "loss"):
        assert first[name] == second[name]
    assert losses_of(recorded / "runs/original") == losses_of(recorded / "runs/again")


@pytest.mark.slow
def test_replay_with_another_attention_keeps_the_tape_and_changes_the_losses(recorded: Path, train: Command) -> None:
    shutil.copytree(recorded / "runs/original", recorded / "runs/elsewhere")
    manifest = recorded / "runs/elsewhere/manifest.json"
    made = json.loads(manifest.read_text())
    made["hardware"] = made["environment"]["hardware"] = "NVIDIA H200"
    manifest.write_text(json.dumps(made))
    result = train("replay=elsewhere", "attn=flash_fixed", "run_name=fixed", tiny=False, cwd=recorded)
    outcome_of(result)
    assert "hardware NVIDIA H200 → " in result.stderr
    both = "flash_bf16 held through 12, flash_fixed held through 12; runs/elsewhere was made on NVIDIA H200"
    ending = [line for line in result.stderr.splitlines() if line.startswith(("same", "next: "))]
    assert ending == [
        f"same batches and initial weights: {both}",
        "next: flashpoint report runs/elsewhere runs/fixed",
    ]
    assert result.stdout.splitlines()[-1].startswith("outcome=stable ")
    original, fixed = recorded / "runs/original", recorded / "runs/fixed"
    assert (original / "tape.bin").read_bytes() == (fixed / "tape.bin").read_bytes()
    assert losses_of(original)[0] == pytest.approx(losses_of(fixed)[0], abs=1e-2)
    assert losses_of(original) != losses_of(fixed)
    attn = json.loads((fixed / "config.json").read_text())["attn"]
    assert attn["out_residual_bits"] == 6
    assert attn["out_unnormalized"]["bits"] == 1  # the laptop's Ō belongs to the experiment, not to the attention


@pytest.mark.slow
def test_a_replay_takes_the_formats_that_it_is_given(recorded: Path, train: Command) -> None:
    formats = ("attn=flash_fixed", "attn.out_unnormalized.bits=5", "train.steps=1", "run_name=finer")
    outcome_of(train("replay=original", *formats, tiny=False, cwd=recorded))
    attn = json.loads((recorded / "runs/finer/config.json").read_text())["attn"]
    assert (attn["name"], attn["out_unnormalized"]["bits"]) == ("flash_fixed", 5)


@pytest.mark.slow
def test_where_a_run_computes_contradicts_no_run_however_it_is_written(recorded: Path, train: Command) -> None:
    for hardware in ("hardware.gpu=null", "++hardware.gpu=null"):
        assert_one_line(train("resume=original", hardware, tiny=False, cwd=recorded), "the run is complete")


def test_a_corpus_gone_over_and_over_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    config = build_config(
        composed_values("train.steps=1000", "train.batch_size=2", "model.context=8"), CONFIGS / "attn"
    )
    tell_of_a_small_corpus(config, 800)  # 1,000 · 2 · 8 tokens: 20 times
    assert not capsys.readouterr().err
    tell_of_a_small_corpus(config, 700)
    assert "700 tokens, and train.steps=1000 go over it 23 times" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("experiment", "other"), [("laptop", "demo_gpu"), ("demo_cpu", "demo_gpu"), ("demo_gpu", "demo_cpu")]
)
def test_a_run_on_a_cpu_is_told_which_experiment_it_is_not(
    capsys: pytest.CaptureFixture[str], experiment: str, other: str
) -> None:
    """A large model was called small, and nobody said that it is not for a CPU."""
    config = build_config(composed_values(f"experiment={experiment}"), CONFIGS / "attn")
    tell_what_kind_of_run(config, torch.device("cpu"))
    told = capsys.readouterr().err.splitlines()[0]
    assert f"experiment={other}" in told
    assert ("so small a model" in told) == (experiment != "demo_gpu")


@pytest.mark.slow
def test_an_injected_replay_of_an_older_run_says_what_it_is(recorded: Path, train: Command, tmp_path: Path) -> None:
    older = tmp_path / "runs/older"
    shutil.copytree(recorded / "runs/original", older)
    config = json.loads((older / "config.json").read_text())
    del config["attn"]["delta_error"]
    config["attn"]["out"] = config["attn"]["out"]["mode"]  # before formats had bits
    (older / "config.json").write_text(json.dumps(config))
    shutil.copytree(recorded / "data", tmp_path / "data")
    injection = ("attn.delta_error.kind=bias", "attn.delta_error.size=0.01")
    result = train("replay=runs/older", *injection, tiny=False)
    assert "flash_bf16 injected: δ takes errors on purpose" in result.stderr
    run = Path(outcome_of(result)[6])
    assert "_flash_bf16-injected_seed0" in run.name
    error = json.loads((tmp_path / run / "config.json").read_text())["attn"]["delta_error"]
    assert {name: error[name] for name in ("kind", "size", "layers", "into")} == {
        "kind": "bias", "size": 0.01, "layers": None, "into": "both"
    }  # fmt: skip
    assert losses_of(tmp_path / run)[0] == losses_of(older)[0]
    assert losses_of(tmp_path / run)[2:] != losses_of(older)[2:]


@pytest.mark.slow
def test_replay_past_the_tape_goes_on_as_the_original_would_have(
    recorded: Path, train: Command, tmp_path: Path
) -> None:
    outcome_of(train("train.steps=16", "train.decay_steps=12", "run_name=longer", cwd=recorded))
    outcome_of(train("replay=original", "train.steps=16", "run_name=past", tiny=False, cwd=recorded))
    assert (recorded / "runs/longer/tape.bin").read_bytes() == (recorded / "runs/past/tape.bin").read_bytes()
    assert losses_of(recorded / "runs/longer") == losses_of(recorded / "runs/past")


@pytest.mark.slow
def test_gradient_accumulation_keeps_the_sequences_and_almost_the_losses(recorded: Path, train: Command) -> None:
    outcome_of(train("train.micro_batch_size=2", "attn=flash_fp32", "run_name=split", cwd=recorded))
    outcome_of(train("attn=flash_fp32", "run_name=whole", cwd=recorded))
    split, whole = losses_of(recorded / "runs/split"), losses_of(recorded / "runs/whole")
    assert split == pytest.approx(whole, abs=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    [
        "data=python_corpus",
        "data.val_fraction=0.2",
        "model.n_head=1",
        "seed=3",
        "train.batch_size=8",
        "experiment=laptop",
    ],
)
def test_replay_refuses_what_contradicts_it(recorded: Path, train: Command, override: str) -> None:
    result = train("replay=original", override, tiny=False, cwd=recorded)
    assert_one_line(result, override.split("=", maxsplit=1)[0], "contradicts replay=original")


@pytest.mark.slow
def test_replay_refuses_other_data_with_both_fingerprints(recorded: Path, train: Command, tmp_path: Path) -> None:
    copy_run(recorded / "runs/original", tmp_path / "runs/original")
    (tmp_path / "text.txt").write_text("another text " * 2000)
    config = json.loads((tmp_path / "runs/original/config.json").read_text())
    config["data"]["path"] = str(tmp_path / "text.txt")
    (tmp_path / "runs/original/config.json").write_text(json.dumps(config))
    result = train("replay=original", tiny=False)
    assert_one_line(result, "data differ")
    assert len(set(re.findall(r"\b[0-9a-f]{64}\b", result.stderr))) == 2
    assert not list((tmp_path / "runs").glob("2*"))


@pytest.mark.slow
def test_replay_refuses_a_tape_cut_short_or_edited(recorded: Path, train: Command, tmp_path: Path) -> None:
    tape = (recorded / "runs/original/tape.bin").read_bytes()
    for name, damaged in {"cut": tape[:-24], "edited": tape[:-30] + b"\0" + tape[-29:], "gone": None}.items():
        copy_run(recorded / "runs/original", tmp_path / f"runs/{name}")
        (tmp_path / f"runs/{name}/tape.bin").unlink()
        if damaged is not None:
            (tmp_path / f"runs/{name}/tape.bin").write_bytes(damaged)
        assert_one_line(train(f"replay={name}", tiny=False), f"runs/{name}/tape.bin")


@pytest.mark.slow
def test_without_an_index_a_run_records_the_text_that_it_took_instead(train: Command, tmp_path: Path) -> None:
    own = [value for value in TINY if not value.startswith("data=")]
    offline = {**environment(), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    choices = ("data.max_bytes=30000", "train.steps=2", "run_name=offline")
    result = train(*own, *choices, tiny=False, env=offline)
    digest = outcome_of(result)[5]
    assert "data=python_corpus" in result.stderr
    assert json.loads(RunFolder(tmp_path / "runs/offline").config.read_text())["data"]["source"] == "python_corpus"
    assert outcome_of(train("replay=offline", tiny=False, env=offline))[5] == digest


@pytest.mark.slow
def test_an_explosion_is_a_result(train: Command, tmp_path: Path) -> None:
    """A learning rate of 3 diverges at once; the detector's verdict must come with status 0."""
    result = train(
        "train.lr=3", "train.steps=200", "train.grad_clip=0", "detector.window=3", "detector.hold_steps=3",
        "detector.tail_steps=6", "detector.margin=0.5", "checkpoints.interval=1", "run_name=boom",
    )  # fmt: skip
    match = outcome_of(result)
    assert match[1] in ("exploded", "nonfinite")
    assert int(match[3]) <= int(match[2]) < 200
    told = "the loss has exploded, since step " if match[1] == "exploded" else "the gradient norm of step "
    assert result.stderr.count(f"{told}{int(match[3]):,}") == 1
    outcome = json.loads((tmp_path / "runs/boom/outcome.json").read_text())
    assert outcome["onset_step"] == int(match[3])
    if match[1] == "exploded":
        for from_step, times in ((int(match[3]), 0), (int(match[2]) - 1, 1)):
            branch = train("replay=boom", f"from_step={from_step}", tiny=False)
            assert outcome_of(branch).groups()[:3] == match.groups()[:3]
            assert branch.stderr.count(f"exploded before, at {match[3]}") == times


def copy_run(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for name in ("config.json", "manifest.json", "outcome.json", "tape.bin"):
        (target / name).write_bytes((source / name).read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["attn=flash_bf17"], ["attn=flash_bf17: no such option; did you mean flash_bf16? "]),
        (["train.lr=fast"], ["train.lr=fast", "train.lr takes a number"]),
        (["train.steps=1.5"], ["train.steps=1.5", "train.steps takes a whole number"]),
        (
            ["train.deterministic=perhaps"],
            ["train.deterministic=perhaps", "train.deterministic takes true or false"],
        ),
        (["train.learning_rate=1"], ["train.learning_rate", "flashpoint train help=all"]),
        (["train.step=1"], ["train.step", "train.steps?", "flashpoint train help=all"]),
        (["atn=flash_bf16"], ["atn", "attn?", "flashpoint train help=all"]),
        (["attn.bta=2"], ["attn.bta", "attn.beta?", "flashpoint train help=all"]),
        (["attn.layers=[9]", "attn.elsewhere=flash_fp32"], ["attn.layers=[9]", "1 to 2"]),
        (["attn.heads=[0]", "attn.elsewhere=flash_fp32"], ["attn.heads=[0]", "from 1"]),
        (["attn.heads=[5]", "attn.elsewhere=flash_fp32"], ["attn.heads=[5]", "1 to 2"]),
        (["attn.heads=[first]", "attn.elsewhere=flash_fp32"], ["attn.heads=['first']", "give numbers"]),
        (
            ["attn.layers=[1,2]", "attn.heads=[[1],[5]]", "attn.elsewhere=flash_fp32"], ["attn.heads=[5]", "1 to 2"]
        ),
        (["attn.layers=[2]"], ["attn.elsewhere"]),
        (["attn.layers=[2]", "attn.elsewhere=flash"], ["attn.elsewhere=flash", "standard"]),
        (["attn.scores.mode=fp8"], ["attn.scores.mode=fp8", "nearest"]),
        (["attn.scores=nearest"], ["attn.scores=nearest", "as attn.scores.mode=VALUE"]),
        (["model.n_head=3"], ["model.n_head=3", "16, 32, 64, 128"]),
        (["model.vocab_size=100", "data.vocab_size=2048"], ["model.vocab_size=100"]),
        (["train.batch_size=6", "train.micro_batch_size=4"], ["train.micro_batch_size=4"]),
        (["data=text"], ["data.path"]),
        (["data=text", "data.path=missing.txt"], ["missing.txt"]),
        (["replay=missing"], ["missing", "runs/NAME"]),
        (["train.device=cuda"], ["train.device=cuda", "cpu"]),
        (["attn="], ["attn=: give the name of one option", "flash_bf16"]),
        (
            ["attn=own"],
            ["attn=own: ", "choose one of fa4, fa4_fixed", "FOLDER/attn/own.yaml, with --config-dir FOLDER"],
        ),
        (["seed=1,2"], ["seed=1,2: several values are a sweep", "flashpoint train -m 'seed=1,2'"]),
        (["seed=range(2)"], ["seed=range(2): several values are a sweep", "flashpoint train -m 'seed=range(2)'"]),
        (["probes.attention=ties"], ["probes.attention=ties", "takes a list, each text, as probes.attention=[A,B]"]),
        (["train.steps", "seed=1"], ["train.steps: ", "give KEY=VALUE"]),
        (["run_name=a=b"], ["run_name=a=b: ", """'run_name="a=b"'"""]),
        (["run_name=../a"], ["run_name=../a", "runs_dir"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_field_and_remedy(
    train: Command, tmp_path: Path, arguments: list[str], fragments: list[str]
) -> None:
    assert_one_line(train(*arguments, tiny=False), *fragments)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_unwritable_run_folder_is_one_line(train: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert_one_line(train("runs_dir=file"), "file", "runs_dir")
    assert (tmp_path / "file").read_text() == "in the way"
    assert_one_line(train("runs_dir=/proc/runs"), "/proc/runs", "runs_dir")


@pytest.mark.slow
def test_a_run_name_that_exists_is_refused(recorded: Path, train: Command) -> None:
    before = sorted(recorded.glob("runs/*"))
    result = train("run_name=original", "train.steps=2", cwd=recorded)
    assert_one_line(result, "run_name=original: runs/original exists", "resume=original")
    assert sorted(recorded.glob("runs/*")) == before


@pytest.mark.slow
def test_the_name_that_a_run_gets_is_a_value_as_it_stands(recorded: Path, train: Command) -> None:
    choices = ("attn=flash_fixed_paper", "attn.beta=2", "attn.layers=[1]", "attn.elsewhere=flash_fp32")
    first = outcome_of(train(*choices, "train.steps=2", cwd=recorded))
    assert first[6].endswith("_flash_fixed_paper-beta-2.0-layers-1-elsewhere-flash_fp32_seed0")
    assert outcome_of(train(f"replay={first[6]}", cwd=recorded, tiny=False))[5] == first[5]


@pytest.mark.slow
def test_a_step_to_start_from_is_one_of_the_tape(recorded: Path, train: Command) -> None:
    for step, told in ((99, "runs/original has 12 steps"), (-3, "give 0 or more")):
        result = train("replay=original", f"from_step={step}", cwd=recorded, tiny=False)
        assert_one_line(result, f"from_step={step}", told)


@pytest.mark.slow
def test_an_injection_without_a_size_says_that_it_is_none(recorded: Path, train: Command) -> None:
    error = ("attn=flash_fp32", "attn.delta_error.kind=bias")
    result = train("replay=original", *error, "train.steps=1", cwd=recorded, tiny=False)
    assert "attn.delta_error.size=0: nothing is injected; give the size" in result.stderr.splitlines()
    result = train("replay=original", *error, "attn.delta_error.size=1e-3", "train.steps=2", cwd=recorded, tiny=False)
    assert "nothing is injected" not in result.stderr


@pytest.mark.slow
def test_a_sweep_records_one_run_per_choice(recorded: Path, train: Command) -> None:
    result = train("attn=flash_bf16,sdpa", "-m", "seed=range(2)", "train.steps=2", "runs_dir=swept", cwd=recorded)
    assert result.returncode == 0, result.stderr
    configs = [json.loads(path.read_text()) for path in (recorded / "swept").glob("*/config.json")]
    (group,) = {config["tracking"]["group"] for config in configs}
    assert group.startswith("sweep_")
    assert {(config["attn"]["name"], config["seed"]) for config in configs} == {
        ("flash_bf16", 0), ("flash_bf16", 1), ("sdpa", 0), ("sdpa", 1),
    }  # fmt: skip
    assert [line for line in result.stderr.splitlines() if line.startswith("run ")] == [
        f"run {number} of 4: {attention} seed={seed}"
        for number, (attention, seed) in enumerate(itertools.product(("flash_bf16", "sdpa"), (0, 1)), 1)
    ]
    assert result.stderr.splitlines()[-1] == "next: flashpoint report swept"
    for path in (recorded / "swept").glob("*/manifest.json"):
        operation = json.loads(path.read_text())["environment"]["sdpa"]
        assert operation == ("ScaledDotProductFlashAttentionForCpu" if "sdpa" in path.parent.name else None)


@pytest.mark.slow
def test_a_sweep_of_one_run_twice_is_refused(train: Command, tmp_path: Path) -> None:
    result = train("-m", "seed=0,0", "train.steps=2")
    assert_one_line(result, "seed=0", "more than once in this sweep; give each value once")
    assert not list(tmp_path.rglob("tape.bin"))


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_run_that_fails(recorded: Path, train: Command) -> None:
    choices = ("attn.elsewhere=flash_fp32", "attn.layers=[9],[1],[8]")  # the model has two layers
    result = train(*choices, "train.steps=2", "runs_dir=partly", "-m", cwd=recorded)
    assert_one_line(result, "2 of 3 runs failed")
    told = [line for line in result.stderr.splitlines() if line.startswith("failed: ")]
    assert [line.split(": ", 1)[1] for line in told] == [
        f"attn.layers=[{layer}]: attn.layers=[{layer}]: the model has layers 1 to 2" for layer in (9, 8)
    ]
    assert len(list((recorded / "partly").glob("*/outcome.json"))) == 1
