"""Records of every generation are read as records of today, and nobody changes one that was read."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flashpoint.errors import UserError
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.manifest import Environment, Resumption
from flashpoint.runs.run import Run
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


def _manifest(run: Run) -> None:
    run.manifest.hardware = "another"  # type: ignore[misc]


def _environment(run: Run) -> None:
    run.manifest.environment.torch = "1"  # type: ignore[misc]


def _outcome(run: Run) -> None:
    run.outcome.step = 3  # type: ignore[misc]


@pytest.mark.parametrize("change", [_manifest, _environment, _outcome])
def test_a_record_that_was_read_cannot_be_changed(tmp_path: Path, change: Callable[[Run], None]) -> None:
    run = Run.of_folder(folder_with(tmp_path))
    with pytest.raises((ValidationError, dataclasses.FrozenInstanceError)):
        change(run)


def test_a_damaged_part_of_an_old_record_is_one_line(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, manifest={**FIRST, "environment": [], "resumed": {}})
    with pytest.raises(UserError, match=r"manifest\.json: environment: found \[\], expected an object; restore"):
        folder.read_manifest()
