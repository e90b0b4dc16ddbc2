"""What the early warning said of recorded runs: ``python scripts/sentinel.py RUN [RUN …]``.

One line a run, then how many explosions were foretold, how long before, and how many stable runs were warned of.
"""

from __future__ import annotations

import argparse

import numpy as np

from flashpoint.errors import script_errors
from flashpoint.probes.sentinel import HeadGrowth, Sentinel
from flashpoint.report.series import RecordedRun


def warning_of(run: RecordedRun) -> HeadGrowth | None:
    """The warning that the run's recorded norms give."""
    steps, norms = run.measured_by_head("w_q_spectral_norm")
    sentinel = Sentinel(run.config["train"]["warmup_steps"])
    for step, norms_then in zip(steps, np.moveaxis(norms, -1, 0), strict=True):
        sentinel.update(int(step), norms_then)
    return sentinel.warning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    leads, exploded, stable, false_alarms = [], 0, 0, 0
    with script_errors():
        for name in parser.parse_args().runs:
            run = RecordedRun.open(name)
            onset, warning = run.onset, warning_of(run)
            told = f"warned at {warning.step:,} of {warning}" if warning else "no warning"
            if onset is not None:
                exploded += 1
                leads += [onset - warning.step] if warning and warning.step < onset else []
            else:
                stable += 1
                false_alarms += bool(warning)
            print(f"{run.name:24} {run.verdict:20} {told}")
    lead = f", {min(leads):,} to {max(leads):,} steps before (median {np.median(leads):,.0f})" if leads else ""
    print(f"foretold {len(leads)} of {exploded} explosions{lead}; warned of {false_alarms} of {stable} stable runs")


if __name__ == "__main__":
    main()
