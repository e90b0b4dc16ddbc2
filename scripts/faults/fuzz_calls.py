"""Calls of attention of every form, and what a watch makes of them: ``python scripts/faults/fuzz_calls.py``.

    python scripts/faults/fuzz_calls.py --cases 2000 --processes 2
    python scripts/faults/fuzz_calls.py --case 127                  # one, and all that is known of it
    python scripts/faults/fuzz_calls.py --direct --cases 6000       # diagnosed as they are drawn, without a watch

Each is recorded and right, or refused with a reason; anything else is told on stderr at once. The tables count the ways
and the reasons. Without a watch none is left out that a diagnosis takes. ``tests/fuzz/drawn_calls.py`` draws the calls,
``tests/fuzz/watched_calls.py`` judges them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from flashpoint.cli.table import Table, show
from flashpoint.lab.progress_bar import progress_bar
from tests.fuzz.drawn_calls import WAYS, drawn
from tests.fuzz.watched_calls import FAULTS, Ending, directly, ending


def ended(number: int, *, direct: bool) -> Ending:
    """Return how a call ends."""
    if direct:
        return directly(drawn(number))
    with tempfile.TemporaryDirectory() as folder:
        return ending(drawn(number), Path(folder))


def start() -> None:
    """Prepare a process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # PyTorch's own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--direct", action="store_true", help="diagnose them without a watch")
    options = parser.parse_args()
    first, count = (options.first, options.cases) if options.case is None else (options.case, 1)
    numbers = range(first, first + count)
    by_way: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    why: Counter[tuple[str, str]] = Counter()
    with (
        ProcessPoolExecutor(options.processes, get_context("spawn"), start) as processes,
        progress_bar(count, "call", "calls") as bar,
    ):
        endings = processes.map(partial(ended, direct=options.direct), numbers, chunksize=8)
        for number, found in zip(numbers, endings, strict=True):
            bar.update()
            by_way[drawn(number).way][found.kind] += 1
            if found.why:
                why[found.kind, found.why if found.kind not in FAULTS else ""] += 1
            if found.kind in FAULTS or options.case is not None:
                bar.write(f"{found.kind}: {drawn(number)}\n  {found.why}", file=sys.stderr)
    columns = ("called as", "calls", "recorded", "refused", "not taken", *FAULTS)
    rows = [(way, ends.total(), *(ends[kind] for kind in columns[2:])) for way, ends in by_way.items()]
    show(Table(columns, rows), "markdown")
    show(Table(("", "why", "calls"), [(*one, times) for one, times in why.most_common()]), "markdown")
    sys.exit(any(ends[fault] for ends in by_way.values() for fault in FAULTS))


if __name__ == "__main__":
    main()
