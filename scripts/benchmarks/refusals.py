"""CPU seconds in which ``flashpoint train`` refuses, and shows its help: of this checkout and of others, in turns.

One thread computes, so that on an idle machine they are what a person waits for.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.checkouts import commit_of, variables_of
from flashpoint.cli.table import Table, show

_HERE = Path(__file__).parents[2]
_COMMANDS = ("train.lr=abc", "trian.steps=3", "attn.layers=[9]", "-m seed=0,1,abc", "--help")
"""A value of the wrong type, no key, what the run itself refuses, a sweep, and no refusal."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="FOLDER", help="others to compare with")
    parser.add_argument("--rounds", type=int, default=7, help="calls of each; default: %(default)s")
    given = parser.parse_args()
    checkouts = [_HERE, *(folder.resolve() for folder in given.checkouts)]
    calls = [(command, checkout) for command in _COMMANDS for checkout in checkouts]
    seconds: dict[tuple[str, Path], list[float]] = {call: [] for call in calls}
    for _ in range(given.rounds):
        for command, checkout in calls:
            seconds[command, checkout].append(_seconds(command, checkout))
    rows = [[command, *(_of_all(seconds[command, checkout]) for checkout in checkouts)] for command in _COMMANDS]
    show(Table(("flashpoint train", *map(commit_of, checkouts)), rows), "markdown")


def _seconds(command: str, checkout: Path) -> float:
    """Return the CPU seconds of a call, the system's among them."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run(
            [sys.executable, str(checkout / "train.py"), *command.split()],
            cwd=folder, env=variables_of(checkout), capture_output=True, check=False,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == (0 if command == "--help" else 2), ended.stderr.decode()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _of_all(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
