"""What an attention costs in loss: ``python scripts/loss.py RUN [RUN …]``, a row for each attention.

Validation loss after equal steps, and the difference to the control's run of the same seed, data and experiment, with
its 95 % interval over seeds. A run that had exploded by then has no loss to compare: it is counted, and left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from flashpoint.errors import script_errors
from flashpoint.report.intervals import mean_and_interval
from flashpoint.report.paired import Losses, last_common_step, losses_at
from flashpoint.report.provenance import provenance
from flashpoint.report.series import RecordedRun


def table(found: Sequence[Losses], step: int, control: str) -> list[str]:
    """Markdown, a row for each attention."""
    rows = [
        f"| attention | runs | exploded before | validation loss after {step:,} steps | spread over seeds "
        f"| pairs | minus {control} | 95 % interval |",
        "|---|---|---|---|---|---|---|---|",
    ]
    setting = ""
    for losses in sorted(found, key=lambda losses: losses.setting):
        if losses.setting != setting:
            setting = losses.setting
            rows.append(f"| *{setting}* | | | | | | | |")
        mean = f"{np.mean(losses.losses):.4f}" if len(losses.losses) else ""
        spread = "" if losses.spread is None else f"{losses.spread:.4f}"
        pairs = len(losses.differences)
        cells = [
            f"`{losses.label}`",
            len(losses.losses),
            losses.exploded,
            mean,
            spread,
            pairs or "",
            *(mean_and_interval(losses.differences, "+.4f") if pairs else ("", "")),
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--at", type=int, metavar="STEPS", help="default: the last that all stable runs have")
    parser.add_argument("--control", default="flash_fp32", help="the attention to compare with (default: flash_fp32)")
    arguments = parser.parse_args()
    with script_errors():
        runs = [RecordedRun.open(name) for name in arguments.runs]
        step = arguments.at or last_common_step(runs)
        print(f"{provenance(runs)}\n")
        print("\n".join(table(losses_at(step, runs, arguments.control), step, arguments.control)))


if __name__ == "__main__":
    main()
