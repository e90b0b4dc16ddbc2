"""What recording costs: ``python scripts/overhead.py WITHOUT RUN [RUN …]`` prints the mean time of a step of each run.

A mean, not a median: what is done every 200 steps must show. The first half of a run is left out: it compiles.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flashpoint.errors import UserError, script_errors
from flashpoint.run_folder import RunFolder, read_json
from flashpoint.tracking import read_metrics

WARM_UP_SHARE = 0.5


def step_milliseconds(run: RunFolder) -> float:
    """Mean over the steps of the second half; validation is not counted."""
    config = read_json(run.config)
    columns = read_metrics(run.metrics)
    if "tokens_per_second" not in columns:
        raise UserError(f"{run.metrics}: no reading of tokens_per_second; give a run of more steps")
    _, rates = columns["tokens_per_second"]
    tokens = config["train"]["batch_size"] * config["model"]["context"]
    rates = rates[int(len(rates) * WARM_UP_SHARE) :]
    return float(1e3 * tokens * (1 / rates).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("without", metavar="WITHOUT", help="the run that the others are held against")
    parser.add_argument("runs", nargs="+", metavar="RUN")
    arguments = parser.parse_args()
    with script_errors():
        base = step_milliseconds(RunFolder.open(arguments.without))
        manifest = read_json(RunFolder.open(arguments.without).manifest)
        print(f"{manifest['hardware']}, torch {manifest['environment']['torch']}, {manifest['started'][:10]}")
        print(f"{Path(arguments.without).name:36} {base:8.3f} ms a step")
        for name in arguments.runs:
            milliseconds = step_milliseconds(RunFolder.open(name))
            print(f"{Path(name).name:36} {milliseconds:8.3f} ms a step {100 * (milliseconds / base - 1):+7.1f} %")


if __name__ == "__main__":
    main()
