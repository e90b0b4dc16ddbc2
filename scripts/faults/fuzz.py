"""Bad input of every kind, and how it ends: ``python scripts/faults/fuzz.py --cases 2000``, a table on stdout.

It ends well if it is done or refused with status 2 in one line that says why. Hypothesis draws the cases, always the
same ones; each runs in a tree of its own, with limits of memory and time. ``tests/fuzz/`` has the kinds and the judge.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from flashpoint.cli.table import Table, show
from flashpoint.lab.progress_bar import progress_bar
from tests.fuzz.judge import FAULTS, Command, Ending, Kind, Tally, explore, kinds, told


def main() -> None:
    known = {kind.name: kind for kind in kinds()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="of each kind")
    parser.add_argument("--kind", action="append", choices=known, help="only this one; several times for several")
    options = parser.parse_args()
    tallies = {name: tried(known[name], options.cases) for name in options.kind or known}
    columns = ("bad input", "cases", "refused", "refused before PyTorch is imported", *FAULTS)
    rows = [
        (name, tally.cases, tally.refused, tally.without_pytorch, *(tally.faults[fault] for fault in FAULTS))
        for name, tally in tallies.items()
    ]
    show(Table(columns, rows), "markdown")
    sys.exit(any(tally.faults for tally in tallies.values()))


def tried(kind: Kind, cases: int) -> Tally:
    """Try cases of a kind; those that end badly, or are refused late, are told on stderr at once."""
    tally = Tally()

    def judged(case: Any, command: Command, ending: Ending) -> None:
        tally.add(ending, command)
        bar.update()
        if ending.faults(command) or (ending.status == 2 and ending.pytorch and not command.warm):
            bar.write(told(case, command, ending), file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder, progress_bar(cases, "case", kind.name) as bar:
        explore(kind, cases, Path(folder), judged)
    return tally


if __name__ == "__main__":
    main()
