"""Write a report of recorded runs: ``python scripts/report.py RUN [RUN …] [--out FOLDER]``.

One HTML file that opens without a network, and its figures as PNG; several runs stand side by side.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flashpoint.errors import script_errors
from flashpoint.report.page import write_report
from flashpoint.report.series import RecordedRun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, help="default: report/ in the first run's folder")
    arguments = parser.parse_args()
    with script_errors():
        runs = [RecordedRun.open(name) for name in arguments.runs]
        page = write_report(runs, arguments.out or runs[0].folder.path / "report")
    print(page)


if __name__ == "__main__":
    main()
