"""Kill, resume, rewind and branch, through the command line; the measure is the digest of an undisturbed run."""

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flashpoint.cli.run_words import open_run
from flashpoint.errors import UserError
from flashpoint.lab.config import Config
from flashpoint.lab.data.tape import Tape
from flashpoint.lab.training.start import starting_point
from flashpoint.runs.folder import RunFolder
from tests import warm
from tests.conftest import Command, environment, train_command, wait_until
from tests.records import MANIFEST

pytestmark = pytest.mark.slow
STEPS = 60
LONG = (
    f"train.steps={STEPS}", "checkpoints.interval=4", "train.checksum_interval=10", "train.eval_interval=30",
    "probes.weights_interval=4", "probes.attention_interval=4",
)  # fmt: skip
KILLS = 5


def outcome(run: Path) -> dict:
    value: dict = json.loads((run / "outcome.json").read_text())
    return value


@pytest.fixture(scope="module")
def undisturbed(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    command = train_command(*LONG, "run_name=whole", tiny=True, text_file=text_file)
    warm.run(command, cwd=folder, env=environment(), timeout=120).check_returncode()
    return folder


@pytest.mark.exhaustive
def test_killed_at_random_instants_it_ends_with_the_same_digest(
    undisturbed: Path, text_file: Path, train: Command
) -> None:
    longer = (*LONG, "train.steps=150")  # no kill is to come after its end
    train(*longer, "run_name=unkilled", cwd=undisturbed).check_returncode()
    rng = random.Random(0)
    command = train_command(*longer, "run_name=killed", tiny=True, text_file=text_file)
    tape = undisturbed / "runs/killed/tape.bin"
    kills = 0
    while kills < KILLS:
        process = warm.Process(command, cwd=undisturbed, env=environment())
        before = tape.stat().st_size if tape.exists() else 0
        while process.poll() is None and not (tape.exists() and tape.stat().st_size != before):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        _, stderr = process.communicate()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, stderr
            break
        kills += 1
        command = train_command("resume=killed", tiny=False, text_file=text_file)
    else:
        result = train("resume=killed", tiny=False, cwd=undisturbed)
        assert result.returncode == 0, result.stderr
    assert kills == KILLS
    whole, killed = (outcome(undisturbed / "runs" / name) for name in ("unkilled", "killed"))
    for name in ("digest", "chain_digest", "weights_digest", "tape_digest", "step"):
        assert whole[name] == killed[name], name
    manifest = json.loads((undisturbed / "runs/killed/manifest.json").read_text())
    assert 0 < len(manifest["resumed"]) <= kills
    losses = [
        [json.loads(line) for line in (undisturbed / f"runs/{name}/metrics.jsonl").open() if '"loss"' in line]
        for name in ("unkilled", "killed")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("seed", range(3))
def test_after_a_power_loss_it_ends_with_the_same_digest(undisturbed: Path, train: Command, seed: int) -> None:
    """What was not synchronised is lost or garbled: of the records all that came after a checkpoint's."""
    rng, run = random.Random(seed), undisturbed / f"runs/powerless{seed}"
    shutil.copytree(undisturbed / "runs/whole", run)
    (run / "outcome.json").unlink()
    checkpoints = sorted((run / "checkpoints").glob("*.json"))
    last = rng.randrange(len(checkpoints) - 1)
    for lost in checkpoints[last + 1 :]:
        lost.unlink()
        lost.with_suffix(".safetensors").unlink()
    kept = int(re.findall(r"\d+", checkpoints[last].name)[0])
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    tape = Tape.read(run / "tape.bin")
    record = 4 * tape.records[0].size + 8
    synchronised = {
        "chain.bin": 8 + 24 * kept,
        "tape.bin": (run / "tape.bin").stat().st_size - record * (STEPS - kept),
        "metrics.jsonl": sum(len(line) for line in lines if json.loads(line)["step"] < kept),
    }
    for name, size in synchronised.items():
        data = (run / name).read_bytes()
        cut = rng.randrange(size, len(data))
        (run / name).write_bytes(data[:cut] + (b"", bytes(2 * record), rng.randbytes(2 * record))[seed])
    result = train(f"resume=powerless{seed}", tiny=False, cwd=undisturbed)
    assert result.returncode == 0, result.stderr
    whole, resumed = (undisturbed / "runs" / name for name in ("whole", run.name))
    for name in ("digest", "chain_digest", "weights_digest", "tape_digest", "step"):
        assert outcome(whole)[name] == outcome(resumed)[name], name
    losses = [[line for line in (one / "metrics.jsonl").open() if '"loss"' in line] for one in (whole, resumed)]
    assert losses[0] == losses[1]


def test_a_signal_leaves_a_checkpoint_of_its_step(undisturbed: Path, text_file: Path, train: Command) -> None:
    command = train_command(*LONG, "run_name=stopped", tiny=True, text_file=text_file)
    process = warm.Process(command, cwd=undisturbed, env=environment())
    wait_until(lambda: list((undisturbed / "runs/stopped/checkpoints").glob("*.json")), process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    stopped = outcome(undisturbed / "runs/stopped")
    assert stopped["interrupted"] == "SIGTERM"
    assert (undisturbed / f"runs/stopped/checkpoints/step-{stopped['step']:09}.safetensors").exists()
    result = train("resume=stopped", tiny=False, cwd=undisturbed)
    assert result.returncode == 0, result.stderr
    assert outcome(undisturbed / "runs/stopped")["digest"] == outcome(undisturbed / "runs/whole")["digest"]


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(undisturbed: Path, train: Command) -> None:
    shutil.copytree(undisturbed / "runs/whole", undisturbed / "runs/damaged")
    run = undisturbed / "runs/damaged"
    (run / "outcome.json").unlink()
    newest = sorted((run / "checkpoints").glob("*.safetensors"))[-1]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    result = train("resume=damaged", tiny=False, cwd=undisturbed)
    assert result.returncode == 0, result.stderr
    assert f"{newest.name}: damaged or cut short; using the checkpoint before it" in result.stderr
    assert outcome(run)["digest"] == outcome(undisturbed / "runs/whole")["digest"]


def test_from_step_goes_on_bit_for_bit_and_another_attention_branches(undisturbed: Path, train: Command) -> None:
    again = train("replay=whole", "from_step=43", "run_name=rewound", tiny=False, cwd=undisturbed)
    assert again.returncode == 0, again.stderr
    (line,) = [line for line in again.stderr.splitlines() if line.startswith("from_step=43")]
    step = int(re.findall(r"\d+", line)[-1])
    assert step <= 43
    whole, rewound = (outcome(undisturbed / "runs" / name) for name in ("whole", "rewound"))
    for name in ("digest", "chain_digest", "tape_digest", "step"):
        assert whole[name] == rewound[name], name
    branch = train(
        "replay=whole", f"from_step={step}", "attn=flash_stochastic", "run_name=branch", tiny=False, cwd=undisturbed
    )
    assert branch.returncode == 0, branch.stderr
    manifest = json.loads((undisturbed / "runs/branch/manifest.json").read_text())
    assert manifest["parent"] == {"run": "runs/whole", "from_step": step}
    assert outcome(undisturbed / "runs/branch")["tape_digest"] == whole["tape_digest"]
    assert outcome(undisturbed / "runs/branch")["digest"] != whole["digest"]
    cumulative = [
        open_run(name, undisturbed / "runs").measured_by_head("delta_error_cumulative")[1][1, 0]
        for name in ("whole", "rewound")
    ]
    assert 0 < len(cumulative[1]) < len(cumulative[0])
    assert np.array_equal(cumulative[1], cumulative[0][-len(cumulative[1]) :])
    chains = [(undisturbed / f"runs/{name}/chain.bin").read_bytes() for name in ("whole", "branch")]
    shared = 8 + 24 * step
    assert chains[0][:shared] == chains[1][:shared]
    assert chains[0][shared:] != chains[1][shared:]


@pytest.mark.parametrize("left", ["all but checkpoints", "config.json"])
def test_a_branch_killed_before_its_first_checkpoint_starts_where_it_branched_off(
    undisturbed: Path, train: Command, left: str
) -> None:
    """After its first steps, and before its tape was there."""
    branch, killed = undisturbed / "runs/branched", undisturbed / f"runs/killed_branch_{len(left)}"
    if not branch.exists():
        parts = ("replay=whole", "from_step=57", "attn=flash_stochastic", f"run_name={branch.name}")
        assert train(*parts, tiny=False, cwd=undisturbed).returncode == 0
    shutil.copytree(branch, killed)
    for path in killed.iterdir():
        if path.name in ("outcome.json", "checkpoints") or left not in ("all but checkpoints", path.name):
            path.unlink() if path.is_file() else shutil.rmtree(path)
    result = train(f"resume={killed.name}", tiny=False, cwd=undisturbed)
    assert result.returncode == 0, result.stderr
    for name in ("digest", "chain_digest", "tape_digest", "step"):
        assert outcome(killed)[name] == outcome(branch)[name], name
    parents = [json.loads((run / "manifest.json").read_text())["parent"] for run in (branch, killed)]
    assert parents[0] == parents[1]


def test_a_branch_whose_beginning_is_gone_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    branch = RunFolder(tmp_path / "branch")
    manifest = {**MANIFEST, "parent": {"run": str(undisturbed / "runs/whole"), "from_step": 3}}
    branch.path.mkdir()
    branch.manifest.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"branched off at step 3, of which .*whole no longer has a whole checkpoint;"):
        starting_point(Config(), {}, branch, None)


def test_many_branches_leave_one_checkpoint_in_one_command(undisturbed: Path, train: Command) -> None:
    swept = ("-m", "replay=runs/whole", "from_step=58", "attn=flash_fp32,flash_delta_pdp", "runs_dir=branches")
    result = train(*swept, tiny=False, cwd=undisturbed)
    assert result.returncode == 0, result.stderr
    runs = list((undisturbed / "branches").glob("[!.]*"))
    parents = [json.loads((run / "manifest.json").read_text())["parent"] for run in runs]
    assert len(runs) == len({outcome(run)["digest"] for run in runs}) == 2
    assert parents[0] == parents[1]
    assert parents[0]["run"] == "runs/whole"
    assert 0 < parents[0]["from_step"] <= 58


def test_without_a_learning_rate_a_branch_keeps_the_weights_of_its_checkpoint(
    undisturbed: Path, train: Command
) -> None:
    frozen = ("replay=whole", "from_step=56", "attn=flash_stochastic", "train.lr=0", "run_name=frozen")
    result = train(*frozen, tiny=False, cwd=undisturbed)
    assert result.returncode == 0, result.stderr
    saved = {
        step: load_file(undisturbed / f"runs/{name}/checkpoints/step-{step:09}.safetensors")
        for name, step in (("whole", 56), ("frozen", STEPS))
    }
    weights = [name for name in saved[56] if name.startswith("model/")]
    assert weights
    assert all(torch.equal(saved[56][name], saved[STEPS][name]) for name in weights)
    losses = [json.loads(line).get("loss") for line in (undisturbed / "runs/frozen/metrics.jsonl").open()]
    assert len(set(filter(None, losses))) == STEPS - 56


def test_running_means_of_keys_are_repeated_resumed_and_branched_bit_for_bit(
    undisturbed: Path, text_file: Path, train: Command
) -> None:
    shifted = (*LONG, "train.steps=12", "model.shift_keys=running", "run_name=shifted")
    whole = train(*shifted, "probes.attention=[delta_error,deviation]", "probes.targets=unrounded", cwd=undisturbed)
    assert whole.returncode == 0, whole.stderr
    checkpoint = undisturbed / "runs/shifted/checkpoints/step-000000004.safetensors"
    means = {name: mean for name, mean in load_file(checkpoint).items() if name.endswith("key_mean")}
    assert len(means) == 2
    assert all(mean.abs().min() > 0 for mean in means.values())
    without_probes = ("probes.attention_interval=0", "train.eval_interval=7")
    for name, arguments in (("again", without_probes), ("branch", ("from_step=4", *without_probes)), ("on", ())):
        result = train("replay=shifted", f"run_name=shifted-{name}", *arguments, tiny=False, cwd=undisturbed)
        assert result.returncode == 0, result.stderr
    (undisturbed / "runs/shifted-on/outcome.json").unlink()
    for late in (undisturbed / "runs/shifted-on/checkpoints").glob("step-000000012*"):
        late.unlink()
    resumed = train("resume=shifted-on", tiny=False, cwd=undisturbed)
    assert resumed.returncode == 0, resumed.stderr
    expected = outcome(undisturbed / "runs/shifted")
    for name in ("again", "branch", "on"):
        found = outcome(undisturbed / f"runs/shifted-{name}")
        assert [found[key] for key in ("digest", "chain_digest")] == [
            expected[key] for key in ("digest", "chain_digest")
        ]
    assert expected["digest"] != outcome(undisturbed / "runs/whole")["digest"]


def test_a_complete_run_goes_on_with_more_steps(undisturbed: Path, train: Command) -> None:
    shutil.copytree(undisturbed / "runs/whole", undisturbed / "runs/longer")
    refused = train("resume=longer", tiny=False, cwd=undisturbed)
    assert refused.returncode == 2
    assert f"the run is complete (stable at step {STEPS})" in refused.stderr
    longer = train("resume=longer", "train.steps=64", tiny=False, cwd=undisturbed)
    assert longer.returncode == 0, longer.stderr
    in_one_go = train(*LONG, "train.steps=64", f"train.decay_steps={STEPS}", "run_name=long", cwd=undisturbed)
    assert in_one_go.returncode == 0, in_one_go.stderr
    digests = [outcome(undisturbed / "runs" / name)["digest"] for name in ("longer", "long")]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["resume=nowhere"], "nowhere: no run there"),
        (["resume=whole", "attn=flash_fp32"], "attn contradicts resume=whole"),
        (["resume=whole", "seed=3"], "seed contradicts resume=whole"),
        (["resume=whole", "replay=whole"], "give one of the two"),
        (["from_step=20"], "from_step=20 needs replay=RUN"),
        (["replay=whole", "from_step=3"], "has no checkpoint that early"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(
    undisturbed: Path, train: Command, arguments: list[str], named: str
) -> None:
    result = train(*arguments, tiny=arguments == ["from_step=20"], cwd=undisturbed)
    assert result.returncode == 2
    assert named in result.stderr.splitlines()[-1]


def test_a_budget_too_small_is_one_line(train: Command, tmp_path: Path) -> None:
    result = train("checkpoints.budget_gib=0.0001", cwd=tmp_path)
    assert result.returncode == 2
    assert "checkpoints.budget_gib=0.0001: a checkpoint takes" in result.stderr
    assert not (tmp_path / "runs").exists()
