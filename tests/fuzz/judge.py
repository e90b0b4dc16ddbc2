"""What every fuzz shares: run one command on bad input, and judge how it ended.

A kind of input is a module ``tests/fuzz/of_NAME.py`` with one :class:`Kind` named ``KIND``; ``test_fuzz.py`` and
``scripts/faults/fuzz.py`` find it. Hypothesis draws its cases, always the same ones. A case is laid out in an empty
tree of its own::

    TREE/work     the command's working folder
    TREE/home/    HOME
    TREE/canary   made by code that nobody asked to be executed
    TREE/         anything else; nothing here may change unless the command names it in ``may_write``

It ends well if it is done (status 0) or refused: status 2, and one line on stderr that says why. Anything else is one
of the :data:`FAULTS`: a traceback, a crash, a hang, other lines, another status, something lost, a file made out of
place, or foreign code executed. Lost is a file that changed and may not, and what the command itself asks for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.warm import Process

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

REPOSITORY = Path(__file__).parents[2]
FAULTS = ("traceback", "crash", "hang", "other lines", "status", "loss", "out of place", "executed")
CANARY = "canary"
_LONGEST_LINE = 1000  # characters: to be read


@dataclass(frozen=True)
class World:
    """What surrounds a command."""

    streams: tuple[str, str] = ("file", "file")
    """Stdout and stderr: a file, ``closed``, a pipe of ``no reader``, a ``full`` device, or ``read only``."""
    language: str = "C.UTF-8"
    """Whose encoding Python has; with ``C`` without its UTF-8 mode."""
    encoding: str | None = None
    """Of stdout and stderr, as ``PYTHONIOENCODING`` sets it."""
    memory_mib: int | None = None
    """That it may take besides what it begins with."""
    gone: bool = False
    """Whether its working folder is removed before it begins."""


@dataclass(frozen=True)
class Command:
    """What to run for a case, once its files are laid out."""

    script: Path
    """Run as ``__main__``; ``tests/fuzz/`` has one for each verb that is tried."""
    arguments: tuple[str, ...]
    may_write: tuple[str, ...] = ()
    """Files and folders under the tree that it may make, change or remove."""
    notices: tuple[str, ...] = ()
    """How other lines on stderr may begin, before the one that says why it is refused."""
    seconds: float = 20.0
    """After which it hangs: of computing and of waiting, without those that a busy machine has it wait for a core."""
    warm: bool = False
    """Run in a process that has imported all that runs are read and trained with: what comes before is not asked."""
    world: World = World()
    ends: tuple[int, ...] = (2,)
    """Statuses besides 0 with which it may end."""
    lost: Callable[[Path, str], str | None] | None = None
    """Given the tree and what it printed, says what else is lost; None for nothing."""


@dataclass(frozen=True)
class Kind:
    """A kind of bad input."""

    name: str
    """Its row in the table."""
    cases: SearchStrategy[Any]
    """Draws a case: plain values, whose ``repr`` tells it."""
    lay: Callable[[Path, Any], Command]
    """Writes a case's files into a tree in which there are ``work`` and ``home``."""
    in_ci: int
    """Cases that the test tries."""


@dataclass(frozen=True)
class Ending:
    """How a command ended."""

    status: int
    """Of the process; negative for a signal."""
    hung: bool
    pytorch: bool
    """Whether it had imported PyTorch."""
    out: str
    err: str
    changed: tuple[str, ...]
    """Files under the tree that it made, changed or removed."""
    before: frozenset[str] = frozenset()
    """Files that were there before."""
    lost: str | None = None
    """What the command itself says of its loss."""

    def faults(self, command: Command) -> list[str]:
        """Return those of :data:`FAULTS` that it has."""
        found = []
        if self.hung:
            found.append("hang")
        elif self.status < 0 or "MemoryError" in self.err:
            found.append("crash")
        if "Traceback (most recent call last)" in self.err:
            found.append("traceback")
        elif not self.hung and self.status > 0:
            read = command.world.streams[1] == "file" and self.status == 2
            found += ["other lines"] if read and not self._one_line(command.notices) else []
            found += ["status"] if self.status not in command.ends else []
        changed = self.out_of_place(command)
        if self.lost or any(name in self.before for name in changed):
            found.append("loss")
        if any(name not in self.before and name != CANARY for name in changed):
            found.append("out of place")
        if CANARY in changed:
            found.append("executed")
        return found

    def out_of_place(self, command: Command) -> list[str]:
        """Return the files that it may not have changed; folders on the way to a place may be made."""
        places = [Path(place) for place in command.may_write]
        return [
            name
            for name in self.changed
            if not any(Path(name).is_relative_to(place) or place.is_relative_to(name) for place in places)
        ]

    def _one_line(self, notices: tuple[str, ...]) -> bool:
        *before, last = self.err.removesuffix("\n").split("\n")
        told = last.startswith("error: ") and last.isprintable() and len(last) <= _LONGEST_LINE
        before = [line for line in before if line or not notices]  # a progress bar has one of its own
        return told and all(line.startswith(notices or ("\n",)) for line in before)


@dataclass
class Tally:
    """How the cases of a kind ended."""

    cases: int = 0
    refused: int = 0
    without_pytorch: int = 0
    """Refused before PyTorch was imported."""
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, ending: Ending, command: Command) -> None:
        self.cases += 1
        self.refused += ending.status == 2
        self.without_pytorch += ending.status == 2 and not ending.pytorch
        self.faults.update(ending.faults(command))


