"""Records of runs that are well-formed and wrong: a key is missing, a value is of another kind or beyond bounds."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.judge import Command, Kind
from tests.fuzz.recorded import READING, TRAINING, command
from tests.fuzz.recorded import lay as laid

_RUN = "runs/original"
_OF_A_RUN = (
    *(f"{_RUN}/{name}" for name in ("config.json", "manifest.json", "outcome.json", "metrics.jsonl")),
    *(f"{_RUN}/{name}" for name in ("localize.jsonl", "checkpoints/step-000000012.json")),
    "data/*/meta.json",
)
_TABLES = ("runs", "metrics/small", "chains/small")
_CELLS = ("config", "manifest", "outcome", "experiment", "name", "digits", "chain")
_HUGE = (10**6, 10**15, 2**63, 10**40, 1e308)
_SMALL = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=5),
    st.sampled_from(([], {}, [[]], [None], "12", "nan", "../x", "stable", 0.5, {"a": {"b": []}}, [[[[[[1]]]]]])),
)  # fmt: skip
PLACE = st.lists(st.integers(0, 70), min_size=1, max_size=4)
_CHANGES = st.sampled_from(("remove", "rename", "list", "text"))


def changed(value: Any, place: list[int], change: Any) -> Any:
    """Return a JSON value with another one at a place: indices of keys, until something holds no others."""
    inside = isinstance(value, dict | list) and len(value)
    if not inside or not place:
        return {"list": [value], "text": str(value)}.get(change[1], value) if change[0] == "as" else change[1]
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[place[0] % len(keys)]
    last = len(place) == 1 or not isinstance(value[key], dict | list)
    if last and change == ("as", "remove"):
        del value[key]
    elif last and change == ("as", "rename") and isinstance(value, dict):
        value["renamed"] = value.pop(key)
    else:
        value[key] = changed(value[key], place[1:], change)
    return value


def values_changed(values: Any) -> Any:
    return st.one_of(st.tuples(st.just("as"), _CHANGES), st.tuples(st.just("is"), values))


_READ = st.one_of(_SMALL, st.sampled_from(_HUGE))
_CASES = st.one_of(
    st.tuples(st.just("file"), st.sampled_from(_OF_A_RUN), PLACE, values_changed(_READ), st.sampled_from(READING)),
    st.tuples(st.just("file"), st.sampled_from(_OF_A_RUN), PLACE, values_changed(_SMALL), st.sampled_from(TRAINING)),
    st.tuples(st.just("cell"), st.sampled_from(_CELLS), PLACE, values_changed(_READ), st.sampled_from(READING)),
    st.tuples(st.just("column"), st.sampled_from(_TABLES), PLACE, st.sampled_from(("drop", "rename", "text", "null")),
              st.sampled_from(READING)),
)  # fmt: skip


def lay(tree: Path, case: tuple[Any, ...]) -> Command:
    what, where, place, change, verb = case
    work = laid(tree)
    if what == "file":
        (path,) = work.glob(where)
        lines = path.read_text().splitlines(keepends=True) if path.suffix == ".jsonl" else [path.read_text()]
        at = place[0] % len(lines)
        lines[at] = json.dumps(changed(json.loads(lines[at]), place, change)) + "\n"
        path.write_text("".join(lines))
    elif what == "cell":
        path = work / "runs/reference/runs.parquet"
        row = pq.read_table(path).to_pylist()[0]
        holds_json = where in ("config", "manifest", "outcome")
        value = changed(json.loads(row[where]) if holds_json else row[where], place, change)
        row[where] = json.dumps(value) if holds_json else value
        _write(path, [row], where)
    else:
        path = work / f"runs/reference/{where}.parquet"
        table = pq.read_table(path)
        column = place[0] % table.num_columns
        name = table.column_names[column]
        if change == "drop":
            table = table.drop_columns([name])
        elif change == "rename":
            table = table.rename_columns(["renamed" if one == name else one for one in table.column_names])
        else:
            texts = [None if change == "null" else str(value) for value in table[name].to_pylist()]
            table = table.set_column(column, name, pa.array(texts, pa.string()))
        pq.write_table(table, path)
    return command(verb)


def _write(path: Path, rows: list[dict[str, Any]], changed: str) -> None:
    """Write rows as Parquet; a value that it has no type for, as text."""
    try:
        pq.write_table(pa.Table.from_pylist(rows), path)
    except (pa.ArrowException, OverflowError, UnicodeError):
        pq.write_table(pa.Table.from_pylist([{**row, changed: repr(row[changed])} for row in rows]), path)


KIND = Kind("records", _CASES, lay, in_ci=16)
