"""Say where two runs part: ``python scripts/compare_runs.py RUN RUN``. Status 0 if equal, 1 if not, 2 on bad input."""

from __future__ import annotations

import argparse
import sys

from flashpoint.errors import script_errors
from flashpoint.run_folder import RunFolder
from flashpoint.training.chain import Chain, first_difference, loss_differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs=2, metavar="RUN")
    arguments = parser.parse_args()
    with script_errors():
        one, other = (Chain.read(RunFolder.open(name).chain) for name in arguments.runs)
    difference = first_difference(one, other)
    shared = min(one.steps, other.steps)
    if difference:
        values = " against ".join(
            f"{value:016x}" if difference.quantity == "state" else f"{value!r}" for value in difference.values
        )
        largest, at, last = loss_differences(one, other)
        print(
            f"first difference at step {difference.step:,}: {difference.quantity} {values}; losses differ by up to "
            f"{largest:.2g} nats (step {at:,}), by {last:.2g} at step {shared - 1:,}"
        )
        sys.exit(1)
    if one.steps != other.steps:
        print(f"equal for the {shared:,} steps that both have; one has {max(one.steps, other.steps):,}")
    else:
        print(f"equal: {shared:,} steps")


if __name__ == "__main__":
    main()
