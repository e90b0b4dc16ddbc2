"""Output: a record's text that is no text, in every verb, whose output is broken or in another encoding."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.judge import Command, Kind
from tests.fuzz.output import BROKEN, ENCODINGS
from tests.fuzz.recorded import NOTICES, READING, command
from tests.fuzz.recorded import lay as laid

_TEXT = st.one_of(
    st.sampled_from(("\x1b]0;t\x07", "\x9b31m", "\u202eabc", "a\r\nb", "\udcff", "δ", "\u2028", "\x7f", "<script>")),
    st.text(max_size=8),
)
_VERBS = st.sampled_from([verb for verb in READING if verb[0] not in ("archive", "localize")])
_CASES = st.tuples(
    _VERBS,
    st.sampled_from((*BROKEN, *ENCODINGS)),
    st.sampled_from(("config", "manifest", "outcome")),
    st.integers(0, 60),
    _TEXT,
)


def _texts(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys and indices of every string in a record."""
    if isinstance(value, dict | list):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inside, (*place, key))
    elif isinstance(value, str):
        yield place


def lay(tree: Path, case: tuple[Any, ...]) -> Command:
    verb, how, record, at, text = case
    path = laid(tree) / f"runs/original/{record}.json"
    values = json.loads(path.read_text())
    places = list(_texts(values))
    *holders, last = places[at % len(places)]
    holder = values
    for key in holders:
        holder = holder[key]
    holder[last] = text
    path.write_text(json.dumps(values))
    script = Path(__file__).with_name("output.py")
    return Command(script, (how, *verb), may_write=command(verb).may_write, notices=NOTICES, warm=True)


KIND = Kind("output", _CASES, lay, in_ci=14)
