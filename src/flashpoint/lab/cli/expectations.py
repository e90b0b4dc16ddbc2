"""``flashpoint claims --expected``: what was expected of runs before they ran, and what came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flashpoint.cli.table import Cell, Table, code
from flashpoint.errors import UserError
from flashpoint.lab.analysis.expectations_file import Commit, Expectation, ExpectationSet, read_expectations
from flashpoint.runs.folder import EVIDENCE

EXPECTED = Path("runs") / EVIDENCE / "expectations.yaml"

_COLUMNS = ("id", "expected", "written", "verdict", "came", "setting")


def expectations_table(path: Path, words: Sequence[str], verdicts: Sequence[str]) -> Table:
    """Return a row for each expectation that holds all words and has one of the verdicts, in the order of the file. A
    line has the number of each verdict.

    Raises:
        UserError: the file is wrong, or no expectation is left.
    """
    every = [
        (f"{one.id}/{number}", one, expectation)
        for one in read_expectations(path)
        for number, expectation in enumerate(one.expectations, 1)
    ]
    found = [
        (name, one, expectation)
        for name, one, expectation in every
        if _holds(name, one, expectation, words) and expectation.verdict in (verdicts or [expectation.verdict])
    ]
    if not found:
        raise UserError(f"{path}: no such expectations; drop --text or --verdict")
    rows = [
        [
            code(name),
            expectation.expected,
            _commits(expectation.written or one.written),
            expectation.verdict,
            expectation.came,
            one.setting,
        ]
        for name, one, expectation in found
    ]
    counts = Counter(expectation.verdict for _, _, expectation in found).most_common()
    told = ", ".join(f"{verdict} {count}" for verdict, count in counts)
    chosen = "" if len(found) == len(every) else f" {len(every)} expectations stand in the file."
    return Table(_COLUMNS, rows, f"Of {len(found)} expectations: {told}.{chosen}", further=("setting",))


def _commits(written: Sequence[Commit]) -> Cell | None:
    return Cell([one.commit for one in written], "; ".join(map(str, written))) if written else None


def _holds(name: str, one: ExpectationSet, expectation: Expectation, words: Sequence[str]) -> bool:
    parts = (name, one.setting, one.note, expectation.expected, expectation.came)
    text = " ".join(filter(None, parts)).casefold()
    return all(word.casefold() in text for word in words)