def told(case: Any, command: Command, ending: Ending) -> str:
    """Return all that is known of a case, over several lines."""
    lines = [f"{', '.join(ending.faults(command)) or 'well'}: {case!r}", f"  {command.script.name} {command.arguments}"]
    lines += [f"  status {ending.status}", f"  changed: {ending.out_of_place(command)}", f"  lost: {ending.lost}"]
    return "\n".join([*lines, *(f"  | {line}" for line in ending.err.splitlines()[-12:])])


def names_of_kinds() -> list[str]:
    """Return the names of the modules that have the kinds, without what they import."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return [name.removeprefix("of_") for name in names if name.startswith("of_")]


def kind_of(name: str) -> Kind:
    """Return the kind in ``tests/fuzz/of_NAME.py``."""
    kind: Kind = importlib.import_module(f"tests.fuzz.of_{name}").KIND
    return kind


def kinds() -> list[Kind]:
    """Return the kinds there are."""
    return [kind_of(name) for name in names_of_kinds()]


def explore(kind: Kind, cases: int, folder: Path, judged: Callable[[Any, Command, Ending], None]) -> None:
    """Try cases of a kind; the same ones for the same number.

    Args:
        folder: for their trees.
        judged: takes each case with its ending; Hypothesis shrinks one for which it raises.
    """
    from hypothesis import HealthCheck, Phase, given, settings

    @settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.cases)
    def each(case: Any) -> None:
        with laid_out(kind, case, folder) as (tree, command):
            judged(case, command, run(command, tree))

    each()


@contextlib.contextmanager
def laid_out(kind: Kind, case: Any, folder: Path) -> Iterator[tuple[Path, Command]]:
    """A tree for one case, and its command."""
    tree = Path(tempfile.mkdtemp(dir=folder))
    try:
        (tree / "work").mkdir()
        (tree / "home").mkdir()
        yield tree, kind.lay(tree, case)
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def run(command: Command, tree: Path) -> Ending:
    """Run a command in ``tree/work``; what it changed anywhere under ``tree`` is noted."""
    with tempfile.TemporaryDirectory() as output:
        before = _state(tree)
        ending = _ask(
            (command.warm, command.world.language),
            {
                "world": dataclasses.asdict(command.world),
                "script": str(command.script),
                "arguments": command.arguments,
                "folder": str(tree / "work"),
                "environment": _environment(tree / "home"),
                "output": output,
                "seconds": command.seconds,
            },
        )
        after = _state(tree)
        out, err = (Path(output, name).read_text(errors="replace") for name in ("out", "err"))
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    lost = command.lost(tree, out) if command.lost else None
    return Ending(
        ending["status"], ending["hung"], ending["pytorch"], out, err, tuple(changed), frozenset(before), lost
    )


def _environment(home: Path) -> dict[str, str]:
    """This process's, with a home of its own, no GPU, no way to a W&B login, and nothing written beside sources."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "FLASHPOINT", "HYDRA"))}
    caches = {"MPLCONFIGDIR": str(Path(tempfile.gettempdir(), "flashpoint-fuzz-matplotlib"))}
    own = {"HOME": str(home), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sources = [str(REPOSITORY / "src"), str(REPOSITORY / "kernels"), str(REPOSITORY)]
    return {**kept, **caches, **own, "PYTHONPATH": os.pathsep.join(sources)}


def _state(tree: Path) -> dict[str, tuple[int, ...]]:
    """Return what tells a change of each file; a folder is told by its being there."""
    found: dict[str, tuple[int, ...]] = {}
    for folder, folders, files in os.walk(tree):
        for name in [*folders, *files]:
            path = Path(folder, name)
            status = path.lstat()
            where = os.fsencode(path.relative_to(tree)).decode(errors="backslashreplace")
            contents = (0, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns)
            found[where] = (status.st_mode, status.st_ino, *contents)
    return found


_Server = tuple[bool, str]
"""Whether it has PyTorch, and the language in which its Python began."""
_servers: dict[_Server, Connection] = {}


def _ask(server: _Server, case: dict[str, Any]) -> dict[str, Any]:
    """Have the server run a case; it is started with the first one, and ends with this process."""
    if server not in _servers:
        _servers[server] = _started(*server)
    _servers[server].send(case)
    answer: dict[str, Any] = _servers[server].recv()
    return answer


def _started(warm: bool, language: str) -> Connection:
    command = [sys.executable, str(Path(__file__).with_name("server.py"))]
    environment = _environment(Path.home()) | {"HOME": str(Path.home()), "LC_ALL": language}
    usual = language == World.language
    if not usual:
        environment |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/socket") as listener:
        command.append(str(listener.address))
        if warm and usual:
            server: Process | subprocess.Popen[bytes] = Process(command, cwd=REPOSITORY, env=environment)
        else:
            command.append("imported" if warm else "cold")
            server = subprocess.Popen(command, cwd=REPOSITORY, env=environment)
        # Before this process waits for its children, which in one that a pool started is before ``atexit``.
        Finalize(None, server.send_signal, (signal.SIGKILL,), exitpriority=0)
        return listener.accept()
