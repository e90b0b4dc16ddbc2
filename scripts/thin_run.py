"""Copy a run without most of its metrics, small enough to commit: ``python scripts/thin_run.py RUN TARGET``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from flashpoint.errors import UserError
from flashpoint.run_folder import RunFolder


def thin(run: RunFolder, target: Path, every: int) -> None:
    """Keep configuration, manifest and outcome, and of each metric every ``every``-th record and the last."""
    target.mkdir(parents=True)
    for path in (run.config, run.manifest, run.outcome):
        shutil.copy(path, target)
    lines = run.metrics.read_text().splitlines()
    seen: dict[tuple[str, ...], int] = {}
    last = {tuple(json.loads(line)): number for number, line in enumerate(lines)}
    with RunFolder(target).metrics.open("w") as file:
        for number, line in enumerate(lines):
            names = tuple(json.loads(line))
            seen[names] = seen.get(names, -1) + 1
            if seen[names] % every == 0 or last[names] == number or "val_loss" in names:
                file.write(line + "\n")


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
