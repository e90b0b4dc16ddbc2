"""What a replay keeps of the original run, and what the command line may change."""

from __future__ import annotations

import copy
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from flashpoint.errors import UserError, notify
from flashpoint.lab.build_config import keys, put, value_at
from flashpoint.lab.data.tape import Tape
from flashpoint.lab.stored_config import config_to_repeat
from flashpoint.numerics.variant import ROUNDING_POINTS
from flashpoint.runs.folder import RunFolder
from flashpoint.schema import FromTape

_FIXED = {
    "experiment": "the configuration comes from the run",
    **{key.name: mark.reason for key in keys() for mark in key.marks if isinstance(mark, FromTape)},
}
_FREE = ("data.root", "model.score_cap", "model.shift_keys")
"""Keys of fixed sections that neither batches nor initial weights depend on."""
_CHECKPOINTED = ("optimizer.name", "model.shift_keys")
"""Keys on which it depends what tensors a checkpoint holds."""
_NOT_INHERITED = (
    "replay",
    "resume",
    "from_step",
    "allow_world_size_change",
    "trust",
    "runs_dir",
    "run_name",
    "data.root",  # a folder is written where this command line says; tokens are read where the run had them, too
)
BEYOND_ONSET = 1000
"""Steps after the original's onset that a replay goes on for, so that it is seen to hold."""
_WHERE = ("wandb", "project", "entity", "paths")
"""Of W&B: whether and where it gets a run, and with this machine's paths."""
_ROUND = 100  # steps
OF_A_RESUMPTION = (
    "resume", "runs_dir", "data.root", "allow_world_size_change", "trust", "train.steps", "probes.strict", "tracking",
    "checkpoints",
)  # fmt: skip
"""Keys, and groups of them, that ``resume`` takes beside the run's own configuration."""


