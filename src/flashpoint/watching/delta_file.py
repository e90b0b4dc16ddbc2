"""The file of a capture's folder that has the errors of δ in later sequences, of which no tensors are kept.

One JSON object a line, for a step and a layer: each measure of :class:`DeltaSample` is a list of sequences, each a list
of heads. Lines are added step by step: a loop that is killed leaves those of the steps before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, model_validator

from flashpoint.diagnosis.delta_sample import DeltaSample, joined_samples
from flashpoint.diagnosis.measure_table import SOURCES
from flashpoint.diagnosis.measures import Measures
from flashpoint.errors import UserError
from flashpoint.runs.lines import whole_lines
from flashpoint.schema import Kind, Step, understood

_REMEDY = "restore the file, or delete that line; tensors beside the file are diagnosed without it"


class _Line(Kind):
    """Errors of δ in the sequences of a step, in a layer from 1."""

    step: Step
    layer: Annotated[int, Field(ge=1, lt=2**31)]
    identities: list[str] | None = None  # older files have none
    measures: dict[str, list[list[float]]]

    @model_validator(mode="after")
    def _check(self) -> _Line:
        found = set(self.measures)
        sources = [source for source in SOURCES if source.bias.name in found]
        whole = {name for source in sources for name in source.names}
        without_bounds = whole - {source.bound.name for source in sources}  # as older files are
        if not sources or found not in (whole, without_bounds):
            names, expected = ", ".join(self.measures), ", ".join(SOURCES[0].names)
            raise ValueError(f"measures: found {names}; expected {expected}, or others of δ's errors")
        shapes = {(len(of), *map(len, of)) for of in self.measures.values()}
        if len(shapes) > 1 or len({*next(iter(shapes))[1:]}) != 1:
            raise ValueError("measures: expected as many sequences and heads of each")
        if self.identities is not None and len(self.identities) != next(iter(shapes))[0]:
            raise ValueError("identities: expected as many as there are sequences")
        return self


def append(path: Path, step: int, samples: Mapping[int, DeltaSample]) -> None:
    """Add what a step's sequences showed in some layers."""
    with path.open("a") as file:
        for layer, sample in samples.items():
            measures = {name: of.tolist() for name, of in sample.measures.items()}
            line = {"step": step, "layer": layer, "identities": sample.identities, "measures": measures}
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> dict[int, DeltaSample]:
    """Return the sample of each layer. A last line cut short, as a killed loop leaves it, is left out.

    Raises:
        UserError: a line is damaged, or a layer has other heads or measures than before, or steps that are not later.
    """
    found: dict[int, list[DeltaSample]] = {}
    for number, text in enumerate(whole_lines(path, _REMEDY), 1):
        line = understood(text, _Line, f"{path}:{number}", _REMEDY)
        measures = {name: torch.tensor(of, dtype=torch.float64) for name, of in line.measures.items()}
        count = len(next(iter(measures.values())))
        identities = tuple(line.identities or ("",) * count)
        sample = DeltaSample((line.step,) * count, identities, _with_bounds(measures))
        before = found.setdefault(line.layer, [])
        if before and before[0].heads != sample.heads:
            raise UserError(f"{path}:{number}: {sample.heads} heads, and {before[0].heads} before; {_REMEDY}")
        if before and not before[0].measures.keys() & measures.keys():
            raise UserError(f"{path}:{number}: none of the measures that there were before; {_REMEDY}")
        if before and before[-1].steps[-1] >= line.step:
            raise UserError(f"{path}:{number}: step {line.step:,} after step {before[-1].steps[-1]:,}; {_REMEDY}")
        before.append(sample)
    return {layer: joined_samples(samples) for layer, samples in found.items()}


def _with_bounds(measures: Measures) -> Measures:
    """Return measures with Σ |dO||O|, which older files leave out; 0 for a sequence that has no error either."""
    found = dict(measures)
    for source in SOURCES:
        if source.sum.name in measures and source.bound.name not in measures:
            sums, biases = measures[source.sum.name], measures[source.bias.name]
            found[source.bound.name] = torch.where(biases == 0, 0.0, sums / biases)
    return found
