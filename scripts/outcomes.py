"""How runs ended, one below the other: ``python scripts/outcomes.py RUN [RUN …]``."""

from __future__ import annotations

import argparse

from flashpoint.errors import exit_in_one_line
from flashpoint.report.series import RecordedRun


def row(run: RecordedRun) -> str:
    """Of a Markdown table."""
    outcome = run.outcome
    onset = "none" if outcome["onset_step"] is None else f"{outcome['onset_step']:,}"
    name = run.folder.path.name
    return f"| `{name}` | {outcome['outcome']} | {outcome['step']:,} | {onset} | `{outcome['digest']}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    with exit_in_one_line():
        runs = [RecordedRun.open(name) for name in parser.parse_args().runs]
        rows = [row(run) for run in runs]
    print("\n".join(["| run | outcome | steps | onset | digest |", "|---|---|---|---|---|", *rows]))


if __name__ == "__main__":
    main()
