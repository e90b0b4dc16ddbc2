"""Processes that begin with the imports done: forks of one that has imported PyTorch and started nothing.

To the test and to the script each is a process as ``subprocess`` starts one: a ``__main__``, arguments, environment,
folder, output and exit status of its own, and signals that end it. Only the seconds of imports are shared.
"""

import atexit
import codecs
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_imported = ["tests.imported", "tests.undrawn"]


def import_also(module: str) -> None:
    """In the server, if no process has been asked of it yet: what only some tests need, and only if they run."""
    _imported.append(module)


class Process:
    """A script or ``-m MODULE`` in a fork; what ``subprocess.Popen`` offers and tests use of it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str],
        pipes: Mapping[int, Connection] | None = None,
    ) -> None:
        interpreter, *argv = command
        assert interpreter == sys.executable
        self.args = command
        self._output = tempfile.TemporaryDirectory()
        self._texts = tuple(Path(self._output.name) / name for name in ("stdout", "stderr"))
        _CONTEXT.set_forkserver_preload(_imported)  # read as the server starts; benchmarks' processes want another list
        arguments = argv, str(cwd or Path.cwd()), dict(env), pipes or {}, *map(str, self._texts)
        self._process = _CONTEXT.Process(target=run_as_main, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def printed(self) -> str:
        """What it has written to stdout so far, but for a last character whose bytes are not all there yet."""
        written = self._texts[0].read_bytes() if self._texts[0].exists() else b""
        return codecs.getincrementaldecoder("utf-8")().decode(written)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (text.read_text() for text in self._texts)
        return out, err


class Piped(Process):
    """A process in a session of its own that takes bytes and gives bytes, as of ``subprocess.Popen`` with two pipes."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        (taken, given), (read, written) = (_CONTEXT.Pipe(duplex=False) for _ in range(2))
        with taken, given, read, written:
            self.stdin, self.stdout = os.fdopen(os.dup(given.fileno()), "wb"), os.fdopen(os.dup(read.fileno()), "rb")
            super().__init__(command, env=env, pipes={0: taken, 1: written})


def run(command: Sequence[str], *, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with its output captured."""
    process = Process(command, **options)
    try:
        return subprocess.CompletedProcess(command, process.wait(timeout), *process.communicate())
    finally:
        process.send_signal(signal.SIGKILL)


def run_as_main(argv: list[str], cwd: str, env: dict[str, str], pipes: Mapping[int, Connection], *output: str) -> None:
    """Become a script or ``-m MODULE``, in a process that was forked for it; ``output`` are files."""
    for number, path in enumerate(output, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if pipes:
        os.setsid()
    for number, pipe in pipes.items():
        os.dup2(pipe.fileno(), number)
        pipe.close()
    if 0 in pipes:
        sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))  # which Python reads once, as it starts
    status = 1
    try:
        if argv[0] == "-m":
            sys.argv, sys.path[0] = argv[1:], cwd
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
            runpy.run_path(argv[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException as error:  # as Python ends; a program may have a hook, or ask what ended it
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(sys.last_type, sys.last_value, sys.last_traceback)
    atexit._run_exitfuncs()  # which os._exit passes over
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to take all those modules apart, as Python would now, takes as long as a run
