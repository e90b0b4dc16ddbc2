"""Which batches a watched run trained on, as far as its loop handed them over."""

from __future__ import annotations

import re

from flashpoint.errors import UserError
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.lines import whole_lines


def batches_of(folder: RunFolder) -> dict[int, str]:
    """Return the batches' fingerprints by step, without a last row cut short; empty where the loop handed none.

    Raises:
        UserError: the file cannot be read, or a row is no step and fingerprint.
    """
    if not folder.batches.is_file():
        return {}
    rows = [line.decode(errors="replace").partition(",") for line in whole_lines(folder.batches, "make it readable")]
    for number, (step, _, fingerprint) in enumerate(rows, 1):
        if not step.isdecimal():
            raise UserError(f"{folder.batches}: line {number} begins with no step; restore the file, or watch again")
        if not re.fullmatch("[0-9a-f]{16}", fingerprint):
            raise UserError(f"{folder.batches}: line {number} has no fingerprint; restore the file, or watch again")
    return {int(step): fingerprint for step, _, fingerprint in rows}
