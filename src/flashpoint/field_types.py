"""Types of configuration fields, which say what a field may hold, and marks that say what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

CHECKED = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False, extra="forbid")
"""How the sections are checked: a docstring describes each field, and no other key is taken."""
Count = Annotated[int, Field(gt=0)]
CountOrNone = Annotated[int, Field(ge=0)]
"""A count that may be 0, which means none."""
Share = Annotated[float, Field(ge=0, le=1)]
Folder = Annotated[str, Field(min_length=1)]

EXPERIMENT = "experiment"
"""Mark of a setting that makes an experiment: runs that differ in it, or in attention, data or seed, are not alike."""


@dataclass(frozen=True)
class FromTape:
    """Mark of a setting, or of a whole section, that a replay takes from its original."""

    reason: str
