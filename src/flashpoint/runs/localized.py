"""What ``flashpoint localize`` leaves in a run's folder."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from flashpoint.field_types import Count
from flashpoint.runs.outcome import Verdict
from flashpoint.schema import Kind, Number, Step


class KeptBranch(Kind):
    """A line of ``localize.jsonl``."""

    key: str
    """Digest of attention, start and steps."""
    attention: str
    start: Step
    steps: Count
    outcome: Verdict
    onset: Step | None
    norms: Annotated[list[Annotated[list[Number], Field(min_length=1)]], Field(min_length=1)]
    """Spectral norms of W_Q at the end, by layer and head."""
    seconds: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> KeptBranch:
        if len({len(of_layer) for of_layer in self.norms}) > 1:
            raise ValueError("norms: expected as many heads in each layer")
        return self


class Localized(Kind):
    """What was found, for the report."""

    heading: str
    columns: list[str]
    rows: list[list[Any]]
