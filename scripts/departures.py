"""What leaves the stable twin first: ``python scripts/departures.py NAME [NAME …] --runs RUN [RUN …]``.

RUNs are exploding runs and, for each, one of the same seed, data and experiment that was stable. A row for each metric
of heads: in how many pairs its largest value over heads left, for good, what the twin had at any time after the
warm-up, and how many steps before the onset; the earliest first. ``--hottest-head`` follows in each pair the one head
whose W_Q is highest at the onset, instead of the largest value over all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from flashpoint.errors import script_errors
from flashpoint.report.departure import Departure, departure, twins
from flashpoint.report.provenance import provenance
from flashpoint.report.series import RecordedRun


def table(found: Sequence[Departure]) -> list[str]:
    """Markdown, a row for each metric, the earliest first."""
    rows = ["| metric | left the twin's range | steps before the onset, median | least to most |", "|---|---|---|---|"]
    for metric in sorted(found, key=lambda metric: -np.median(metric.leads) if metric.leads else np.inf):
        told = (
            f"{np.median(metric.leads):,.0f} | {min(metric.leads):,} to {max(metric.leads):,}"
            if metric.leads
            else " | "
        )
        rows.append(f"| `{metric.metric}` | {len(metric.leads)} of {metric.pairs} | {told} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", nargs="+", metavar="NAME", help="e.g. score_mean w_q_spectral_norm tied_rows")
    parser.add_argument("--runs", nargs="+", required=True, metavar="RUN")
    parser.add_argument("--hottest-head", action="store_true", help="of each pair the head that exploded only")
    arguments = parser.parse_args()
    with script_errors():
        runs = [RecordedRun.open(name) for name in arguments.runs]
        pairs = twins(runs)
        print(f"{provenance(runs)}\n")
        print("\n".join(table([departure(metric, pairs, arguments.hottest_head) for metric in arguments.metrics])))


if __name__ == "__main__":
    main()
