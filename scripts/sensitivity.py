"""Which layer's output does the loss depend on? ``python scripts/sensitivity.py RUN [RUN …]``

A row for each run, in bold the layer whose W_Q ends largest: the sensitivity N·|dO_i|·|O_i| in nats of the loss summed
over the step's N tokens, root mean square over the tokens, heads and observed steps of a layer. By Fisher's identity
(src/flashpoint/probes/targets.py) the bias of δ over the square of its noise is about that, in the unit of
``attn.delta_error.size``. It is taken from the recorded errors of δ, so a run without any has none.

``--since`` and ``--until`` choose the steps (default: all up to 1,000 before the onset), ``--last N`` the last of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from flashpoint.errors import UserError
from flashpoint.report.bias import Relative, Sums, Window
from flashpoint.report.series import RecordedRun
from flashpoint.run_folder import RunFolder


def table(runs: Sequence[RecordedRun], window: Window) -> Iterator[str]:
    """Markdown, a row a run."""
    found = [(run, Sums.of(run, window), Relative.of(run, "delta_error", window)) for run in runs]
    count = max(len(sums.by_step) for _, sums, _ in found)
    yield f"| run | verdict | {' | '.join(f'layer {layer + 1}' for layer in range(count))} |"
    yield "|---|---|" + "---|" * count
    for run, sums, relative in found:
        cells = [""] * count
        for layer in range(1, len(sums.by_step) + 1):
            if relative.layers([layer]).variance:
                value = f"{sums.sensitivity(relative, layer):.1f}"
                cells[layer - 1] = f"**{value}**" if layer == run.hottest_layer else value
        yield f"| `{run.name}` | {run.verdict} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    Window.add_options(parser)
    arguments = parser.parse_args()
    try:
        runs = [RecordedRun(RunFolder.open(name)) for name in arguments.runs]
        print("\n".join(table(runs, Window.of_options(arguments))))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
