"""Copy a run without most of its per-step metrics, small enough to commit: ``scripts/thin_run.py RUN TARGET``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from flashpoint.errors import UserError
from flashpoint.run_folder import RunFolder


def thin(run: RunFolder, target: Path, every: int) -> None:
    """Keep configuration, manifest, outcome and digest chain; of the per-step metrics every ``every``-th record and
    the last; all that was measured at intervals."""
    target.mkdir(parents=True)
    for path in (run.config, run.manifest, run.outcome, run.chain):
        shutil.copy(path, target)
    lines = run.metrics.read_text().splitlines()
    per_step = [number for number, line in enumerate(lines) if "loss" in json.loads(line)]
    dropped = set(per_step) - set(per_step[::every]) - set(per_step[-1:])
    RunFolder(target).metrics.write_text(
        "".join(f"{line}\n" for number, line in enumerate(lines) if number not in dropped)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("target", type=Path)
    parser.add_argument("--every", type=int, default=10, help="keep one record in this many")
    arguments = parser.parse_args()
    try:
        thin(RunFolder.open(arguments.run), arguments.target, arguments.every)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
