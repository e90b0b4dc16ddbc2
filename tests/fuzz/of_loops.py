"""Stdout and stderr of loops that are closed, full, read only or without a reader: from the start, or some step on."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import disturbances
from tests.fuzz.disturbed import OUTPUTS
from tests.fuzz.judge import Command, Kind, World
from tests.fuzz.recorded import NOTICES, SCRIPT
from tests.fuzz.recorded import lay as laid

_STREAM = st.sampled_from(("file", "closed", "no reader", "full", "read only"))
_STREAMS = st.tuples(_STREAM, _STREAM)
_BAD = (("runs", "nowhere"), ("runs",), ("nothing",), ("runs", "--nothing"), ("--help",), ("runs", "--help"),
        ("train", "--help"), ("--version",), ("train", "train.lr=x"), ("train", "resume=nowhere"))  # fmt: skip
_EVENTS = disturbances.disturbances((*OUTPUTS, "nothing"))
_CASES = st.one_of(
    st.tuples(st.just("verb"), st.sampled_from(_BAD), _STREAMS),
    st.tuples(st.just("loop"), _EVENTS, _STREAMS),
    st.tuples(st.just("loop"), _EVENTS, st.just(("file", "file"))),
)
_UNREAD = (1, 120, 141)
"""Status of what could not print: ours, Python's, and that of SIGPIPE."""


def lay(tree: Path, case: tuple[str, Any, tuple[str, str]]) -> Command:
    what, how, streams = case
    ends = (2,) if streams[0] == "file" else (2, *_UNREAD)
    if what == "loop":
        taken = tuple(str(number) for number, stream in enumerate(streams, 1) if stream == "closed")
        events = [one for one in how[1] if not one[1].startswith(taken or ("?",))]  # else it is another file's
        how = how[0], events
        return disturbances.lay(tree, how, World(streams=streams), ends=(2, *_UNREAD))
    laid(tree)
    return Command(SCRIPT, how, notices=NOTICES, warm=True, world=World(streams=streams), ends=ends)


KIND = Kind("outputs of loops", _CASES, lay, in_ci=14)
