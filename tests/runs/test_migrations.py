"""Records of every generation are read as records of today, and nobody changes one that was read."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from flashpoint.detector import DetectorConfig, ExplosionDetector
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.errors import UserError
from flashpoint.lab.config import Config
from flashpoint.lab.stored_config import config_to_repeat
from flashpoint.lab.training.checkpoints import State
from flashpoint.numerics.choices import NEAREST, Rounding
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs import migrations
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.manifest import Environment, Resumption
from flashpoint.runs.run import Run
from flashpoint.schema import understood
from tests.records import write_run

ATTN = {"name": "flash_bf16"}
FIRST = {
    "started": "2026-11-20T18:35:01Z",
    "hardware": "NVIDIA H200",
    "environment": {
        "flashpoint": "0.0.1", "commit": "8c8d0cf4", "python": "3.11.2", "torch": "2.13.0", "cuda": "13.0",
        "numpy": "2.3.5", "platform": "Linux", "hardware": "NVIDIA H200", "command": ["train.py", "seed=1"],
    },
    "data": {"path": "data/packages", "format_version": 1, "fingerprint": "ab12", "documents": 3},
    "initial_weights": "c0ffee",
    "parameters": 7_000_000,
}  # fmt: skip
"""The keys of a manifest of the first version."""
RESUMED = {
    **FIRST,
    "environment": {**FIRST["environment"], "source": "f00d", "triton": "3.6.0", "sdpa": None, "tiles": None},
    "parent": {"run": "runs/whole", "from_step": 300},
    "resumed": [{"time": "2026-11-21T10:00:00Z", "step": 40, "processes": 2, "environment": FIRST["environment"]}],
}
"""Those of a branch that went on, before runs had twins."""
WATCHED = {
    "started": "2026-11-27T10:00:00Z",
    "hardware": "a CPU",
    "environment": {"flashpoint": "0.1", "torch": "2.13.0", "python": "3.11.2", "command": ["loop.py"]},
    "data": {},
    "initial_weights": "mine",
    "parameters": 10,
    "parent": None,
    "twin": None,
    "watched": True,
}
"""Those of a watched loop before it told its first step."""
SHAPE = {"n_layer": 2, "n_head": 4, "d_model": 32, "context": 16}

OLDER: dict[str, Any] = {
    "name": "flash_bf16", "kernel": "flash", "scores": "nearest", "scores_bits": 7, "probs": "nearest", "probs_bits": 7,
    "out_unnormalized": "nearest", "out_unnormalized_bits": 1, "out_unnormalized_when": "final", "out": "nearest",
    "out_bits": 7, "grad_scores": "nearest", "grad_scores_bits": 7, "shift": "rowmax",
}  # fmt: skip
"""An attention of a version that had a mode and its bits in two keys."""


def folder_with(tmp_path: Path, **files: Mapping[str, Any]) -> RunFolder:
    write_run(tmp_path / "run", ATTN)
    for name, values in files.items():
        (tmp_path / f"run/{name}.json").write_text(json.dumps(values))
    return RunFolder(tmp_path / "run")


@pytest.mark.parametrize(
    ("stored", "origin", "began_at", "tiles", "processes", "watched"),
    [
        (FIRST, None, 0, None, [], False),
        (RESUMED, ("runs/whole", 300), 300, None, [2], False),
        (WATCHED, None, 0, None, [], True),
        ({**WATCHED, "first_step": 70, "not_recorded": ["a mask"]}, None, 70, None, [], True),
    ],
)
def test_a_manifest_of_every_generation_is_one_of_today(
    tmp_path: Path,
    stored: Mapping[str, Any],
    origin: object,
    began_at: int,
    tiles: object,
    processes: list[int],
    watched: bool,
) -> None:
    manifest = folder_with(tmp_path, manifest=stored).read_manifest()
    assert (manifest.origin, manifest.began_at, manifest.watched) == (origin, began_at, watched)
    assert manifest.environment.tiles == tiles
    assert [one.processes for one in manifest.resumed] == processes
    assert manifest.not_recorded == tuple(stored.get("not_recorded", ()))
    assert manifest.data.fingerprint == stored["data"].get("fingerprint")
    assert (manifest.place, manifest.day) == (f"{stored['hardware']}, torch 2.13.0", stored["started"][:10])


@pytest.mark.parametrize(("interrupted", "val_step"), [(None, 900), ("SIGTERM", None)])
def test_an_outcome_of_the_first_version_was_validated_at_its_end_unless_interrupted(
    tmp_path: Path, interrupted: str | None, val_step: int | None
) -> None:
    first = {
        "outcome": "stable", "step": 900, "onset_step": None, "loss": "inf", "val_loss": 2.25, "digest": "d",
        "weights_digest": "w", "tape_digest": "t", "tape_steps": 900, "trajectory_digest": "e",
        "interrupted": interrupted, "seconds": 1.5, "run": "runs/r",
    }  # fmt: skip
    outcome = folder_with(tmp_path, outcome=first).read_outcome()
    assert (outcome.val_step, outcome.nonfinite, outcome.chain_digest) == (val_step, None, None)
    assert outcome.loss == float("inf")
    assert outcome.to_dict() == {
        **{name: value for name, value in first.items() if name != "trajectory_digest"},
        **{"val_step": val_step, "nonfinite": None, "chain_digest": None},
    }


def test_what_a_resumption_adds_is_all_that_changes_in_a_manifest(tmp_path: Path) -> None:
    stored = {**RESUMED, "later": [1]}
    folder = folder_with(tmp_path, manifest=stored)
    here = folder.read_manifest().environment
    folder.note_resumption(Resumption(time="2026-11-28T09:00:00Z", step=80, processes=1, environment=here))
    changed = json.loads(folder.manifest.read_text())
    assert Environment.model_validate_json(json.dumps(changed["resumed"].pop()["environment"])) == here
    assert list(changed.items()) == list(stored.items())


def attention(stored: dict[str, Any]) -> AttentionVariant:
    return AttentionVariant.from_dict(migrations.config({"attn": stored})["attn"])


def test_records_with_two_fields_a_rounding_stay_readable() -> None:
    expected = AttentionVariant(name="flash_bf16", scores=NEAREST, out_unnormalized=Rounding("nearest", 1))
    assert attention(OLDER) == expected
    nested = {**OLDER, "layers": [1], "elsewhere": {**OLDER, "name": "other", "scores_bits": 3}}
    elsewhere = attention(nested).elsewhere
    assert elsewhere == dataclasses.replace(expected, name="other", scores=Rounding("nearest", 3))
    without_bits = {name: value for name, value in OLDER.items() if not name.endswith("_bits")}
    assert attention(without_bits).out_unnormalized == NEAREST


CONFIG = {name: value for name, value in Config(seed=5).to_dict().items() if name != "allow_world_size_change"}
NO_LATER = {
    "checkpoints": None, "probes": None, "model": {"init_seed", "init_ulps"},
    "train": {"checksum_interval", "precision", "order_seed", "deterministic"},
}  # fmt: skip
"""Sections, and keys of sections, that the first version did not have."""


def first_version() -> dict[str, Any]:
    values = {name: value for name, value in CONFIG.items() if NO_LATER.get(name, "") is not None}
    for name in ("model", "train"):
        values[name] = {key: value for key, value in values[name].items() if key not in NO_LATER[name]}
    return {**values, "attn": OLDER}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"probes.weights_interval": 50, "train.precision": "bf16", "checkpoints.interval": 500}),
        ({"probes": {"w_q_interval": 7, "attention": ["ties"]}}, {"probes.weights_interval": 7}),
        ({"probes": {"attention": ["ties", "an_older_one"]}}, {"probes.attention": ("ties", "an_older_one")}),
        ({"tracking": {**CONFIG["tracking"], "wandb": "auto"}}, {"tracking.wandb": "offline"}),
        ({"checkpoints": {"interval": 5, "budget_gib": 1}}, {"checkpoints.interval": 5, "checkpoints.budget_gib": 1.0}),
    ],
)
def test_a_configuration_of_every_generation_has_the_settings_of_today(
    tmp_path: Path, change: dict[str, Any], expected: dict[str, Any]
) -> None:
    folder = folder_with(tmp_path, config={**first_version(), **change})
    config = folder.read_config()
    assert isinstance(config, Config)
    assert {key: attrgetter(key)(config) for key in expected} == expected
    assert config.attn == attention(OLDER)
    untouched = ("model", "train", "detector", "data", "tracking")
    assert [getattr(config, name) for name in untouched] == [getattr(Config(), name) for name in untouched]
    assert config.seed == 5


@pytest.mark.parametrize(("name", "only"), migrations.REMOVED_CHOICES.items())
def test_a_choice_that_is_gone_is_read_as_the_one_that_every_run_made(tmp_path: Path, name: str, only: Any) -> None:
    def read(value: Any) -> AttentionVariant:
        attn = {"name": "flash_fp32", "layers": [1], "elsewhere": {"name": "other", name: value}, name: value}
        folder = tmp_path / str(value)
        folder.mkdir()
        config = folder_with(folder, config={**first_version(), "attn": attn}).read_config()
        assert isinstance(config, Config)
        return config.attn

    others = AttentionVariant(name="other")
    assert read(only) == AttentionVariant(name="flash_fp32", layers=(1,), elsewhere=others)
    with pytest.raises(UserError, match=name):
        read(not only)


def test_choices_that_a_kernel_of_another_library_never_read_are_passed_over(tmp_path: Path) -> None:
    """Such a kernel once took any. Formats stay: a replay with another attention inherits them."""
    attn = {"name": "sdpa beta=2.0", "kernel": "sdpa", "beta": 2.0, "out": {"mode": "none", "bits": 1}}
    other = {"name": "flex", "kernel": "flex", "center_keys": True, "fp16_inside": True}
    config = {**CONFIG, "attn": {**attn, "layers": [1], "elsewhere": other}}
    elsewhere = AttentionVariant(name="flex", kernel="flex", fp16_inside=True)
    expected = AttentionVariant(
        name="sdpa beta=2.0", kernel="sdpa", out=Rounding("nearest", 1), layers=(1,), elsewhere=elsewhere
    )
    assert folder_with(tmp_path, config=config).read_config().attn == expected


def test_a_setting_of_a_newer_version_is_passed_over_but_not_in_a_repetition(tmp_path: Path) -> None:
    train = {**CONFIG["train"], "later": 1}
    folder = folder_with(tmp_path, config={**CONFIG, "train": train})
    assert folder.read_config() == Config(seed=5)
    with pytest.raises(UserError, match=r"^train\.later: no such key"):
        config_to_repeat(folder.config)


@pytest.mark.parametrize(
    ("stored", "name", "shape", "steps"),
    [
        ({"attn": {"name": "sdpa"}, "model": SHAPE, "train": {}}, "sdpa", {**SHAPE, "modules": ()}, None),
        ({"train": {"steps": 9, "warmup_steps": 3}}, "unknown", None, 9),
        # The first versions had the defaults of the trainer there.
        ({**first_version(), "attn": {"name": "unknown"}}, "unknown", None, 20_000),
    ],
)
def test_what_is_known_of_a_loop_of_every_generation(
    tmp_path: Path, stored: dict[str, Any], name: str, shape: object, steps: int | None
) -> None:
    detector = {"window": 100, "margin": 0.3, "hold_steps": 50}
    config = folder_with(tmp_path, manifest=WATCHED, config={"detector": detector, **stored}).read_config()
    assert (config.seed, config.attn.name, config.train.steps) == (None, name, steps)
    assert config.train.batch_size is None
    assert config.to_dict().get("model") == shape


LATER = {"is_causal": False, "scale": 0.5, "layer": 2, "step": 30, "attention": "sdpa"}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (None, (True, 0.25, 1, 0, "unknown", (), ())),
        ({"layer": 3}, (True, 0.25, 3, 0, "unknown", (), ())),
        (LATER, (False, 0.5, 2, 30, "sdpa", (), ())),
        ({**LATER, "identities": ["a"], "together": [1, 2]}, (False, 0.5, 2, 30, "sdpa", ("a",), (1, 2))),
    ],
)
def test_a_capture_of_every_generation_is_read(
    tmp_path: Path, metadata: dict[str, Any] | None, expected: tuple[object, ...]
) -> None:
    tensors = {name: torch.zeros(1, 1, 4, 16) for name in ("q", "k", "v", "grad_out")}
    save_file(tensors, tmp_path / "call.safetensors", metadata and {"flashpoint": json.dumps(metadata)})
    call = AttentionCall.read(tmp_path / "call.safetensors")
    call.write(tmp_path / "anew.safetensors")
    for read in (call, AttentionCall.read(tmp_path / "anew.safetensors")):
        told = (
            read.form.is_causal,
            read.form.scale,
            read.layer,
            read.step,
            read.attention,
            read.identities,
            read.together,
        )
        assert told == expected


def test_a_branch_of_a_version_that_timed_none_took_no_time(tmp_path: Path) -> None:
    line = {
        "key": "k",
        "attention": "a",
        "start": 5,
        "steps": 9,
        "outcome": "stable",
        "onset": None,
        "norms": [["nan"]],
    }
    folder = folder_with(tmp_path)
    folder.branch_log.write_text(json.dumps(line) + "\n")
    (branch,) = folder.read_branches()
    assert (branch.seconds, branch.shape, branch.steps) == (0.0, (1, 1), 9)
    folder.append_branch(branch)
    keys = ["key", "attention", "start", "steps", "seconds", "outcome", "onset", "norms"]
    assert list(json.loads(folder.branch_log.read_text().splitlines()[1])) == keys


def test_the_state_of_a_loop_that_kept_no_validation_is_read(tmp_path: Path) -> None:
    detector = {"losses": [2.5], "minimum": "inf", "above": 0, "verdict": "stable"}
    detector |= {"onset_step": None, "last_step": None}
    stored = {"step": 4, "loss": 2.5, "chain": "c", "detector": detector, "probes": {}}
    state = understood(json.dumps(stored), State, "state", migration=migrations.loop_state)
    assert (state.val_loss, state.val_step, state.probes.attention, state.probes.sentinel) == (None, None, {}, None)
    resumed = ExplosionDetector(DetectorConfig())
    resumed.load_state(state.detector)
    assert resumed.state() == state.detector


def _manifest(run: Run) -> None:
    run.manifest.hardware = "another"  # type: ignore[misc]


def _environment(run: Run) -> None:
    run.manifest.environment.torch = "1"  # type: ignore[misc]


def _outcome(run: Run) -> None:
    run.outcome.step = 3  # type: ignore[misc]


def _config(run: Run) -> None:
    run.config.train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("change", [_manifest, _environment, _outcome, _config])
def test_a_record_that_was_read_cannot_be_changed(tmp_path: Path, change: Callable[[Run], None]) -> None:
    run = Run.of_folder(folder_with(tmp_path))
    with pytest.raises((ValidationError, dataclasses.FrozenInstanceError)):
        change(run)


def test_a_damaged_part_of_an_old_record_is_one_line(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, manifest={**FIRST, "environment": [], "resumed": {}})
    with pytest.raises(UserError, match=r"manifest\.json: environment: found \[\], expected an object; restore"):
        folder.read_manifest()
