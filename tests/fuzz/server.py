"""Runs scripts in forks of a process that has imported Hydra and the configuration, but not PyTorch.

``python tests/fuzz/server.py SOCKET cold`` takes cases and answers each: exit status, whether it was killed for its
time, and whether it had imported PyTorch. Without ``cold`` it is itself a fork, of a process that has imported all that
runs are read and trained with (:mod:`tests.warm`). A case cannot hurt this machine: memory, file sizes and seconds are
limited, and what it started ends with it. With ``imported`` it imports the latter itself, in the language in which it
was started.
"""

import contextlib
import ctypes
import gc
import os
import resource
import runpy
import select
import shutil
import signal
import sys
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

_MEMORY_BYTES, _FILE_BYTES = 12 << 30, 64 << 20
_TICK = 0.5  # seconds
_ARENA_MAX = -8  # of glibc: M_ARENA_MAX


def preload() -> None:
    """Import what a case imports before PyTorch; the first composition fills the caches of Hydra's parser."""
    import hydra.main  # noqa: F401
    from hydra import compose, initialize_config_dir

    import flashpoint.lab.cli.train  # noqa: F401
    from flashpoint.files import CONFIGS
    from flashpoint.lab.cli.composition import store_schema

    store_schema()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        compose("train", ["experiment=laptop", "train.steps=1", "data.path=a/b", "+tracking.tags=[a]"])
    gc.collect()
    gc.freeze()


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in a fork and wait for its end."""
    process = os.fork()
    if process == 0:
        os._exit(_child(case))  # without the atexit functions of this process
    hung = not _ends(process, case["seconds"])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # with all that it started
    _, status = os.waitpid(process, 0)
    with_pytorch = Path(case["output"], "pytorch").exists()
    return {"status": os.waitstatus_to_exitcode(status), "hung": hung, "pytorch": with_pytorch}


def _ends(process: int, seconds: float) -> bool:
    """Wait for its end; return False once it and what it started have computed, or all waited, for so many seconds.

    The time for which it could run and another process did does not count, so that a busy machine is no hang.
    """
    waiting = os.pidfd_open(process)
    computed = waited = 0.0
    try:
        while not select.select([waiting], [], [], _TICK)[0]:
            states, now = _of_session(process)
            if "R" not in states:
                waited += max(0.0, _TICK - (now - computed))
            computed = now
            if computed + waited > seconds:
                return False
        return True
    finally:
        os.close(waiting)


def _of_session(session: int) -> tuple[set[str], float]:
    """Return the states of the threads of its processes, and the CPU seconds of these and of their ended children."""
    states, ticks = set(), 0
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(int(path.name)) == session:
                after = [(task / "stat").read_text().rpartition(")")[2].split() for task in path.glob("task/[0-9]*")]
                states |= {fields[0] for fields in after}
                ticks += sum(map(int, (path / "stat").read_text().rpartition(")")[2].split()[11:15]))
    return states, ticks / os.sysconf("SC_CLK_TCK")


def _child(case: dict[str, Any]) -> int:
    os.setsid()
    gc.disable()  # a collection would copy the pages of all that was imported
    world = case["world"]
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)  # a heap for each thread takes 64 MiB of addresses, which are limited
    memory = _begun_with() + (world["memory_mib"] << 20) if world["memory_mib"] else _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(("out", "err"), 1):
        file = os.open(Path(case["output"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(case["folder"])
    if world["gone"]:
        shutil.rmtree(case["folder"])
    os.environ.clear()
    os.environ.update(case["environment"])
    sys.argv = [case["script"], *case["arguments"]]
    sys.path[0] = str(Path(case["script"]).parent)
    _redirect(world)
    status = 0
    try:
        runpy.run_path(case["script"], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        with Path(case["output"], "err").open("a") as file:  # where stderr is none, too
            traceback.print_exc(file=file)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if "torch" in sys.modules:
        Path(case["output"], "pytorch").touch()
    return status


def _begun_with() -> int:
    """Return the bytes of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _redirect(world: dict[str, Any]) -> None:
    """Make stdout and stderr what Python would make of them if it began so."""
    for number, kind in enumerate(world["streams"], 1):
        name = ("stdout", "stderr")[number - 1]
        match kind:
            case "closed":
                os.close(number)
                setattr(sys, name, None)
            case "no reader":
                reader, writer = os.pipe()
                os.dup2(writer, number)
                os.close(reader)
                os.close(writer)
            case "full":
                os.dup2(os.open("/dev/full", os.O_WRONLY), number)
            case "read only":
                os.dup2(os.open(os.devnull, os.O_RDONLY), number)
    for number, name in enumerate(("stdout", "stderr"), 1):
        if (stream := getattr(sys, name)) is not None and (world["encoding"] or set(world["streams"]) != {"file"}):
            encoding, errors = world["encoding"] or stream.encoding, "backslashreplace" if number == 2 else "strict"
            setattr(sys, name, open(number, "w", encoding=encoding, errors=errors, closefd=False))  # noqa: SIM115, until the end


def main() -> None:
    if "cold" in sys.argv:
        preload()
    if "imported" in sys.argv:
        import tests.imported
        import tests.undrawn  # noqa: F401
    with Client(sys.argv[1]) as asked, contextlib.suppress(EOFError):
        while True:
            asked.send(answer(asked.recv()))


if __name__ == "__main__":
    main()
