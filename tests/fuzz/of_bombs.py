"""Small files that take much memory, and long ones that take none on the disk: limits lowered to 2 MB, and 400 MiB of
memory, so that this machine has no harm of them."""

import json
import lzma
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.judge import Command, Kind, World
from tests.fuzz.of_no_files import ALONE, OF_RUNS, OF_TABLES, READERS
from tests.fuzz.recorded import TRAINING, command
from tests.fuzz.recorded import lay as laid

_SCRIPT = Path(__file__).parent / "bounded.py"
_RUN = "runs/original"
_MB = 10**6
_JSON_FILES = (*(f"{_RUN}/{name}" for name in ("config.json", "manifest.json", "outcome.json", "localize.json",
                 "checkpoints/step-000000012.json")), "data/*/meta.json", "data/*/tokenizer.json")  # fmt: skip
_LINES = tuple(f"{_RUN}/{name}" for name in ("metrics.jsonl", "localize.jsonl", "nonfinite.jsonl"))
_BYTES = (*(f"{_RUN}/{name}" for name in ("tape.bin", "chain.bin", "checkpoints/step-000000012.safetensors")),
          "data/*/train.bin", "runs/reference/runs.parquet", "runs/reference/metrics/small.parquet",
          "words.txt")  # fmt: skip
_SIZES = st.sampled_from((1, 3, 30, 300))
"""MB, of which the disk holds few."""
_VERBS = st.one_of(*[st.sampled_from(READERS)] * 9, st.sampled_from(TRAINING))
_JSON = ("lists", "deep", "deep objects", "number", "text", "keys", "escapes", "spaces")
_ROWS = ("one text", "many rows", "long names", "many columns", "nested", "nulls")
_OF_RUNS = st.tuples(st.sampled_from(OF_RUNS), st.sampled_from(READERS))
_OF_TRAINING = st.tuples(
    st.sampled_from([file for file in (*_JSON_FILES, *_BYTES) if file.startswith((_RUN, "data"))]),
    st.sampled_from(TRAINING),
)
_READ = st.one_of(st.tuples(st.sampled_from((*_JSON_FILES, *_LINES, *_BYTES)), _VERBS), _OF_RUNS, _OF_TRAINING)
"""A file and a verb: any two, and more often two of which the verb reads the file."""


def _grown(what: str, read: st.SearchStrategy[Any], hows: tuple[str, ...]) -> st.SearchStrategy[tuple[Any, ...]]:
    drawn = st.tuples(read, _SIZES, st.sampled_from(hows))
    return drawn.map(lambda one: (what, one[0][0], one[1], one[2], one[0][1]))


_CASES = st.one_of(
    _grown("sparse", _READ, ("",)),
    _grown("json", _READ, _JSON),
    st.tuples(st.just("xz"), st.just(f"{_RUN}/metrics.jsonl.xz"), _SIZES,
              st.sampled_from(("line", "lines", "steps", "spaces", "again")), st.sampled_from(READERS)),
    st.tuples(st.just("parquet"), st.sampled_from(("runs", "metrics/small", "chains/small")), _SIZES,
              st.sampled_from(_ROWS), st.sampled_from(OF_TABLES)),
    st.tuples(st.just("tensors"), st.sampled_from(("captures/layer-01.safetensors", _BYTES[2])), _SIZES,
              st.sampled_from(("header", "long header", "shape", "names", "tensor")),
              st.sampled_from((("diagnose", "captures"), TRAINING[0]))),
    st.tuples(st.just("header"), st.just(f"{_RUN}/tape.bin"), _SIZES, st.just(""), st.sampled_from(TRAINING)),
    st.tuples(st.just("alone"), st.sampled_from(("claims.yaml", "log.csv", "log.txt", "trainer_state.json",
                                                 "events.out.tfevents.1", "captures/delta.jsonl")), _SIZES,
              st.sampled_from(("sparse", "line", "columns", "aliases", *_JSON)), st.integers(0, 9)),
)  # fmt: skip


def lay(tree: Path, case: tuple[str, str, int, str, Any]) -> Command:
    what, where, size, how, verb = case
    work = laid(tree)
    path = work / (where if what != "parquet" else f"runs/reference/{where}.parquet")
    path = path if what == "parquet" else next(iter(work.glob(where)), path)
    match what:
        case "sparse":
            _grow(path, size)
        case "json":
            with path.open("ab" if path.suffix == ".jsonl" else "wb") as file:
                file.write(_json(how, min(size, 4)) + b"\n")
        case "xz":
            (work / _RUN / "metrics.jsonl").unlink()
            path.write_bytes(_packed(how, min(size, 300)))
        case "parquet":
            _write_table(path, how, min(size, 300))
        case "tensors":
            _write_tensors(path, how, size)
        case "header":
            path.write_bytes(b"FPTAPE01" + struct.pack("<I", min(size * _MB, 2**32 - 1)) + b"{}")
            _grow(path, size)
        case "alone":
            _write_alone(path, how, size)
            verbs = ALONE[where]
            verb = verbs[verb % len(verbs)]
    read = command(verb)
    changes = {"script": _SCRIPT, "world": World(memory_mib=400), "seconds": 60.0}
    return Command(**{**vars(read), **changes})


