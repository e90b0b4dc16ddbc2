"""What a replay and a resumed run take from the command line, and what they keep."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashpoint.errors import UserError
from flashpoint.files import write_json
from flashpoint.lab.build_config import build_config
from flashpoint.lab.data.tape import Tape, TapeHeader, TapeWriter
from flashpoint.lab.replay import replayed_values, resumed_values
from flashpoint.runs.folder import RunFolder
from tests import warm
from tests.composed import CONFIGS, configured_values
from tests.conftest import environment, train_command
from tests.lab.evidence.kept import set_outcome
from tests.records import write_run

RECORDED = ("checkpoints.budget_gib=24", "train.lr=0.5", "tracking=disabled", "tracking.tags=[a]", "tracking.project=p")


@pytest.fixture
def recorded(run: RunFolder) -> dict[str, Any]:
    """The configuration of ``run``, which has a tape of one step."""
    write_json(run.config, build_config(configured_values(*RECORDED), CONFIGS / "attn").to_dict())
    header = TapeHeader(
        data_fingerprint="", context=4, n_windows=9, micro_batches=1, ranks=1, sequences=2, seed=0, initial_weights=""
    )
    tape = TapeWriter(run.tape, header)
    tape.append(np.zeros(header.shape, np.uint32))
    tape.close()
    return run.read_config().to_dict()


def resumed(run: RunFolder, *overrides: str) -> dict[str, Any]:
    command = [f"resume={run.path}", *overrides]
    return resumed_values(configured_values(*command), command)


def replayed(run: RunFolder, *overrides: str) -> dict[str, Any]:
    command = [f"replay={run.path}", *overrides]
    return replayed_values(configured_values(*command), command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "override", ["checkpoints.interval=50", "++checkpoints.interval=50", "checkpoints={interval: 50}"]
)
@pytest.mark.parametrize("again", [resumed, replayed])
def test_one_key_leaves_the_others_of_its_section(
    run: RunFolder, recorded: dict[str, Any], again: Any, override: str
) -> None:
    values = again(run, override)
    assert values["checkpoints"] == {**recorded["checkpoints"], "interval": 50}
    for section in ("attn", "model", "data", "probes"):
        assert values[section] == recorded[section]


def test_a_branch_keeps_the_optimiser_whose_moments_its_checkpoint_has(
    run: RunFolder, recorded: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=r"optimizer=muon contradicts from_step=1: .* are of optimizer=adamw; replay"):
        replayed(run, "optimizer=muon", "from_step=1")
    assert replayed(run, "optimizer=muon")["optimizer"] == {"name": "muon", "momentum": 0.95, "eps": 1e-7}
    assert replayed(run, "from_step=1")["optimizer"] == recorded["optimizer"]


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("model.shift_keys=running", r"repeat it from the start with replay=\S* model\.shift_keys=…$"),
        ("train.z_loss=0.1", r"branch with replay=.* from_step=STEP train\.z_loss=…$"),
        ("optimizer=muon", r"repeat it from the start with replay=\S* optimizer=…$"),
        ("model.qk_norm=true", "train a run of its own"),
        ("seed=3", "train a run of its own"),
    ],
)
def test_what_a_resumed_run_keeps_is_told_with_what_takes_it(
    run: RunFolder, recorded: dict[str, Any], override: str, instead: str
) -> None:
    with pytest.raises(UserError, match=instead):
        resumed(run, override)
    if "of its own" in instead:
        with pytest.raises(UserError, match="contradicts replay"):
            replayed(run, override)
    else:
        replayed(run, override, *(["from_step=1"] if "from_step" in instead else []))


def test_a_replay_shifts_keys_from_the_start_and_not_from_a_checkpoint_without_their_means(
    run: RunFolder, recorded: dict[str, Any]
) -> None:
    assert replayed(run, "model.shift_keys=running")["model"] == {**recorded["model"], "shift_keys": "running"}
    with pytest.raises(
        UserError, match=r"model\.shift_keys=running contradicts from_step=1: .*shift_keys=none; replay"
    ):
        replayed(run, "model.shift_keys=running", "from_step=1")


def test_a_replay_takes_a_cap_of_scores_and_no_other_key_of_the_model(run: RunFolder, recorded: dict[str, Any]) -> None:
    """The initial weights do not depend on it: capped and not, FlexAttention is its own control."""
    cap = replayed(run, "attn=flex", "model.score_cap=30")["model"]
    assert cap == {**recorded["model"], "score_cap": 30.0}
    with pytest.raises(UserError, match=r"^model\.qk_norm contradicts replay"):
        replayed(run, "model.qk_norm=true")


def test_a_run_is_uploaded_only_where_it_is_asked_for(
    run: RunFolder, recorded: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its records may be somebody else's. With ``trust=true`` they say where; a replay is uploaded by its own command
    even so."""
    theirs = {**recorded["tracking"], "wandb": "online", "entity": "e"}
    write_json(run.config, {**recorded, "tracking": theirs})
    own = {**theirs, "wandb": "offline", "project": "flashpoint", "entity": None}
    assert replayed(run)["tracking"] == own
    assert capsys.readouterr().err == ""
    assert replayed(run, "tracking.wandb=online")["tracking"] == {**own, "wandb": "online"}
    assert "tracking.project=p tracking.entity=e" in capsys.readouterr().err
    assert resumed(run)["tracking"] == own
    assert "tracking.wandb=online tracking.project=p tracking.entity=e" in capsys.readouterr().err
    assert replayed(run, "trust=true")["tracking"] == {**theirs, "wandb": "offline"}
    assert resumed(run, "trust=true")["tracking"] == theirs


