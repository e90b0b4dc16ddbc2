"""Runs that are killed at random moments, and what is left of them: ``python scripts/faults/kills.py --cases 12``.

Each case trains the tests' small model, is ended in one of the ways of :data:`KINDS`, is resumed, and has its digests
compared with those of an undisturbed run. A watched loop is not resumed: its losses must be the first of an undisturbed
loop's. A table on stdout has a row for each kind; cases that end badly are told on stderr. The sources must not change
meanwhile.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import json
import math
import multiprocessing
import os
import pty
import random
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch._dynamo

import tests.imported  # noqa: F401, what every case would import
from flashpoint.cli.process import quick_end
from flashpoint.cli.table import Table, show
from flashpoint.errors import tell
from tests.watching.loops import loop, plain

conftest = importlib.import_module("tests.conftest")  # whose imports no type checker is to follow
STEPS = 80
LONG = (f"train.steps={STEPS}", "checkpoints.interval=10", "train.checksum_interval=20", "train.eval_interval=40")
DIGESTS = ("digest", "chain_digest", "weights_digest", "tape_digest", "step")
FAULTS = ("other digest", "no outcome", "partial file", "traceback", "other status", "hang", "no page")
_HANGS = 600.0  # seconds
_LARGEST_FILE = 40_000  # bytes: a checkpoint has 600,000


@dataclass(frozen=True)
class Kind:
    """A way in which a run ends before its time."""

    name: str
    signals: tuple[signal.Signals, ...] = ()
    """One of them is sent."""
    output: str = "file"
    """Where stdout and stderr go: ``file``, ``tee``, ``head``, ``terminal``, ``closed`` or ``full``."""
    to_group: bool = False
    """Whether the signal goes to the processes that read the output, too, as Ctrl-C does."""
    limit: bool = False
    """Whether files cannot grow any more, as on a full disk."""
    drawing: bool = False
    """Whether the signal comes when the verdict is written and the figure is not."""
    watched: bool = False
    """Whether a loop of somebody else's is watched."""


ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KINDS = (
    Kind("SIGKILL", (signal.SIGKILL,)),
    Kind("SIGINT, SIGTERM or SIGHUP", ASKING),
    Kind("`2>&1 | tee log`, Ctrl-C to both", (signal.SIGINT,), "tee", to_group=True),
    Kind("`2>&1 | head -1`, then a signal", ASKING, "head"),
    Kind("its terminal is closed", (signal.SIGHUP,), "terminal"),
    Kind("`<&- >&- 2>&-`, a signal or SIGKILL", (*ASKING, signal.SIGKILL), "closed"),
    Kind("output on a full disk, a signal or SIGKILL", (*ASKING, signal.SIGKILL), "full"),
    Kind("records on a full disk", limit=True),
    Kind("SIGKILL between verdict and figure", (signal.SIGKILL,), drawing=True),
    Kind("a watched loop, SIGINT, SIGTERM or SIGHUP", ASKING, watched=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12, help="of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no case is begun")
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "words.txt").write_text(conftest.SOME_TEXT, encoding="utf-8")
        assert ended(begun(partial(train, *begin("whole", folder)), folder, folder / "whole.log")) == 0
        assert ended(begun(partial(watch_loop, folder / "watched"), folder, folder / "watched.log")) == 0
        until = time.monotonic() + 60 * options.minutes
        cases = [(folder, kind, number, options.seed, until) for number in range(options.cases) for kind in KINDS]
        tallies: dict[str, Counter[str]] = {kind.name: Counter() for kind in KINDS}
        with multiprocessing.get_context("fork").Pool(options.workers) as pool:
            for name, number, found in pool.imap_unordered(tried, cases):
                tallies[name].update(found)
                if bad := [fault for fault in FAULTS if found[fault]]:
                    tell(f"{name}, case {number}: {', '.join(bad)}")
    columns = ("ended by", "runs", "before their last step", "digest equal", *FAULTS[1:])
    rows = [
        (name, sums["runs"], sums["early"], sums["runs"] - sums["other digest"], *(sums[fault] for fault in FAULTS[1:]))
        for name, sums in tallies.items()
    ]
    show(Table(columns, rows), "markdown")
    sys.exit(any(sums[fault] for sums in tallies.values() for fault in FAULTS))


