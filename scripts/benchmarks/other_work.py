"""Whether other work ran beside a measurement: it falls on no candidate alike."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

from flashpoint.hardware import visible_gpus

MOST_LOAD, MOST_BUSY = 0.25, 10
"""Load a core, and percent of the time that a GPU computes, above which other work is said to run."""


@dataclass(frozen=True)
class Work:
    """What runs on this machine."""

    load: float
    """Of the last minute, for each core of the host."""
    processes: int | None
    """On the GPU, as far as this machine shows those of others; None where nothing tells it."""
    busy: int | None
    """Percent of the last second in which the GPU computed."""

    @classmethod
    def now(cls) -> Work:
        of_processes = _asked("compute-apps=pid")
        busy = re.match(r"\d+", _asked("gpu=utilization.gpu") or "")
        return cls(load(), None if of_processes is None else len(of_processes.split()), int(busy[0]) if busy else None)


@cache
def at_start() -> Work:
    """Return what ran when this was first called: before there is work of this process's own."""
    return Work.now()


def load() -> float:
    """Return the host's load of the last minute, for each of its cores."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def told(start: Work, end: float) -> str:
    """Return sentences: the load at both ends, what was on the GPU, and whether that is other work.

    Args:
        end: load for each core.
    """
    sentences = [f"load a core of the host {start.load:.2f} at the start and {end:.2f} at the end"]
    if start.processes is not None:
        sentences.append(f"other processes on the GPU at the start: {start.processes}")
    if start.busy is not None:
        sentences.append(f"the GPU was busy {start.busy} % of the time before")
    found = [
        *([f"a load above {MOST_LOAD} a core"] if start.load > MOST_LOAD else []),
        *(["processes on the GPU"] if start.processes else []),
        *([f"a GPU that was busy more than {MOST_BUSY} %"] if (start.busy or 0) > MOST_BUSY else []),
    ]
    return "; ".join(sentences) + (f". Other work ran: {', '.join(found)}" if found else "")


def _asked(query: str) -> str | None:
    """Return what ``nvidia-smi`` says of this process's GPU; None where it is missing or fails."""
    command, gpu = shutil.which("nvidia-smi"), "".join(visible_gpus(1))
    if not (command and gpu):
        return None
    arguments = [command, f"--query-{query}", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        return subprocess.run(arguments, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
