"""What ``flashpoint localize`` leaves in a run's folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from flashpoint.runs.outcome import Verdict
from flashpoint.schema import Count, Kind, Number, Step


class KeptBranch(Kind):
    """A line of ``localize.jsonl``."""

    key: str
    """Digest of attention, start and steps."""
    attention: str
    start: Step
    steps: Count
    seconds: Annotated[float, Field(ge=0)]
    outcome: Verdict
    onset: Step | None
    norms: Annotated[tuple[Annotated[tuple[Number, ...], Field(min_length=1)], ...], Field(min_length=1)]
    """Spectral norms of W_Q at the end, by layer and head."""

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, and heads of a layer."""
        return len(self.norms), len(self.norms[0])

    @model_validator(mode="after")
    def _check(self) -> KeptBranch:
        if len({len(of_layer) for of_layer in self.norms}) > 1:
            raise ValueError("norms: expected as many heads in each layer")
        return self


class Localized(Kind):
    """What was found, for the report."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
