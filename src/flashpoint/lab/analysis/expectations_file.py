"""The file of expectations: what was expected of runs before they ran, and what came."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from flashpoint.lab.analysis.claims_file import Id
from flashpoint.lab.analysis.listed import read_listed
from flashpoint.schema import CHECKED

Outcome = Literal["to come", "met", "in part", "not met", "undecided", "cannot be judged"]
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Commit:
    """A commit that had an expectation before its runs."""

    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")]
    """The first digits of its hash."""
    day: date | None = None
    """Its day. None: the commit is not in this repository's history, so that the order cannot be checked."""

    def __str__(self) -> str:
        return f"{self.commit}, {self.day or 'not in the history'}"


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Expectation:
    """One expectation, and what came."""

    expected: Text
    verdict: Outcome
    came: Text | None = None
    """What came. None: nothing yet, or nothing that the verdict does not say."""
    written: tuple[Commit, ...] = ()
    """Where it was written first, if elsewhere than its set."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class ExpectationSet:
    """Expectations of the same runs."""

    id: Id
    setting: Text | None = None
    """The runs, and what was known before."""
    written: tuple[Commit, ...] = ()
    """Where the expectations were written first. Empty: the history of the file tells."""
    expectations: Annotated[tuple[Expectation, ...], Field(min_length=1)]
    note: Text | None = None
    """What belongs to the set beside its expectations."""


def read_expectations(path: Path) -> list[ExpectationSet]:
    """Read and check a file of expectations.

    Raises:
        UserError: as :func:`.read_listed`.
    """
    return read_listed(path, "sets", ExpectationSet)
