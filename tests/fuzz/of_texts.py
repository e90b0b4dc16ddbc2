"""Texts of the user's own that are none, and folders of prepared tokens that are not what they say."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.judge import Command, Kind

_SCRIPT = Path(__file__).parent / "prepared.py"
_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.sampled_from((10**30, "\ud800", "long " * 300)),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.sampled_from(("text", "a")), inside, max_size=2),
    max_leaves=4,
)
_LINES = st.one_of(
    _JSON.map(json.dumps),
    st.text(max_size=30).map(lambda text: json.dumps({"text": text * 200})),
    st.sampled_from(("{", "", '{"text"', '{"text": "a"', "[" * 5000, '{"text": "' + "word " * 400 + '"}')),
)
_COLUMNS = st.sampled_from(
    (["text " * 300], [None], [], [1, 2], [1.5], [b"bytes \xff"], [["a"]], [{"a": 1}], ["a", None, "b " * 900])
)
_BYTES = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=50).map(lambda text: (text * 60).encode(errors="replace")),
    st.sampled_from(
        (b"", b"\n", b"word " * 600, b"\0" * 3000, b"\xff\xfe" + b"w\0" * 500, b"\xef\xbb\xbf" + b"w " * 900)
    ),
)
_FILES = st.one_of(
    st.tuples(st.sampled_from(("a.txt", "sub/b.txt", "c.TXT", "d.text", "no suffix")), _BYTES),
    st.tuples(st.just("a.jsonl"), st.lists(_LINES, max_size=4).map(lambda lines: "\n".join(lines).encode())),
    st.tuples(st.just("a.jsonl"), _BYTES),
    st.tuples(st.just("a.parquet"), _BYTES),
    st.tuples(st.sampled_from(("text", "a")), _COLUMNS),  # a parquet file
    st.tuples(st.sampled_from(("link.txt", "folder.txt")), st.none()),
)
_META = ("format_version", "fingerprint", "files", "train", "val", "tokens", "sha256", "largest", "tokenizer",
         "vocab_size", "documents", "request")  # fmt: skip
_AGAIN = st.one_of(
    st.none(),
    st.tuples(st.just("meta"), st.sampled_from(_META), st.one_of(_JSON, st.integers(-2, 70_000), st.just("gone"))),
    st.tuples(st.sampled_from(("meta.json", "train.bin", "val.bin", "tokenizer.json")), st.integers(0, 5000), _BYTES),
)
_CASES = st.one_of(
    st.tuples(
        st.lists(_FILES, max_size=3), st.sampled_from(("texts", "texts/a.txt", "texts/a.jsonl", ".", "")), st.none()
    ),
    st.tuples(st.just([("a.txt", b"word and word " * 300)]), st.just("texts"), _AGAIN),
)


def lay(tree: Path, case: tuple[Any, ...]) -> Command:
    files, path, again = case
    texts = tree / "work/texts"
    texts.mkdir()
    for name, content in files:
        file = texts / name
        file.parent.mkdir(exist_ok=True)
        if isinstance(content, list):
            pq.write_table(pa.table({name: content}), texts / "a.parquet")
        elif name == "link.txt":
            file.unlink(missing_ok=True)
            file.symlink_to("nowhere")
        elif name == "folder.txt":
            file.mkdir(exist_ok=True)
        else:
            file.write_bytes(content)
    (tree / "case.json").write_text(json.dumps(again, default=lambda value: {"bytes": value.hex()}))
    return Command(_SCRIPT, (path,), may_write=("work/data",), notices=("tokenising",), warm=True)


KIND = Kind("texts and tokens", _CASES, lay, in_ci=14)