def tried(case: tuple[Path, Kind, int, int, float]) -> tuple[str, int, Counter[str]]:
    """Run a case, if there is time; return its kind, its number and what was found."""
    folder, kind, number, seed, until = case
    if time.monotonic() > until:
        return kind.name, number, Counter()
    rng = random.Random(f"{seed} {kind.name} {number}")
    try:
        found = (of_a_watched_loop if kind.watched else of_a_run)(folder, kind, number, rng)
    except Exception:  # a fault of this script is told, too
        traceback.print_exc()
        found = Counter({"traceback": 1})
    return kind.name, number, found + Counter(runs=1)


def of_a_run(folder: Path, kind: Kind, number: int, rng: random.Random) -> Counter[str]:
    """Train, end, resume, compare."""
    name = f"{KINDS.index(kind)}-{number}"
    run, log = folder / "runs" / name, folder / f"{name}.log"
    limit = rng.randint(300, _LARGEST_FILE) if kind.limit else None
    process = begun(partial(train, *begin(name, folder), limit=limit), folder, log, kind.output)
    step, sent = rng.randint(-STEPS // 8, STEPS), rng.choice(kind.signals) if kind.signals else None
    size = (folder / "runs/whole/tape.bin").stat().st_size * step / STEPS
    tape, verdict = run / "tape.bin", run / "outcome.json"
    if kind.drawing:
        wait(process, verdict.is_file)
    elif not kind.limit:
        wait(process, lambda: step < 0 or (tape.is_file() and tape.stat().st_size >= size))
        time.sleep(rng.uniform(0, 1.0 if step < 0 else 0.03))
    trained = tape.is_file() and tape.stat().st_size > 200  # its header and a step
    process.end(sent, to_group=kind.to_group)
    status = ended(process)
    found = of_end(status, {0, 2} if kind.limit else {0, -(sent or 0), 128 + (sent or 0)}, log)
    found["early"] += status != 0 and not kind.drawing
    found["no outcome"] += bool(sent in ASKING and trained and not verdict.is_file())
    again = folder / f"{name}.again.log"
    complete = verdict.is_file() and json.loads(verdict.read_text())["interrupted"] is None
    if complete:
        process = begun(partial(command, "report", str(run)), folder, again)
    else:
        goes_on = [f"resume={name}"] if (run / "config.json").is_file() else begin(name, folder)
        process = begun(partial(train, *goes_on), folder, again)
    found.update(of_end(ended(process), {0}, again))
    found["partial file"] += any(run.rglob("*.partial"))
    found["no page"] += not ((run / "report/report.html").is_file() and (run / "curves.png").is_file())
    whole, other = (digests(one) for one in (folder / "runs/whole", run))
    found["other digest"] += whole != other
    if not any(found[fault] for fault in FAULTS):
        shutil.rmtree(run)
    return found


def of_a_watched_loop(folder: Path, kind: Kind, number: int, rng: random.Random) -> Counter[str]:
    """Loop, end, compare."""
    place, log = folder / f"watched-{number}", folder / f"watched-{number}.log"
    process = begun(partial(watch_loop, place), folder, log)
    metrics, lines = place / "own/metrics.jsonl", rng.randint(1, 3 * STEPS)
    wait(process, lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= lines)
    sent = rng.choice(kind.signals)
    process.end(sent, to_group=False)
    status = ended(process)
    found = of_end(status, {0, -sent, 128 + sent}, log)
    found["early"] += status != 0
    outcome = place / "own/outcome.json"
    said = json.loads(outcome.read_text())["interrupted"] if outcome.is_file() else "nothing"
    found["no outcome"] += said not in ({sent.name} if status else {None})
    found["partial file"] += any(place.rglob("*.partial"))
    losses, whole = (losses_of(one / "own") for one in (place, folder / "watched"))
    found["other digest"] += losses != whole[: len(losses)] or not losses
    return found


def of_end(status: int | None, expected: set[int], log: Path) -> Counter[str]:
    """Count what is wrong with how a process ended; a status of None is of one that hung."""
    traceback_told = "Traceback" in log.read_text(errors="replace")
    return Counter({"hang": status is None, "other status": status not in expected, "traceback": traceback_told})


def digests(run: Path) -> list[object]:
    outcome = run / "outcome.json"
    return [json.loads(outcome.read_text())[name] for name in DIGESTS] if outcome.is_file() else []


def losses_of(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


class Begun:
    """A process that leads its group, and what reads its output."""

    def __init__(self, pid: int, log: Path, terminal: int | None, readers: Sequence[subprocess.Popen[bytes]]) -> None:
        self.pid = pid
        self._status: int | None = None
        self._log, self._terminal, self._readers = log, terminal, readers

    def poll(self) -> int | None:
        """Return the exit status, or the negative number of the signal that ended it; None before."""
        if self._terminal is not None:
            with contextlib.suppress(OSError), self._log.open("ab") as file:  # nothing new; or its process has ended
                file.write(os.read(self._terminal, 2**16))
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def end(self, number: signal.Signals | None, *, to_group: bool) -> None:
        """Send a signal; to a terminal's process close the terminal, by which the system sends it."""
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None
        elif number is not None and self.poll() is None:
            (os.killpg if to_group else os.kill)(self.pid, number)

    def leave(self) -> None:
        """Wait for what reads its output."""
        for reader in self._readers:
            reader.wait()


def begun(program: Callable[[], None], folder: Path, log: Path, output: str = "file") -> Begun:
    """Start a program in a fork of this process, as a shell would start it in a folder."""
    terminal, inside = pty.openpty() if output == "terminal" else (None, None)
    reader, writer = os.pipe() if output in ("tee", "head") else (None, None)
    log.touch()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid) if output != "terminal" else None
        readers = []
        if reader is not None and writer is not None:
            words = ["tee", str(log)] if output == "tee" else ["head", "-1"]
            with log.open("ab") as file:
                target = subprocess.DEVNULL if output == "tee" else file
                readers = [subprocess.Popen(words, stdin=reader, stdout=target, process_group=pid)]
            os.close(reader)
            os.close(writer)
        if inside is not None:
            os.close(inside)
        if terminal is not None:
            os.set_blocking(terminal, False)
        return Begun(pid, log, terminal, readers)
    atexit._clear()  # what this process has still to do is not the fork's
    status = 1
    try:
        os.chdir(folder)
        if terminal is not None:
            os.setsid()
            inside = os.open(os.ttyname(inside or 0), os.O_RDWR)  # becomes the terminal of this session
            os.close(terminal)
        else:
            os.setpgid(0, 0)
        if reader is not None:
            os.close(reader)
        _connect(output, log, writer if writer is not None else inside)
        for number in ASKING:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        program()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def _connect(output: str, log: Path, descriptor: int | None) -> None:
    """Give this process the streams of a new one."""
    sys.stdin = sys.stdout = sys.stderr = None
    if output == "closed":
        os.closerange(0, 3)
        return
    if descriptor is None:
        path = "/dev/full" if output == "full" else log
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdout = TextIOWrapper(open(1, "wb", closefd=False), "utf-8")  # noqa: SIM115
    sys.stderr = TextIOWrapper(open(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)  # noqa: SIM115


def ended(process: Begun) -> int | None:
    """Wait until a process has ended; return its status, or None if it has to be killed for it."""
    wait(process, lambda: False)
    status = process.poll()
    if status is None:
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
    process.leave()
    return status


def wait(process: Begun, condition: Callable[[], bool]) -> None:
    """Wait until something is so, or the process has ended, or hangs."""
    since = time.monotonic()
    while process.poll() is None and not condition() and time.monotonic() - since < _HANGS:
        time.sleep(0.002)


def begin(name: str, folder: Path) -> list[str]:
    return [*conftest.TINY, *LONG, f"data.path={folder / 'words.txt'}", f"run_name={name}"]


def train(*arguments: str, limit: int | None = None) -> None:
    """``python train.py`` in this process.

    Args:
        limit: bytes of the largest file that can be written.
    """
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    script = conftest.REPOSITORY / "train.py"
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def command(*arguments: str) -> None:
    """``flashpoint`` in this process."""
    from flashpoint.cli.main import main

    main(arguments, prog_name="flashpoint")


def watch_loop(folder: Path) -> None:
    """Watch a loop, every step of it observed and read."""
    torch.set_num_threads(1)
    loop(folder, step=plain, steps=STEPS, log_interval=1)


if __name__ == "__main__":
    with quick_end():
        main()
