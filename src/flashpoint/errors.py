"""What reaches the user as text: errors and notices in one line, and the answer of a verb."""

from __future__ import annotations

import difflib
import errno
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec

_LONGEST_LINE = 600  # characters


class UserError(Exception):
    """Bad input, told in one line: what is wrong, where, and what to do about it.

    ``flashpoint`` and the scripts print the message without a traceback and exit with status 2.
    """


class UserCodeError(UserError):
    """Code of the user's own failed, or returned what it must not."""


def one_line(error: Exception) -> str:
    """Return an error's message as one line."""
    return printable(" ".join(str(error).split()))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean NAME? ``, of the known name that is most like the word, or nothing if none is like it."""
    return "".join(f"did you mean {name}? " for name in difflib.get_close_matches(word, known, n=1, cutoff=0.7))


def layer_told(layer: int, module: str) -> str:
    """Return how people are told of a layer: its number, from 1, and its module's name where that is known."""
    return f"layer {layer} ({module})" if module else f"layer {layer}"


def counted(noun: str, *numbers: int) -> str:
    """Return how people are told how many there are: ``1 head``, ``4 heads``, or of several things ``2 to 4 heads``."""
    least, most = min(numbers), max(numbers)
    return (f"{least:,} to " if least < most else "") + f"{most:,} {noun}{'s' * (most != 1)}"


def listed(names: Sequence[str]) -> str:
    """Return one name or several as a sentence has them: ``q``, ``q and k``, ``q, k and v``."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def pip_install(what: str) -> str:
    """Return the command that installs something beside what runs here: the shell's own pip may be another Python's,
    whose index knows no flashpoint. Environments of uv have no pip."""
    if find_spec("pip") is None:
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, what])
    return shlex.join([sys.executable, "-m", "pip", "install", what])


def remedy(error: OSError) -> str:
    """Return what to do about a file that could not be written or read: make room for it, or see that it may be."""
    return "free space" if is_full(error) else "see that its folder is there, and that it may be read and written"


def is_full(error: OSError) -> bool:
    """Whether a disk, a quota or a limit on the size of files has left no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _of_a_file(error: Exception) -> str | None:
    """Return the file, what the system said of it and a remedy; None of an error that names no file."""
    if not (isinstance(error, OSError) and error.filename and error.strerror):
        return None
    return printable(f"{error.filename}: {error.strerror}; {remedy(error)}")


def printable(text: str) -> str:
    """Return text as one line that a terminal shows as it is; of one that is too long to be read, both ends."""
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE // 2]} … {text[-_LONGEST_LINE // 2 :]}"
    return escaped(text)


def escaped(text: str, keep: str = "") -> str:
    """Return text that a terminal shows as it is: names, paths and records of others may hold its control sequences,
    or characters that turn the direction of what follows. These arrive as ``\\x1b``.

    Args:
        keep: characters that stay, as the ends of lines.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else one.encode("unicode_escape").decode() for one in text)


@contextmanager
def exit_in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """End the process with one line on stderr and status 2 on a :class:`UserError` or an error of these kinds."""
    told: tuple[type[Exception], ...] = (UserError, *kinds)
    try:
        yield
    except told as error:
        tell(f"error: {_of_a_file(error) or one_line(error)}")
        sys.exit(2)


@contextmanager
def command_errors() -> Iterator[None]:
    """:func:`exit_in_one_line` of a command that prints what it reads: files that cannot be read or written, too."""
    with exit_in_one_line(OSError), readers_may_leave():
        yield


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """End the process without a word where whoever reads what it prints has had enough (``… | head``).

    The status is that of a program which the signal SIGPIPE ends.
    """
    try:
        yield
        if sys.stdout:  # None where it was closed from the start
            sys.stdout.flush()
    except BrokenPipeError:
        to_null_device(sys.stdout.fileno())  # for what Python flushes at its end
        sys.exit(128 + signal.SIGPIPE)


def to_null_device(number: int) -> None:
    """Have a descriptor lead nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(number, True)  # as the three of a process are
    else:
        os.dup2(null, number)
        os.close(null)


def open_closed_streams() -> None:
    """Have stdin, stdout and stderr lead nowhere where they are closed: the next file that is opened would get their
    number, and what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            to_null_device(number)


def is_first_process() -> bool:
    """Return whether this is the first of several processes, or the only one.

    Processes that a loop starts itself, as by ``torch.multiprocessing``, may know their place without any ``RANK``.
    PyTorch is not imported for it: a process that has joined others has imported it.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def answer(text: str, end: str = "\n") -> None:
    """Print lines on stdout.

    Raises:
        OSError: it cannot be written.
    """
    print(escaped(text, keep="\n"), end=end)


def tell(text: str) -> None:
    """Print lines on stderr. Stdout is kept for the answer, or the outcome of a run.

    What is told ends neither a run nor the program of a host: where it cannot be printed, it is dropped. Nobody may
    read it any more, the host may have closed or replaced stderr, and Python refuses a line of a signal's handler while
    another one is being printed.
    """
    if sys.stderr is not None:  # print would take stdout
        with suppress(Exception):
            print(escaped(text, keep="\n"), file=sys.stderr, flush=True)


def notify(text: str) -> None:
    """:func:`tell`, from the first of several processes only."""
    if is_first_process():
        tell(text)
