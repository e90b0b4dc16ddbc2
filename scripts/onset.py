"""How the onset answers to one setting: ``python scripts/onset.py KEY RUN [RUN …]``, KEY e.g. ``train.lr``.

Prints a row for each attention and value: exploded of n, Kaplan–Meier median of the onset with its 95 % interval,
longest stable run; ``--out FILE.png`` draws them. What else runs differ in, the seed apart, stands with the attention.
Where every seed exploded at every value, the exponent p of onset ∝ value^p follows: its mean over the seeds and the
95 % interval of that.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flashpoint.errors import script_errors
from flashpoint.report.intervals import mean_and_interval
from flashpoint.report.provenance import provenance
from flashpoint.report.response import Dose, draw_responses, exponents, responses
from flashpoint.report.series import RecordedRun


def table(found: dict[str, list[Dose]], key: str) -> list[str]:
    """Markdown, a row for each attention and value."""
    rows = [
        f"| attention | {key} | exploded | median onset | 95 % interval | longest stable |",
        "|---|---|---|---|---|---|",
    ]
    for variant, doses in found.items():
        for dose in doses:
            runs = dose.lifetimes
            low, high = runs.median_interval()
            interval = "" if runs.median_onset is None else f"{_step(low)} to {_step(high)}"
            longest = f"{runs.censored.max():,}" if len(runs.censored) else "none"
            exploded = f"{len(runs.onsets)} of {runs.count}"
            median = _step(runs.median_onset)
            rows.append(f"| `{variant}` | {dose.value:g} | {exploded} | {median} | {interval} | {longest} |")
    return rows


def power_laws(found: dict[str, list[Dose]], key: str) -> list[str]:
    """A line for each attention that has exponents, after an empty one."""
    lines = []
    for variant, doses in found.items():
        if per_seed := exponents(doses, key):
            mean, interval = mean_and_interval(per_seed, "+.2f")
            interval = f" ({interval})" if interval else ""
            lines.append(f"`{variant}`: onset ∝ {key}^p, p = {mean}{interval}, n = {len(per_seed)}")
    return ["", *lines] if lines else []


def _step(step: float | None) -> str:
    return "not reached" if step is None else f"{step:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("key", metavar="KEY", help="a number of the configuration")
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="FILE.png")
    arguments = parser.parse_args()
    with script_errors():
        runs = [RecordedRun.open(name) for name in arguments.runs]
        found = responses(runs, arguments.key)
        print(f"{provenance(runs)}\n")
        print("\n".join([*table(found, arguments.key), *power_laws(found, arguments.key)]))
        if arguments.out:
            draw_responses(found, arguments.key).savefig(arguments.out)


if __name__ == "__main__":
    main()
