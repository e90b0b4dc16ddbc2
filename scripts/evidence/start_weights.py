"""How much chance moves a branch's growth, by how much grows from its start: why starts of a localisation weigh.

    python scripts/evidence/start_weights.py runs/reference/localize_*seed-*.jsonl.xz

Reads the branches of localisations, and asks the rules of ``flashpoint localize`` which starts count. The residual of a
branch is its growth less what the other starts' share foretells, over what the error of that share adds to it: were
chance equally large at each start, so would be the residuals.
"""

from __future__ import annotations

import argparse
import json
import lzma
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashpoint.cli.table import Table, number, show
from flashpoint.errors import UserError, command_errors
from flashpoint.lab.analysis.intervals import slope_interval
from flashpoint.lab.cli.interval_cells import plus_minus
from flashpoint.lab.localize.growth import Effect, Start, fit

_TWIN = "flash_bf16 exact_row_sum=true"
_SECOND_TWIN = f"{_TWIN} probs.mode=none"
Norms = dict[str, dict[int, NDArray[np.float64]]]
"""Of W_Q at the end of a branch, by attention and start."""


def branches(path: Path) -> Norms:
    """Return those of the length that most branches have."""
    with lzma.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    steps = [row["steps"] for row in rows]
    norms: Norms = {}
    for row in rows:
        if row["steps"] == max(set(steps), key=steps.count):
            norms.setdefault(row["attention"], {})[row["start"]] = np.array(row["norms"])
    return norms


def counted(norms: Norms) -> list[Start]:
    run, twin, second = (norms[name] for name in ("flash_bf16", _TWIN, _SECOND_TWIN))
    starts = [
        Start(step, twin[step], np.log(run[step] / twin[step]), float(np.abs(np.log(second[step] / twin[step])).max()))
        for step in sorted(run)
    ]
    return fit(starts)


def effects(norms: Norms, starts: list[Start]) -> dict[str, Effect]:
    """Return what each other attention that was trained from all starts has of the run's growth."""
    found = {}
    for name, ends in norms.items():
        if name not in ("flash_bf16", _TWIN, _SECOND_TWIN) and all(start.step in ends for start in starts):
            run = {one.step: float(one.growth[one.growing].sum()) for one in starts}
            branch = {one.step: float(np.log(ends[one.step] / one.twin)[one.growing].sum()) for one in starts}
            found[name] = Effect(run, branch)
    return found


def residuals(effect: Effect) -> dict[int, float]:
    """Return the residual of each start, in nats, on the scale of chance at that start."""
    found = {}
    for step, growth in effect.run.items():
        others = [at for at in effect.run if at != step]
        share, _ = slope_interval([effect.run[at] for at in others], [effect.branch[at] for at in others])
        squares = sum(effect.run[at] ** 2 for at in others)
        found[step] = (effect.branch[step] - growth * share) / float(np.sqrt(1 + growth**2 / squares))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="LOCALIZE.jsonl.xz")
    with command_errors():
        files = parser.parse_args().files
        by_start, decided = [], []
        for path in files:
            norms = branches(path)
            starts = counted(norms)
            if len(starts) < 2:
                raise UserError(f"{path}: one start counts, and nothing foretells its growth; give runs with more")
            found = effects(norms, starts)
            # Heads alone are left out: which of them grow differs from start to start.
            left = [residuals(effect) for name, effect in found.items() if "heads=" not in name]
            run = path.name.partition(".")[0].removeprefix("localize_")
            for step, growth in next(iter(found.values())).run.items():
                rms = float(np.sqrt(np.mean([one[step] ** 2 for one in left])))
                by_start.append((growth, [run, step, *(number(x, ".2f") for x in (growth, rms, rms / growth))]))
            for name, effect in found.items():
                alike = plus_minus([effect.branch[step] / growth for step, growth in effect.run.items()], ".2f")
                decided.append([run, name, alike, effect.evidence])
        columns = ["run", "start", "growth, nats", "RMS residual, nats", "RMS residual over growth"]
        show(Table(columns, [row for _, row in sorted(by_start, key=itemgetter(0))]), "markdown")
        print()
        show(Table(["run", "attention", "share, starts alike", "share, starts weighed"], decided), "markdown")


if __name__ == "__main__":
    main()