def replayed_values(composed: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return the original's configuration with the command line's changes.

    Args:
        composed: what Hydra composed, of the shape of ``Config``; its ``replay`` names the run.
        overrides: the command line's, e.g. ``attn=flash_fixed`` or ``train.lr=1e-3``.

    Returns:
        Values of the shape of ``Config``. Unless ``train.steps`` is among the overrides, the replay of a run that
        exploded goes on for :data:`BEYOND_ONSET` steps after its onset, and any other one ends where the tape does.

    Raises:
        UserError: no run or tape is there, or an override contradicts the replay.
    """
    if composed["resume"] is not None:
        raise UserError(f"resume={composed['resume']} and replay={composed['replay']}: give one of the two")
    original = RunFolder.open(composed["replay"], composed["runs_dir"])
    config = config_to_repeat(original.config)
    values = config.to_dict()
    keys = _named(overrides)
    for key in keys:
        if reason := _fixed_by(key):
            raise UserError(f"{key} contradicts replay={composed['replay']}: {reason}; drop one of the two")
    put(values, "train.steps", _steps(original))
    for name in _NOT_INHERITED:
        put(values, name, value_at(composed, name))
    put(values, "tracking.wandb", composed["tracking"]["wandb"])  # uploaded where its own command asks for it
    _leave_tracking(values, composed, keys)
    put(values, "probes.weights_against", None)  # the original's twin differs from the original in one thing
    # Another attention keeps the formats in which the original was coarse: they belong to its experiment.
    for key in keys:
        _take(key, composed, values)
        if key == "attn":
            for point in ROUNDING_POINTS:
                put(values, f"attn.{point}.bits", getattr(config.attn, point).bits)
    for key in _CHECKPOINTED:
        own, kept = value_at(values, key), value_at(config.to_dict(), key)
        if values["from_step"] and own != kept:
            word = key.removesuffix(".name")
            raise UserError(
                f"{word}={own} contradicts from_step={values['from_step']}: the checkpoints of {original.path} are of "
                f"{word}={kept}; replay it from the start"
            )
    return values


def resumed_values(composed: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return the interrupted run's own configuration.

    Args:
        composed: what Hydra composed, of the shape of ``Config``; its ``resume`` names the run.
        overrides: the command line's; :data:`OF_A_RESUMPTION`. Probes may be named, as a consent to their code, and not
            be changed.

    Raises:
        UserError: no run is there, it is thinned or complete, or an override would make it another run.
    """
    folder = RunFolder.open(composed["resume"], composed["runs_dir"])
    if folder.packed_metrics.exists():
        raise UserError(
            f"resume={composed['resume']}: a thinned run has no checkpoints; {folder.replay_setting} repeats it"
        )
    if folder.watched:
        raise UserError(f"resume={composed['resume']}: a watched run; the loop that made it alone goes on with it")
    values = config_to_repeat(folder.config).to_dict()
    keys = _named(overrides)
    for key in keys:
        named = key == "probes.attention" and list(value_at(composed, key)) == list(value_at(values, key))
        if not named and key not in OF_A_RESUMPTION and key.split(".")[0] not in OF_A_RESUMPTION:
            raise UserError(
                f"{key} contradicts resume={composed['resume']}: a resumed run keeps its settings; "
                + _instead(key, folder.replay_setting)
            )
    _leave_tracking(values, composed, keys)
    for key in keys:
        _take(key, composed, values)
    if folder.outcome.is_file():
        outcome = folder.read_outcome()
        ended = outcome.outcome != "stable" or outcome.step >= value_at(values, "train.steps")
        if ended and not outcome.interrupted:
            draws = shlex.join(["flashpoint", "report", str(folder.path)])  # what a kill after the verdict left out
            figures = "" if folder.figure.is_file() else f", {draws} draws it"
            raise UserError(
                f"resume={composed['resume']}: the run is complete ({outcome.outcome} at step {outcome.step:,}); "
                f"replay=RUN repeats it, train.steps=N goes on with a stable one{figures}"
            )
    put(values, "data.root", composed["data"]["root"])
    given = {name: composed[name] for name in ("runs_dir", "allow_world_size_change", "trust")}
    return {**values, **given, "resume": str(folder.path)}


def _fixed_by(key: str) -> str:
    """Return why a replay takes no other value of a key; nothing where it does."""
    fixed = (reason for one, reason in _FIXED.items() if key == one or key.startswith(f"{one}."))
    return "" if key in _FREE else next(fixed, "")


def _instead(key: str, replay: str) -> str:
    """Return how a key that a resumed run keeps is changed: in a branch, a replay or another run."""
    if _fixed_by(key):
        return "drop it, or train a run of its own with it"
    if key in ("optimizer", *_CHECKPOINTED):  # a branch begins with what a checkpoint holds
        return f"repeat it from the start with {replay} {key}=…"
    return f"branch with {replay} from_step=STEP {key}=…"


def _leave_tracking(values: dict[str, Any], composed: dict[str, Any], keys: Sequence[str]) -> None:
    """Take from the command line whether and where W&B gets the run, unless it trusts the records. Tell what is left
    out of an upload."""
    if composed["trust"] and "trust" in keys:  # not of a YAML file
        return
    recorded, given = values["tracking"], composed["tracking"]
    own = [name for name in _WHERE if "tracking" not in keys and f"tracking.{name}" not in keys]
    left = [f"tracking.{name}={recorded[name]}" for name in own if recorded[name] not in (None, given[name])]
    if left and "online" in (recorded["wandb"], given["wandb"]):
        notify(f"{' '.join(left)}: of the run's records, and not taken over; trust=true takes it over, or give it here")
    kept = {} if recorded["wandb"] == "online" else {"wandb": recorded["wandb"]}
    recorded |= {**{name: given[name] for name in _WHERE}, **kept}


def _named(overrides: list[str]) -> list[str]:
    """Return the dotted keys that overrides set, ``train.lr`` of ``train={lr: 1}``; groups before the keys inside
    them."""

    def leaves(key: str, value: Any) -> Iterator[str]:
        if not isinstance(value, dict):
            yield key
            return
        for name, inside in value.items():
            yield from leaves(f"{key}.{name}", inside)

    parsed = OverridesParser.create().parse_overrides(overrides)
    keys = [key for override in parsed for key in leaves(override.key_or_group, override.value())]
    return sorted(keys, key=lambda key: key.count("."))


def _take(key: str, composed: dict[str, Any], values: dict[str, Any]) -> None:
    """Set one key, or a whole group, to what was composed."""
    section, _, last = key.rpartition(".")
    if last in (value_at(composed, section) if section else composed):
        put(values, key, copy.deepcopy(value_at(composed, key)))


def _steps(original: RunFolder) -> int:
    """Return how many steps a replay makes; one that explodes again, as the original did, ends with it."""
    recorded = _recorded_steps(original)
    onset = original.read_outcome().onset_step if original.outcome.is_file() else None
    if onset is None:
        return recorded
    return max(recorded, math.ceil((onset + BEYOND_ONSET) / _ROUND) * _ROUND)


def _recorded_steps(original: RunFolder) -> int:
    tape = Tape.read(original.tape)
    # A killed run has no outcome, and its tape is what it is; a finished run's tape has a known length.
    if original.outcome.is_file():
        recorded = original.read_outcome()
        if (tape.steps, tape.digest) != (recorded.tape_steps, recorded.tape_digest):
            raise UserError(
                f"{original.tape}: {tape.steps:,} steps with digest {tape.digest}, the run recorded "
                f"{recorded.tape_steps:,} with {recorded.tape_digest}: cut short or edited; restore the file"
            )
    if not tape.steps:
        raise UserError(f"{original.tape}: holds no step; replay another run")
    return tape.steps