def _grow(path: Path, size: int) -> None:
    """Add bytes that the disk does not hold."""
    with path.open("ab") as file:
        file.truncate(file.tell() + size * _MB)


@cache
def _json(how: str, size: int) -> bytes:
    n = size * _MB
    return {
        "lists": b"[" + b"[]," * (n // 3) + b"[]]",
        "deep": b"[" * n,
        "deep objects": b'{"a":' * (n // 5),
        "number": b"1" * n,
        "text": b'{"step": 13, "loss": "' + b"x" * n + b'"}',
        "keys": b"{" + b",".join(b'"%d":0' % key for key in range(n // 10)) + b"}",
        "escapes": b'"' + b"\\u0000" * (n // 6) + b'"',
        "spaces": b" " * n + b"{}",
    }[how]


@cache
def _packed(how: str, size: int) -> bytes:
    line = b'{"step": 1, "loss": 1.5}\n'
    content = {
        "line": b"x" * (size * _MB),
        "lines": line * (min(size, 30) * _MB // len(line)),
        "steps": b"".join(b'{"step":%d,"a%d":1}\n' % (step, step % 999) for step in range(min(size, 3) * 40_000)),
        "spaces": b" " * (size * _MB) + line,
        "again": line,
    }[how]
    packed = lzma.compress(content, preset=0)
    return packed * 2 if how == "again" else packed


def _write_table(path: Path, how: str, size: int) -> None:
    table = pq.read_table(path)
    rows = min(size * _MB // 8, 1_000_000)
    one = table.slice(0, 1)
    text = next((name for name in table.column_names if pa.types.is_string(table[name].type)), table.column_names[0])
    at = table.column_names.index(text)
    match how:
        case "one text":  # what repeats takes no place in the file
            few = min(rows, 200)
            long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(few, np.int32)), pa.array(["x" * (_MB // 2)]))
            table = pa.concat_tables([one] * few).set_column(at, text, long)
        case "many rows":
            places = pa.array(np.zeros(rows, np.int32))
            plain = [column.combine_chunks() for column in one.columns]
            columns = [
                pa.nulls(len(places), column.type)
                if pa.types.is_nested(column.type) or column.null_count
                else pa.DictionaryArray.from_arrays(places, column)
                for column in plain
            ]
            table = pa.table(columns, names=table.column_names)
        case "long names":
            table = table.set_column(at, text, pa.array(["x" * min(size * _MB, 30 * _MB)] * table.num_rows))
        case "many columns":
            for number in range(min(size, 10) * 100):
                table = table.append_column(f"c{number}", pa.nulls(table.num_rows))
        case "nested":
            kind: pa.DataType = pa.int64()
            for _ in range(60):
                kind = pa.list_(kind)
            table = table.append_column("deep", pa.nulls(table.num_rows, kind))
        case "nulls":
            table = pa.Table.from_arrays([pa.nulls(rows, field.type) for field in table.schema], schema=table.schema)
    pq.write_table(table, path, compression="zstd")


def _write_tensors(path: Path, how: str, size: int) -> None:
    count = size * _MB // 4
    told: dict[str, Any] = {"q": {"dtype": "F32", "shape": [1, 1, count, 1], "data_offsets": [0, 4 * count]}}
    match how:
        case "shape":
            told["q"]["shape"] = [2**40, 2**20, 2**3]
        case "names":
            told = {
                f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(min(size, 30) * 1000)
            }
    text = json.dumps(told).encode()
    length = {"header": 2**63, "long header": size * _MB}.get(how, len(text))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", length) + text)
    _grow(path, size)


def _write_alone(path: Path, how: str, size: int) -> None:
    path.parent.mkdir(exist_ok=True)
    few = min(size, 4) * _MB
    match how:
        case "sparse":
            path.write_bytes(b"step,loss\n")
            _grow(path, size)
        case "line":
            path.write_bytes(b"step,loss\n" + b"1," * (few // 2))
        case "columns":
            path.write_bytes(b",".join(b"c%d" % n for n in range(few // 8)) + b"\n")
        case "aliases":
            lines = [f"a{n}: &a{n} [{','.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(min(size, 12))]
            path.write_text("\n".join(lines))
        case _:
            path.write_bytes(_json(how, min(size, 4)))


KIND = Kind("small files, large memory", _CASES, lay, in_ci=10)
