"""How long each variant lasts over seeds: ``python scripts/survival.py RUN [RUN …]``.

Prints a table (exploded of n with a 95 % interval, median onset, longest stable run, log-rank test against the control)
and, with ``--out FILE.png``, draws Kaplan–Meier curves. Runs from several machines may stand side by side.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flashpoint.errors import script_errors
from flashpoint.report.provenance import provenance
from flashpoint.report.series import RecordedRun
from flashpoint.report.survival import Lifetimes, by_variant, control_of, draw_survival, logrank_p, usual_settings


def table(groups: Sequence[Lifetimes], control: str) -> list[str]:
    """Markdown, a row a variant; within a setting those first of which most exploded, and soonest."""
    rows = [
        f"| attention | exploded | 95 % interval | median onset | longest stable | log-rank p against {control} |",
        "|---|---|---|---|---|---|",
    ]
    setting = ""
    for group in sorted(groups, key=_rank):
        if group.setting != setting:
            setting = group.setting
            rows.append(f"| *{setting}* | | | | | |")
        low, high = group.exploded_interval()
        median = "not reached" if group.median_onset is None else f"{group.median_onset:,.0f}"
        longest = f"{group.censored.max():,}" if len(group.censored) else "none"
        against = control_of(group, groups, control)
        p = logrank_p(group, against) if against and against is not group else None
        test = "" if p is None else f"{p:.2g}"
        share = f"{100 * low:.0f} to {100 * high:.0f} %"
        exploded = f"{len(group.onsets)} of {group.count}"
        rows.append(f"| `{group.label}` | {exploded} | {share} | {median} | {longest} | {test} |")
    return rows


def _rank(group: Lifetimes) -> tuple[str, float, float]:
    median = float("inf") if group.median_onset is None else group.median_onset
    return group.setting, -len(group.onsets) / group.count, median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--control", default="flash_fp32", help="the attention to test against (default: flash_fp32)")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw the curves there")
    arguments = parser.parse_args()
    with script_errors():
        runs = [RecordedRun.open(name) for name in arguments.runs]
        groups = by_variant(runs)
        usual = " ".join(f"{name}={value}" for name, value in usual_settings(runs).items())
        print("\n".join([provenance(runs), *([f"unless a row says otherwise: {usual}"] if usual else []), ""]))
        print("\n".join(table(groups, arguments.control)))
        if not any(arguments.control in (group.label, group.variant) for group in groups):
            print(
                f"no {arguments.control} among these runs to test against; choose one with --control", file=sys.stderr
            )
        if arguments.out:
            draw_survival(groups).savefig(arguments.out)


if __name__ == "__main__":
    main()
