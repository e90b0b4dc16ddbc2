"""Copy a run without most of its metrics, gzipped, small enough to commit: ``scripts/thin_run.py RUN TARGET``.

Of the per-step metrics every ``--every``-th record stays, and the last. What was measured at intervals stays whole, or,
with ``--only loss w_q_spectral_norm``, what bears these names in any layer and head, ``--spacing`` steps apart. With
``--digits 6`` the values have six significant digits, which halves the file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashpoint.errors import UserError, script_errors
from flashpoint.run_folder import RunFolder
from flashpoint.tracking import metric_lines

EXACT = 17  # significant decimal digits that tell any two float64 apart


def thin(
    run: RunFolder,
    target: Path,
    every: int,
    only: Sequence[str] | None = None,
    spacing: int = 1,
    digits: int = EXACT,
) -> None:
    """Configuration, manifest, outcome and, where there is one, the digest chain are kept as they are.

    Args:
        every: of this many per-step records one stays.
        only: last parts of the metrics' names to keep; None keeps all.
        spacing: least steps between records of what was measured at intervals; the last stays, too.
        digits: significant decimal digits of each value.
    """
    target.mkdir(parents=True)
    for path in (run.config, run.manifest, run.outcome, *filter(Path.exists, [run.chain])):
        shutil.copy(path, target)
    named = [_named(json.loads(line), only) for line in metric_lines(run.metrics)]
    records = [record for record in named if len(record) > 1]
    per_step = [record for record in records if "loss" in record]
    at_intervals = [record for record in records if "loss" not in record]
    kept = {id(record) for record in [*per_step[::every], *per_step[-1:], *_spaced(at_intervals, spacing)]}
    lines = "".join(f"{json.dumps(_rounded(record, digits))}\n" for record in records if id(record) in kept)
    RunFolder(target).packed_metrics.write_bytes(gzip.compress(lines.encode(), mtime=0))  # the same bytes on any day


def _named(record: dict[str, Any], only: Sequence[str] | None) -> dict[str, Any]:
    wanted = None if only is None else {"step", *only}
    return {name: value for name, value in record.items() if wanted is None or name.rsplit("/", 1)[-1] in wanted}


def _rounded(record: dict[str, Any], digits: int) -> dict[str, Any]:
    return {name: float(f"{value:.{digits}g}") if isinstance(value, float) else value for name, value in record.items()}


def _spaced(records: Sequence[dict[str, Any]], spacing: int) -> list[dict[str, Any]]:
    """Records of one kind, with the same metrics, at least ``spacing`` steps apart; of each kind the last, too."""
    latest: dict[frozenset[str], dict[str, Any]] = {}
    last = {frozenset(record): record for record in records}
    kept = []
    for record in records:
        kind = frozenset(record)
        if kind not in latest or record["step"] - latest[kind]["step"] >= spacing or record is last[kind]:
            kept.append(record)
            latest[kind] = record
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("target", type=Path)
    parser.add_argument("--every", type=int, default=10, help="of per-step records keep one in this many")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="metrics to keep")
    parser.add_argument("--spacing", type=int, default=1, metavar="STEPS", help="between records of other metrics")
    parser.add_argument("--digits", type=int, default=EXACT, help="significant digits of the values")
    arguments = parser.parse_args()
    every, spacing, digits = arguments.every, arguments.spacing, arguments.digits
    with script_errors():
        if min(every, spacing, digits) < 1:
            raise UserError(f"--every {every} --spacing {spacing} --digits {digits}: give 1 or more")
        thin(RunFolder.open(arguments.run), arguments.target, every, arguments.only, spacing, digits)


if __name__ == "__main__":
    main()
