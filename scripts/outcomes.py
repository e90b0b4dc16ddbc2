"""How runs ended, one below the other: ``python scripts/outcomes.py RUN [RUN …]``.

Those that have not, or were killed, are in the table as well; ``python train.py resume=RUN`` goes on with one.
"""

from __future__ import annotations

import argparse

from flashpoint.errors import script_errors
from flashpoint.report.series import RecordedRun


def row(run: RecordedRun) -> str:
    """Of a Markdown table."""
    if not run.folder.outcome.exists():
        return f"| `{run.name}` | not ended | | | |"
    outcome = run.outcome
    onset = "none" if outcome["onset_step"] is None else f"{outcome['onset_step']:,}"
    return f"| `{run.name}` | {outcome['outcome']} | {outcome['step']:,} | {onset} | `{outcome['digest']}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    with script_errors():
        runs = [RecordedRun.open(name) for name in parser.parse_args().runs]
        rows = [row(run) for run in runs]
        print("\n".join(["| run | outcome | steps | onset | digest |", "|---|---|---|---|---|", *rows]))


if __name__ == "__main__":
    main()
