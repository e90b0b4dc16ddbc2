"""Progress bars on stderr: live on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys

from tqdm import tqdm


def progress_bar(total: int, unit: str, description: str | None = None, done: int = 0) -> tqdm:
    """Return a bar over ``total`` units, of which ``done`` are behind it."""
    interval = 0.5 if sys.stderr.isatty() else 15.0
    return tqdm(
        total=total, initial=done, unit=unit, desc=description, dynamic_ncols=True,
        mininterval=interval, maxinterval=interval, file=sys.stderr,
    )  # fmt: skip
