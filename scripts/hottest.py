"""Which heads grew: ``python scripts/hottest.py RUN [RUN …]``, the last spectral norm of W_Q, head by head."""

from __future__ import annotations

import argparse

from flashpoint.errors import script_errors
from flashpoint.report.series import RecordedRun


def norms(run: RecordedRun) -> str:
    """One line: ``L1 35.3 37.2  L2 1.6 1.8``."""
    last = run.measured_by_head("w_q_spectral_norm")[1][..., -1]
    return "  ".join(f"L{layer} {' '.join(f'{norm:.1f}' for norm in heads)}" for layer, heads in enumerate(last, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    with script_errors():
        print(f"{'run':24} {'verdict':18} W_Q spectral norm at the end, by layer, of each head")
        for name in parser.parse_args().runs:
            run = RecordedRun.open(name)
            print(f"{run.name:24} {run.verdict:18} {norms(run)}")


if __name__ == "__main__":
    main()
