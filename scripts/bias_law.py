"""Is the bias of δ its variance times a factor of the weights? ``python scripts/bias_law.py RUN [RUN …]``

RUNs are several attentions on the same weights: replays with ``from_step`` and ``train.lr=0``, of one run or of
several. A row for each set of weights, of the layer whose W_Q is largest: bias / noise² as a mean over the roundings
with its 95 % interval (Student's t), and the rounding that is farthest from that mean. A δ that is independent of the
error that the loss sees, of which curvature expects no bias, has its bias / noise² apart. ``--out`` draws them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from flashpoint.errors import script_errors
from flashpoint.report.bias import Window
from flashpoint.report.bias_law import Point, by_weights, draw_law
from flashpoint.report.intervals import mean_and_interval
from flashpoint.report.provenance import provenance
from flashpoint.report.series import RecordedRun


def table(groups: Mapping[str, Sequence[Point]]) -> Iterator[str]:
    """Markdown."""
    columns = (
        "roundings",
        "noise², largest / smallest",
        "bias / noise²",
        "95 % interval",
        "farthest rounding",
        "independent δ",
    )
    yield f"| weights | {' | '.join(columns)} |"
    yield "|---|---|---|---|---|---|---|"
    for weights, points in groups.items():
        known = [point for point in points if not point.independent]
        anew = ", ".join(f"{point.factor:.1f}" for point in points if point.independent)
        cells = ["", "", "", ""]
        if known:
            variances, factors = ([getattr(point, name) for point in known] for name in ("variance", "factor"))
            mean = float(np.mean(factors))
            farthest = max(known, key=lambda point: abs(point.factor - mean))
            away = f"{100 * (farthest.factor / mean - 1):+.0f} %, `{farthest.run.title}`" if len(known) > 1 else ""
            cells = [f"{max(variances) / min(variances):.0f}", *mean_and_interval(factors, ".1f"), away]
        yield f"| {weights} | {len(known)} | {' | '.join(cells)} | {anew} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    Window.add_options(parser)
    parser.add_argument("--out", type=Path, metavar="FILE.png")
    arguments = parser.parse_args()
    with script_errors():
        runs = [RecordedRun.open(name) for name in arguments.runs]
        groups = by_weights(runs, Window.of_options(arguments))
        print("\n".join([provenance(runs), "", *table(groups)]))
        if arguments.out:
            draw_law(groups).savefig(arguments.out)


if __name__ == "__main__":
    main()
