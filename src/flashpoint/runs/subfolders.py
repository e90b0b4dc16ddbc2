"""File names in the folders inside a run. :class:`flashpoint.runs.folder.RunFolder` says where these folders are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashpoint.errors import UserError

TENSORS = ".safetensors"
"""Suffix of a checkpoint's or a snapshot's tensors."""
SIDECAR = ".json"
"""Suffix of what is said of a checkpoint beside its tensors; one without it does not count."""
LAYERS = f"layer-*{TENSORS}"
"""Pattern of the files of a capture that hold tensors."""
_RESERVED = {"reference": "holds the evidence tables"}
_LONGEST = 200  # bytes of UTF-8; most file systems take 255, and files beside the folder have longer names
_OF_SELECTIONS = "/\\:*?["
"""Characters by which RUN is more than a name: a path, a glob, or EXPERIMENT:PATTERN."""


def packed(path: Path) -> Path:
    """Return where a file is compressed, as evidence keeps it: NAME.xz beside it."""
    return path.with_name(f"{path.name}.xz")


def as_kept(path: Path) -> Path:
    """Return the compressed file where there is one, else the path."""
    return packed(path) if packed(path).exists() else path


def of_step(folder: Path, step: int, suffix: str) -> Path:
    """Return where a folder holds what is of a step (:func:`by_step`)."""
    return folder / f"step-{step:09}{suffix}"


def by_step(folder: Path, suffix: str = "") -> dict[int, Path]:
    """Return what a folder holds under names of steps, ``step-NUMBER`` and the suffix, in the order of the steps."""
    places = {path.name.removeprefix("step-").removesuffix(suffix): path for path in folder.glob(f"step-*{suffix}")}
    return dict(sorted((int(number), path) for number, path in places.items() if number.isdecimal()))


def files_of_steps(folder: Path) -> Iterator[Path]:
    """Return the files of checkpoints, each sidecar before its tensors, and then what a kill left unfinished."""
    for pattern in (f"step-*{SIDECAR}", f"step-*{TENSORS}", ".step-*.partial"):
        yield from folder.glob(pattern)


def log_of_branch(folder: Path) -> Path:
    """Return where what a branch printed is kept while it trains, beside its folder."""
    return folder.with_suffix(".log")


@dataclass(frozen=True)
class CaptureFolder:
    """A capture: the attention calls of one step, and the errors of δ that were measured after it."""

    path: Path

    def layer(self, number: int) -> Path:
        """Return where the call of a layer, from 1, is written (:mod:`flashpoint.diagnosis.call`)."""
        return self.path / f"layer-{number:02}{TENSORS}"

    @property
    def layers(self) -> list[Path]:
        """The files of calls, in the order of their layers."""
        return sorted(self.path.glob(LAYERS), key=lambda file: (len(file.name), file.name))  # layer 100 after 99

    @property
    def batch(self) -> Path:
        """The step's batch, as ``torch.save`` writes it."""
        return self.path / "batch.pt"

    @property
    def batch_alone(self) -> str:
        """What is said of a capture that holds the batch and no attention; empty of any other one."""
        if self.layers or self.delta.is_file() or not self.batch.is_file():
            return ""
        how = "torch.load(…, weights_only=True) returns it, to make the step again"
        return f"{self.batch} is the batch of that step alone: {how}; save_batch=False leaves it out"

    @property
    def new_delta(self) -> Path:
        """Where errors of δ are added (:mod:`flashpoint.watching.delta_collection`)."""
        return self.path / "delta.jsonl"

    @property
    def delta(self) -> Path:
        """The errors of δ; compressed where the capture is kept as evidence."""
        return as_kept(self.new_delta)


@dataclass(frozen=True)
class ReportFolder:
    """A page of runs and its figures (:mod:`flashpoint.lab.report.page`)."""

    path: Path

    @property
    def page(self) -> Path:
        """One HTML file with the figures inside."""
        return self.path / "report.html"

    def figure(self, key: str) -> Path:
        """Return where a figure is written, PNG."""
        return self.path / "figures" / f"{key}.png"

    @property
    def figures(self) -> list[Path]:
        """The figures that are there, by name."""
        return sorted(self.figure("*").parent.glob(self.figure("*").name))


def check_name(name: str, key: str) -> None:
    """Refuse what is not one new folder that every verb finds by its name.

    Raises:
        UserError: with ``key``, which gives the name.
    """
    told = f"{key}={name if name.isprintable() else repr(name)}"
    if name in _RESERVED:
        raise UserError(f"{told}: reserved, {name} {_RESERVED[name]}; choose another name")
    if not name.strip():
        raise UserError(f"{told}: an empty name; choose one")
    if found := next((character for character in _OF_SELECTIONS if character in name), None):
        raise UserError(f"{told}: a name cannot hold {found}, it is one folder under runs_dir; choose another")
    if name[0] in ".-~ " or name[-1] == " ":
        raise UserError(f"{told}: a name cannot begin with {name[0]!r} or end with a space; choose another")
    if not name.isprintable():
        raise UserError(f"{told}: a name cannot hold characters that do not print; choose another")
    if (size := len(name.encode())) > _LONGEST:
        raise UserError(f"{key}={name[:20]}…: a name of {size:,} bytes; give at most {_LONGEST}")
