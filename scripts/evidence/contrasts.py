"""Treatment against control, a row for each contrast: ``python scripts/evidence/contrasts.py``.

runs/reference/contrasts.yaml names the runs and holds no result. Runs are paired by seed, with the same batches and
initial weights, and a row counts its pairs alone; treatment / control where a cell has two counts:

crossed   runs whose loss exploded, by the detector's rule
lasting   of these, runs whose validation loss is still 0.3 nats above that before the onset after a common tail, 5,000
          steps, or 1,000 from 50 M parameters on. Of runs with a shorter tail, which cannot say: how many are as far up
          at its end
alone     pairs in which only the control exploded / in which only the treatment did. A run that held counts where it
          went beyond the onset of its pair. The 95 % interval (Clopper-Pearson) is of the first share
later     pairs in which the treatment exploded after its control, or held beyond the control's onset
W_Q       the largest spectral norm of a head of layer 2, at laptop scale of layer 1, control over treatment, at the
          last step at which both were measured: geometric mean and 95 % interval (Student's t of the logarithms)
held to   the shortest and the longest run of the treatment that did not explode
verdict   holds: the interval of "alone" lies above one half. later, earlier: it does not, and that of "later" lies
          above or below one half. Else undecided
expected  the commit that had an expectation before the runs, and what came of it; no: there was none
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from flashpoint.cli.run_words import select_runs
from flashpoint.cli.selection import provenance
from flashpoint.cli.table import Cell, Table, share_interval, show
from flashpoint.errors import UserError, command_errors
from flashpoint.lab.analysis.expectations_file import read_expectations
from flashpoint.lab.analysis.lifetimes import lasting_of
from flashpoint.lab.analysis.ratios import onset_ratios, pairs, w_q_ratio
from flashpoint.lab.cli.interval_cells import lasting_cell, ratio
from flashpoint.lab.evidence.tables import Evidence
from flashpoint.quantiles import clopper_pearson
from flashpoint.runs.run import Run

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "setting",
    "treatment",
    "control",
    "pairs",
    "crossed",
    "lasting",
    "alone",
    "95 % interval",
    "later",
    "W_Q",
    "held to",
    "verdict",
    "expected",
)
_ATTENTION = re.compile(r"\b(?:flash_\w+|sdpa|released\w*)")
Pair = tuple[Run, Run]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A row of the file."""

    setting: str
    treatment: str
    control: str
    runs: tuple[str, ...]
    against: tuple[str, ...]
    layer: int = 2
    """From 1: whose W_Q is compared."""
    expected: str = ""
    """Of the file of expectations: ``SET/NUMBER``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=ROOT / "runs/reference/contrasts.yaml")
    parser.add_argument("--settings", default="", metavar="D,P,…", help="only these")
    parser.add_argument("--columns", default="", metavar="NAME,…", help="only these")
    parser.add_argument("--without-seeds", default="", metavar="1,2", help="leave these out")
    arguments = parser.parse_args()
    with command_errors():
        contrasts = TypeAdapter(list[Contrast]).validate_python(yaml.safe_load(arguments.file.read_text())["contrasts"])
        wanted = arguments.settings.split(",") if arguments.settings else {one.setting for one in contrasts}
        left_out = {int(seed) for seed in arguments.without_seeds.split(",") if seed}
        evidence = Evidence(ROOT / "runs/reference")
        known = expectations()
        rows, used = [], []
        for one in (one for one in contrasts if one.setting in wanted):
            runs, controls = (
                [run for run in select_runs(words, ROOT / "runs", evidence) if run.seed not in left_out]
                for words in (one.runs, one.against)
            )
            if one.expected not in known:
                raise UserError(f"{arguments.file}: {one.expected}: no such expectation in expectations.yaml")
            rows.append(row(one, runs, controls, known[one.expected]))
            used += [*runs, *controls]
        names = arguments.columns.split(",") if arguments.columns else COLUMNS
        places = [COLUMNS.index(name) for name in names]
        table = Table([COLUMNS[at] for at in places], [[cells[at] for at in places] for cells in rows])
        show(table, "markdown", provenance(used))


def expectations() -> dict[str, str]:
    """Return of each expectation the commit that had it first and what came of it."""
    found = {"": "no"}
    for of_runs in read_expectations(ROOT / "runs/reference/expectations.yaml"):
        for number, one in enumerate(of_runs.expectations, 1):
            written = one.written or of_runs.written
            commits = ", ".join(commit.commit for commit in written) or "this file"
            found[f"{of_runs.id}/{number}"] = f"{commits}: {one.verdict}"
    return found


def row(contrast: Contrast, runs: Sequence[Run], controls: Sequence[Run], expected: str) -> list[Cell | str | int]:
    """Compare runs with their controls.

    Raises:
        UserError: a run has no control of its seed, or several.
    """
    found = pairs(runs, controls)
    paired = [pair for members in found.values() for pair in members.values()]
    ratios = [one for members in onset_ratios(found).values() for one in members.values()]
    only_control = sum(one.later is True and not one.exploded for one in ratios)
    only_treatment = sum(one.later is False and not one.control_exploded for one in ratios)
    alone = only_control + only_treatment
    later = [one.later for one in ratios if one.later is not None]
    treated, untreated = zip(*paired, strict=True)
    return [
        contrast.setting,
        _ATTENTION.sub(r"`\g<0>`", contrast.treatment),
        _ATTENTION.sub(r"`\g<0>`", contrast.control),
        len(paired),
        f"{_crossed(treated)} / {_crossed(untreated)}",
        _lasting(treated, untreated),
        f"{only_control} / {only_treatment}",
        share_interval(only_control, alone) if alone else "",
        f"{sum(later)} of {len(later)}" if later else "",
        growth(paired, contrast.layer),
        _held(treated),
        verdict((only_control, alone), (sum(later), len(later))),
        expected,
    ]


def verdict(alone: tuple[int, int], later: tuple[int, int]) -> str:
    """Return what the two shares say, each as ``(count, of)``."""
    for (count, total), above, below in ((alone, "holds", "explodes"), (later, "later", "earlier")):
        low, high = clopper_pearson(count, total) if total else (0.0, 1.0)
        if low > 0.5 or high < 0.5:
            return above if low > 0.5 else below
    return "undecided"


def growth(paired: Sequence[Pair], layer: int) -> Cell | str:
    """Return the largest norm of W_Q of a head of the layer, control over treatment, or nothing if not measured."""
    ratios = [found for run, control in paired if (found := w_q_ratio(control, run, layer)) is not None]
    return ratio(ratios, ".2g") if ratios else ""


def _crossed(runs: Sequence[Run]) -> int:
    return sum(run.failed_at is not None for run in runs)


def _lasting(treated: Sequence[Run], untreated: Sequence[Run]) -> str:
    return " / ".join(lasting_cell(lasting_of(runs)).text or "0" for runs in (treated, untreated))


def _held(runs: Sequence[Run]) -> str:
    lengths = [int(run.outcome.step) for run in runs if run.failed_at is None]
    if not lengths:
        return "none"
    return f"{min(lengths):,}" if min(lengths) == max(lengths) else f"{min(lengths):,} to {max(lengths):,}"


if __name__ == "__main__":
    main()
