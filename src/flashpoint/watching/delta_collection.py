"""The errors of δ in the steps that follow a capture, of which no tensors are kept: collected, and in a file beside it.

One JSON object a line, for a step and a layer: each measure of :class:`DeltaSample` is a list of sequences, each a list
of heads. Lines are added step by step: a loop that is killed leaves those of the steps before.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, model_validator

from flashpoint.diagnosis.call import AttentionCall, by_identity
from flashpoint.diagnosis.delta_bias import DeltaSample, delta_sample, joined_samples
from flashpoint.diagnosis.measure_table import SOURCES
from flashpoint.diagnosis.measures import Measures
from flashpoint.errors import UserError, layer_told
from flashpoint.files import shown, whole_lines
from flashpoint.runs import migrations
from flashpoint.runs.subfolders import CaptureFolder
from flashpoint.schema import Kind, Step, understood

if TYPE_CHECKING:  # to read a collection takes none
    from flashpoint.watching.notices import Notices

_REMEDY = "restore the file, or delete that line; tensors beside the file are diagnosed without it"
_PATIENCE = 100
"""Steps in a row that show none of the captured attentions, as where all batches are padded, after which no more are
awaited."""


class DeltaCollection:
    """The errors of δ in the captured layers, step by step, until there are enough sequences.

    Args:
        folder: of the capture.
        calls: that were captured.
        seen: attentions of the model in the captured step. In a step that calls fewer or more, or those of other
            modules, layers' numbers stand for others.
        wanted: sequences.
    """

    def __init__(self, folder: Path, calls: Sequence[AttentionCall], seen: int, wanted: int, notices: Notices) -> None:
        self._folder, self._seen, self._wanted, self._notices = folder, seen, wanted, notices
        self._captured = _modules_and_heads(calls)
        self._first_told = layer_told(calls[0].layer, calls[0].module)
        self._sequences = self._left_out = 0
        self._identities = list[str]()
        self._steps: list[int] = []

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(self._captured)

    @property
    def complete(self) -> bool:
        return self._sequences >= self._wanted

    @property
    def given_up(self) -> bool:
        return self._left_out >= _PATIENCE

    def take(self, calls: Sequence[AttentionCall], seen: int) -> None:
        """Add the sequences of a step, if it called what the captured one did."""
        self._left_out += 1
        ours = [call for call in calls if call.layer in self._captured]
        if seen != self._seen or _modules_and_heads(ours) != self._captured:
            return
        samples = {call.layer: delta_sample(call) for call in ours}
        fewest = min(samples.values(), key=lambda sample: len(sample.steps))
        count = len(fewest.steps)
        if not count:  # none is finite
            return
        self._folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed the run
        append(CaptureFolder(self._folder).new_delta, ours[0].step, samples)
        if not self._steps:
            self._notices.tell(f"step {ours[0].step:,}: from here on δ is measured, on {self._wanted:,} sequences")
        before = self._sequences
        self._sequences += count
        self._identities += fewest.identities
        self._left_out = 0
        self._steps.append(ours[0].step)
        if not self.complete and 4 * self._sequences // self._wanted > 4 * before // self._wanted:  # another quarter
            self._notices.tell(f"step {ours[0].step:,}: δ: {self._sequences:,} of {self._wanted:,} sequences")

    def tell(self) -> None:
        """Tell what there is to be diagnosed, if there is something."""
        if self.given_up:
            self._notices.tell(
                f"δ is measured no more: {_PATIENCE} steps in a row did not call the attentions of the captured step, "
                f"or only with numbers that are not finite; {self._sequences:,} of {self._wanted:,} sequences are there"
            )
        if not self._steps:
            return
        which = self._first_told if len(self._captured) == 1 else f"{len(self._captured)} layers"
        count = f"{self._sequences:,}" if self.complete else f"{self._sequences:,} of {self._wanted:,}"
        first, last, different = self._steps[0], self._steps[-1], len(by_identity(self._identities))
        of_them = f", {different:,} different" if different < self._sequences else ""
        self._notices.tell(
            f"step {last:,}: δ of {which} was measured on {count} sequences{of_them}, of steps {first:,} to {last:,}; "
            f"{shlex.join(['flashpoint', 'diagnose', str(shown(self._folder))])} counts them in"
        )


def _modules_and_heads(calls: Sequence[AttentionCall]) -> dict[int, tuple[str, int]]:
    """Return the module and the number of heads of each layer."""
    return {call.layer: (call.module, call.q.shape[1]) for call in calls}


class _Line(Kind):
    """Errors of δ in the sequences of a step, in a layer from 1."""

    step: Step
    layer: Annotated[int, Field(ge=1, lt=2**31)]
    identities: tuple[str, ...] | None
    measures: dict[str, list[list[float]]]

    @model_validator(mode="after")
    def _check(self) -> _Line:
        found = set(self.measures)
        sources = [source for source in SOURCES if source.bias.name in found]
        whole = {name for source in sources for name in source.names}
        without_rows = whole - {source.rows.name for source in sources}  # as older files are
        without_bounds = without_rows - {source.bound.name for source in sources}
        if not sources or found not in (whole, without_rows, without_bounds):
            names, expected = ", ".join(self.measures), ", ".join(SOURCES[0].names)
            raise ValueError(f"measures: found {names}; expected {expected}, or others of δ's errors")
        shapes = {(len(values), *map(len, values)) for values in self.measures.values()}
        if len(shapes) > 1 or len({*next(iter(shapes))[1:]}) != 1:
            raise ValueError("measures: expected as many sequences and heads of each")
        if self.identities is not None and len(self.identities) != next(iter(shapes))[0]:
            raise ValueError("identities: expected as many as there are sequences")
        return self


def append(path: Path, step: int, samples: Mapping[int, DeltaSample]) -> None:
    """Add what a step's sequences showed in some layers."""
    with path.open("a", encoding="utf-8") as file:
        for layer, sample in samples.items():
            measures = {name: values.tolist() for name, values in sample.measures.items()}
            line = {"step": step, "layer": layer, "identities": sample.identities, "measures": measures}
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> dict[int, DeltaSample]:
    """Return the sample of each layer. A last line cut short, as a killed loop leaves it, is left out.

    Raises:
        UserError: a line is damaged, or a layer has other heads or measures than before, or steps that are not later.
    """
    found: dict[int, list[DeltaSample]] = {}
    for number, text in enumerate(whole_lines(path, _REMEDY), 1):
        line = understood(text, _Line, f"{path}:{number}", _REMEDY, migrations.delta_line)
        measures = {name: torch.tensor(values, dtype=torch.float64) for name, values in line.measures.items()}
        count = len(next(iter(measures.values())))
        identities = line.identities or ("",) * count
        sample = DeltaSample((line.step,) * count, identities, _as_today(measures))
        before = found.setdefault(line.layer, [])
        if before and before[0].heads != sample.heads:
            raise UserError(f"{path}:{number}: {sample.heads} heads, and {before[0].heads} before; {_REMEDY}")
        if before and not before[0].measures.keys() & measures.keys():
            raise UserError(f"{path}:{number}: none of the measures that there were before; {_REMEDY}")
        if before and before[-1].steps[-1] >= line.step:
            raise UserError(f"{path}:{number}: step {line.step:,} after step {before[-1].steps[-1]:,}; {_REMEDY}")
        before.append(sample)
    return {layer: joined_samples(samples) for layer, samples in found.items()}


def _as_today(measures: Measures) -> Measures:
    """Return measures with what older files leave out: Σ |dO||O|, which is 0 for a sequence that has no error either,
    and how many rows tell, which nobody knows. Of infinitely many the error is 0, and sequences alone are judged by."""
    found = dict(measures)
    for source in SOURCES:
        if source.sum.name in measures:
            sums, biases = measures[source.sum.name], measures[source.bias.name]
            found.setdefault(source.bound.name, torch.where(biases == 0, 0.0, sums / biases))
            found.setdefault(source.rows.name, torch.full_like(sums, torch.inf))
    return found
