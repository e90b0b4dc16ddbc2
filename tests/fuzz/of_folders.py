"""The working folder: a loop or a probe changes it, it is removed, or was removed before."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import disturbances
from tests.fuzz.disturbed import PLACES
from tests.fuzz.judge import Command, Kind, World
from tests.fuzz.of_no_files import READERS
from tests.fuzz.recorded import NOTICES, SCRIPT

_VERBS = (
    *READERS,
    *(("train", "experiment=laptop", "tracking=disabled", *more) for more in ((), ("runs_dir=/",), ("resume=mine",))),
    ("runs", "/"),
    ("claims",),
    ("--version",),
    ("watch", ".", "--once"),
    ("report", "original", "--out", "page"),
)
_CASES = st.one_of(
    *[disturbances.disturbances((*PLACES, "nothing"))] * 3,
    st.tuples(st.just("gone"), st.sampled_from(_VERBS)),
)


def lay(tree: Path, case: tuple[str, Any]) -> Command:
    what, how = case
    if what != "gone":
        return disturbances.lay(tree, (what, how))
    return Command(SCRIPT, how, may_write=("work",), notices=NOTICES, warm=True, world=World(gone=True))


KIND = Kind("working folders", _CASES, lay, in_ci=12)
