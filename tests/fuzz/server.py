"""Runs scripts in forks of a process that has imported Hydra and the configuration, but not PyTorch.

``python tests/fuzz/server.py SOCKET cold`` takes cases and answers each: exit status, whether it was killed for its
time, and whether it had imported PyTorch. Without ``cold`` it is itself a fork, of a process that has imported all that
runs are read and trained with (:mod:`tests.warm`). A case cannot hurt this machine: memory, file sizes and seconds are
limited, and what it started ends with it.
"""

import contextlib
import gc
import os
import resource
import runpy
import select
import signal
import sys
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

_MEMORY_BYTES, _FILE_BYTES = 12 << 30, 64 << 20


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
    waiting = os.pidfd_open(process)
    hung = not select.select([waiting], [], [], case["seconds"])[0]
    os.close(waiting)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # with all that it started
    _, status = os.waitpid(process, 0)
    with_pytorch = Path(case["output"], "pytorch").exists()
    return {"status": os.waitstatus_to_exitcode(status), "hung": hung, "pytorch": with_pytorch}


def _child(case: dict[str, Any]) -> int:
    os.setsid()
    gc.disable()  # a collection would copy the pages of all that was imported
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(("out", "err"), 1):
        os.dup2(os.open(Path(case["output"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.chdir(case["folder"])
    os.environ.clear()
    os.environ.update(case["environment"])
    sys.argv = [case["script"], *case["arguments"]]
    sys.path[0] = str(Path(case["script"]).parent)
    status = 0
    try:
        runpy.run_path(case["script"], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules:
        Path(case["output"], "pytorch").touch()
    return status


def main() -> None:
    if "cold" in sys.argv:
        preload()
    with Client(sys.argv[1]) as asked, contextlib.suppress(EOFError):
        while True:
            asked.send(answer(asked.recv()))


if __name__ == "__main__":
    main()