def test_a_replay_writes_data_where_its_own_command_says(run: RunFolder, recorded: dict[str, Any]) -> None:
    write_json(run.config, {**recorded, "data": {**recorded["data"], "root": "/theirs"}})
    for again in (replayed, resumed):
        assert again(run)["data"]["root"] == "data"
        assert again(run, "data.root=mine")["data"]["root"] == "mine"


@pytest.mark.parametrize(
    ("overrides", "tracking"),
    [
        (["tracking.tags=[x]"], {"wandb": "disabled", "project": "flashpoint", "tags": ["x"]}),
        (["tracking=offline"], {"wandb": "offline", "project": "flashpoint", "tags": []}),
        (["tracking.tags=[x]", "tracking=offline"], {"wandb": "offline", "project": "flashpoint", "tags": ["x"]}),
    ],
)
def test_a_group_is_taken_whole(
    run: RunFolder, recorded: dict[str, Any], overrides: list[str], tracking: dict[str, Any]
) -> None:
    assert resumed(run, *overrides)["tracking"] == {**recorded["tracking"], **tracking}


@pytest.mark.parametrize(("onset", "steps"), [(0, 1000), (1344, 2400), (None, 1)])
def test_a_replay_goes_on_beyond_the_onset_that_it_is_to_avoid(
    run: RunFolder, recorded: dict[str, Any], onset: int | None, steps: int
) -> None:
    """It ended with the tape, some hundreds of steps after the onset, and had not yet held."""
    tape = Tape.read(run.tape)
    write_run(run.path / "other", {"name": "flash_bf16"}, steps=1, onset=1)
    shutil.move(run.path / "other/outcome.json", run.outcome)
    verdict = "stable" if onset is None else "exploded"
    set_outcome(run.path, outcome=verdict, onset_step=onset, tape_steps=1, tape_digest=tape.digest)
    assert replayed(run, "attn=flash_fixed")["train"]["steps"] == steps
    assert replayed(run, "train.steps=7")["train"] == {**recorded["train"], "steps": 7}


def test_a_mapping_contradicts_a_replay_like_its_keys(run: RunFolder, recorded: dict[str, Any]) -> None:
    assert replayed(run, "train={warmup_steps: 3}")["train"] == {**recorded["train"], "warmup_steps": 3, "steps": 1}
    with pytest.raises(UserError, match=r"train\.batch_size contradicts replay="):
        replayed(run, "train={batch_size: 8}")
    with pytest.raises(UserError, match=r"train\.lr contradicts resume="):
        resumed(run, "train={steps: 30, lr: 1}")


@pytest.mark.slow
def test_a_run_is_repeated_and_goes_on_without_its_text(tmp_path: Path, text_file: Path) -> None:
    """Its tokens are prepared: text that had been touched was prepared again, and without it both were refused."""

    def train(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = train_command(*arguments, tiny=arguments[0].startswith("run_name="), text_file=text)
        return warm.run(command, cwd=tmp_path, env=environment(), timeout=120)

    text = Path(shutil.copy(text_file, tmp_path / "words.txt"))
    train("run_name=original").check_returncode()
    whole = train("replay=original", "train.steps=16").stdout.split()[4]
    text.write_text("another " * 9)
    assert train("replay=original", "run_name=changed").returncode == 0
    text.unlink()
    told = train("replay=original", "run_name=gone").stderr
    assert "equal to runs/original, bit for bit" in told
    assert "tokenising" not in told
    (tmp_path / "data").rename(tmp_path / "moved")
    assert "give a file or folder that can be read" in train("resume=original", "train.steps=16").stderr
    assert train("resume=original", "train.steps=16", "data.root=moved").stdout.split()[4] == whole
    contradicts = train("replay=original", "data.root=moved", "data.vocab_size=9").stderr
    assert contradicts.startswith("error: data.vocab_size contradicts replay=original")
