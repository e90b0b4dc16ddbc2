"""What the early warning said of recorded runs: ``python scripts/sentinel.py RUN [RUN …]``.

One line a run, then how many explosions were foretold, how long before, and how many stable runs were warned of.
"""

from __future__ import annotations

import argparse
import re
import sys

import numpy as np

from flashpoint.errors import UserError
from flashpoint.probes.sentinel import HeadGrowth, Sentinel
from flashpoint.run_folder import RunFolder, read_json
from flashpoint.tracking import read_metrics

_NORM = re.compile(r"layer/(\d+)/head/(\d+)/w_q_spectral_norm")


def warning_of(run: RunFolder) -> HeadGrowth | None:
    """The warning that the run's recorded norms give."""
    columns = {tuple(map(int, match.groups())): column for name, column in read_metrics(run.metrics).items()
               if (match := _NORM.fullmatch(name))}  # fmt: skip
    if not columns:
        raise UserError(f"{run.metrics}: no spectral norm of W_Q; give a run with probes.weights_interval above 0")
    layers, heads = (max(place) for place in zip(*columns, strict=True))
    steps = columns[1, 1][0]
    norms = np.array([[columns[layer, head][1] for head in range(1, heads + 1)] for layer in range(1, layers + 1)])
    sentinel = Sentinel()
    for number, step in enumerate(steps):
        sentinel.update(int(step), norms[..., number])
    return sentinel.warning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    leads, exploded, stable, false_alarms = [], 0, 0, 0
    try:
        for name in parser.parse_args().runs:
            run = RunFolder.open(name)
            outcome, warning = read_json(run.outcome), warning_of(run)
            onset = outcome["onset_step"]
            told = f"warned at {warning.step:,} of {warning}" if warning else "no warning"
            if onset is not None:
                exploded += 1
                leads += [onset - warning.step] if warning and warning.step < onset else []
                verdict = f"exploded at {onset:,}"
            else:
                stable += 1
                false_alarms += bool(warning)
                verdict = f"{outcome['outcome']} to {outcome['step']:,}"
            print(f"{run.path.name:24} {verdict:20} {told}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    lead = f", {min(leads):,} to {max(leads):,} steps before (median {np.median(leads):,.0f})" if leads else ""
    print(f"foretold {len(leads)} of {exploded} explosions{lead}; warned of {false_alarms} of {stable} stable runs")


if __name__ == "__main__":
    main()
