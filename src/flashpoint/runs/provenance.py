"""Where and when recorded runs were made, and on which data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from flashpoint.runs.run import Run


def provenance(runs: Sequence[Run]) -> str:
    """Return one line with the hardware, PyTorch versions, corpora, seeds and days of the runs; corpora and
    seeds are left out of runs of other loops, which do not tell them."""
    hardware = {run.manifest.place for run in runs}
    own = [run for run in runs if not run.watched]
    data = {(run.manifest.data.fingerprint or "unknown")[:8] for run in own}
    days = sorted({run.manifest.day for run in runs})
    between = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    what = f"corpus {', '.join(sorted(data))}; seeds {ranges(run.seed for run in own)}; " if own else ""
    return f"{'; '.join(sorted(hardware))}; {what}{between}"


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as people do: ``0, 2 to 4`` for 0, 2, 3 and 4."""
    known = sorted(set(numbers))
    gaps = [(before, after) for before, after in pairwise(known) if after > before + 1]
    starts, ends = [known[0], *(after for _, after in gaps)], [*(before for before, _ in gaps), known[-1]]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))
