"""Other checkouts of this repository, beside which a benchmark is run. Nothing heavy is imported: what a process holds
when it starts another one counts to the other's peak memory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit_of(checkout: Path) -> str:
    """Return the commit that a checkout is at, eight digits."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def variables_of(checkout: Path) -> dict[str, str]:
    """Return the environment in which Python imports a checkout's packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(checkout / folder) for folder in ("src", "kernels"))}
