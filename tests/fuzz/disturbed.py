"""A watched loop, or a training with a probe, in which something happens between steps: ``disturbed.py loop|train``.

``../case.json`` says what, as [step, name]. At its end a loop writes the digest of its weights into ``../trained``.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

STEPS = 7


def _fork(child: Callable[[], object]) -> None:
    process = os.fork()
    if process == 0:
        child()
        return
    os.waitpid(process, 0)


def _child_ends(how: Callable[[], object]) -> Callable[[], None]:
    return lambda: _fork(how)


def _raise() -> None:
    raise RuntimeError("in the child")


def _breaks(number: int) -> None:
    reader, writer = os.pipe()
    os.dup2(writer, number)
    os.close(reader)
    os.close(writer)


def _removed() -> None:
    Path("gone").mkdir(exist_ok=True)
    os.chdir("gone")
    Path("../gone").rmdir()


def _with_processes() -> None:
    for method in ("fork",):
        process = multiprocessing.get_context(method).Process(target=sum, args=([1],))
        process.start()
        process.join()


def _in_thread(what: Callable[[], object]) -> None:
    thread = threading.Thread(target=what)
    thread.start()
    thread.join()


EVENTS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "chdir /": lambda: os.chdir("/"),
    "chdir ..": lambda: os.chdir(".."),
    "chdir runs": lambda: os.chdir(Path.home().parent / "work/runs"),
    "chdir home": lambda: os.chdir(Path.home()),
    "chdir of a thread": lambda: _in_thread(lambda: os.chdir("/")),
    "folder removed": _removed,
    "fchdir": lambda: os.fchdir(os.open("/", os.O_RDONLY)),
    "child exits": _child_ends(lambda: os._exit(0)),
    "child ends": _child_ends(sys.exit),
    "child fails": _child_ends(_raise),
    "child goes on": _child_ends(lambda: None),
    "child of a child": _child_ends(lambda: _fork(lambda: None)),
    "child of multiprocessing": _with_processes,
    "child of a thread": lambda: _in_thread(_with_processes),
    "no stderr": lambda: setattr(sys, "stderr", None),
    "no stdout": lambda: setattr(sys, "stdout", None),
    "stderr closed": lambda: sys.stderr and sys.stderr.close(),
    "2 closed": lambda: os.close(2),
    "1 closed": lambda: os.close(1),
    "2 without a reader": lambda: _breaks(2),
    "1 without a reader": lambda: _breaks(1),
    "2 full": lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 2),
    "1 full": lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1),
    "2 read only": lambda: os.dup2(os.open(os.devnull, os.O_RDONLY), 2),
    "warnings are errors": lambda: warnings.simplefilter("error"),
    "logging fails": lambda: setattr(logging.StreamHandler, "emit", lambda *_: 1 / 0),
    "stderr of its own": lambda: setattr(sys, "stderr", _Raising()),
}
PLACES = tuple(name for name in EVENTS if "chdir" in name or "removed" in name)
CHILDREN = tuple(name for name in EVENTS if name.startswith("child"))
OUTPUTS = tuple(EVENTS)[tuple(EVENTS).index("no stderr") :]


class _Raising:
    """What a host may put in the place of stderr: it has no file, and fails."""

    encoding = None

    def write(self, _text: str) -> int:
        raise ValueError("I/O operation on closed file")

    def flush(self) -> None:
        raise ValueError("I/O operation on closed file")


def happen(step: int) -> None:
    """Let happen what the case says of a step."""
    for at, name in _CASE:
        if at == step:
            with contextlib.suppress(OSError, AttributeError, ValueError):  # a second time, or without a folder
                EVENTS[name]()


_CASE: list[tuple[int, str]] = json.loads(Path("../case.json").read_text()) if Path("../case.json").exists() else []
_TRAINED = Path("../trained").absolute()
"""Where the judge reads, whatever becomes of stdout and of the working folder."""


def loop() -> None:
    """Train a small attention, watched."""
    import hashlib

    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    import flashpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv, self.out = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)

        def forward(self, batch: Tensor) -> Tensor:
            q, k, v = self.qkv(self.embed(batch))[:, None].chunk(3, -1)
            logits: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
            return logits

    torch.set_num_threads(1)  # those of OpenMP are not in a child
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with flashpoint.watch(model, name="mine", interval=2, log_interval=2, weights_interval=3) as watched:
        for step in range(STEPS):
            batch = torch.arange(step, step + 12).view(2, 6) % 16
            loss = F.cross_entropy(model(batch).flatten(0, 1), (batch + 1).flatten() % 16)
            loss.backward()
            watched.step(loss, batch)
            optimizer.step()
            optimizer.zero_grad()
            happen(step)
    told = hashlib.sha256()
    for parameter in model.parameters():
        told.update(parameter.detach().numpy().tobytes())
    with _TRAINED.open("a") as file:
        file.write(f"{told.hexdigest()[:16]}\n")


def train() -> None:
    """Train the small model, with a probe to which it happens."""
    from flashpoint.cli.main import main
    from flashpoint.cli.process import own_streams
    from flashpoint.lab.cli import endings

    endings.tell_of_run = lambda *_args, **_given: None  # type: ignore[assignment]
    own_streams()
    main()


if __name__ == "__main__":
    begun = os.getpid()
    kind = sys.argv.pop(1)
    try:
        loop() if kind == "loop" else train()
    except RuntimeError:
        if os.getpid() == begun:
            raise
