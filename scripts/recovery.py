"""Did the loss come back? ``python scripts/recovery.py RUN [RUN …]``, a line for each run that exploded.

Validation loss at the last validation before the onset, and at the end of the run, ``detector.tail_steps`` after the
verdict; then how many ended more than ``detector.margin`` nats above. What happens later, these runs do not say.
"""

from __future__ import annotations

import argparse

from flashpoint.errors import UserError, script_errors
from flashpoint.report.paired import validations
from flashpoint.report.series import RecordedRun


def rise(run: RecordedRun) -> tuple[float, float]:
    """Validation loss before the onset and at the end, nats.

    Raises:
        UserError: the run was validated only after its onset, or not at its end.
    """
    known, end = validations(run), int(run.outcome["step"])
    before = [step for step in known if step <= (run.onset or 0)]
    if not before or end not in known:
        raise UserError(f"{run.folder.path}: not validated both before its onset and at its end")
    return known[max(before)], known[end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    above, count = 0, 0
    with script_errors():
        for name in parser.parse_args().runs:
            run = RecordedRun.open(name)
            if run.onset is None:
                continue
            before, end = rise(run)
            count += 1
            above += end - before > run.config["detector"]["margin"]
            told = f"{before:.2f} before, {end:.2f} at its end ({end - before:+.2f})"
            print(f"{run.name:24} onset {run.onset:6,}, ended at {run.outcome['step']:6,}: {told}")
    print(f"{above} of {count} ended above what they had before by more than the detector's margin")


if __name__ == "__main__":
    main()
