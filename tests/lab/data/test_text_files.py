"""Text files give their documents once, in a fixed order, and say in one line what cannot be read of them."""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpoint.errors import UserError
from flashpoint.lab.data import text_files
from flashpoint.lab.data.prepare import prepare
from flashpoint.lab.data.text_files import TextShard, text_shards
from tests.lab.data.texts import DOCUMENTS, assert_refused, config, decoded


@pytest.mark.parametrize(
    ("name", "content", "fragments"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n', ["a.jsonl:2", "data.text_field"]),
        ("a.jsonl", b'{"body": "x"}\n', ["a.jsonl:1", "'text'"]),
        ("a.jsonl", b'{"text": 5}\n', ["a.jsonl:1", "no text"]),
        ("a.jsonl", b"[1]\n", ["a.jsonl:1"]),
        ("a.jsonl", b'{"text": null}\n', ["a.jsonl:1", "no text"]),
        ("a.jsonl", b'{"text": "fine"}\n\n{"text": "\xff"}\n', ["a.jsonl:3", "UTF-8", "mend"]),
        ("a.jsonl", b'{"text": "\\ud800"}\n', ["a.jsonl:1", "surrogates", "mend"]),
        ("a.jsonl", b"[" * 100_000, ["a.jsonl:1", "mend"]),
        ("a.txt", b"\xff\xfe\x00broken", ["a.txt", "UTF-8"]),
        ("a.parquet", b"no parquet", ["a.parquet"]),
        ("a.txt", b"", ["a.txt", "too few", "data.val_fraction"]),
        ("a.pdf", b"x", ["data.path=", ".parquet"]),
    ],
)
def test_bad_text_is_refused_by_file_and_line(tmp_path: Path, name: str, content: bytes, fragments: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    assert_refused(config(tmp_path / name, tmp_path / "data"), *fragments)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(config(tmp_path / "empty", tmp_path / "data"), "empty", ".jsonl")
    assert_refused(config(tmp_path / "none", tmp_path / "data"), "none", "No such", "give a file or folder")


def test_a_link_to_nothing_is_refused_and_a_folder_with_a_suffix_is_entered(tmp_path: Path) -> None:
    (tmp_path / "text/inner.txt").mkdir(parents=True)
    (tmp_path / "text/inner.txt/a.txt").write_text(DOCUMENTS[0])
    dataset = prepare(config(tmp_path / "text", tmp_path / "data"))
    assert dataset.description()["characters"] == len(DOCUMENTS[0])
    (tmp_path / "text/gone.txt").symlink_to(tmp_path / "nowhere")
    assert_refused(config(tmp_path / "text", tmp_path / "data"), "gone.txt", "mend or delete")


@pytest.mark.parametrize(("name", "content"), [("a.txt", b"word"), ("a.jsonl", b'{"text": "word"}')])
def test_the_mark_at_the_beginning_of_a_windows_file_is_no_text(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert list(TextShard((tmp_path / name,), "text", None).documents()) == ["word"]


def test_a_file_that_vanishes_is_not_blamed_on_the_data_root(tmp_path: Path) -> None:
    shard = TextShard((tmp_path / "gone.txt",), "text", None)
    with pytest.raises(UserError, match=r"gone\.txt: No such file.*make it readable"):
        list(shard.documents())


def test_damaged_parquet_pages_are_refused_in_one_line(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    texts = [f"{n} " * 20 for n in range(2000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 2000 + content[2004:])  # the footer is whole
    assert_refused(config(path, tmp_path / "data"), "a.parquet", "restore it")


def test_parquet_and_plain_text_hold_the_same_documents(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = DOCUMENTS[:50]
    pyarrow.parquet.write_table(pyarrow.table({"body": texts, "n": range(50)}), tmp_path / "a.parquet")
    (tmp_path / "folder").mkdir()
    for n, text in enumerate(texts):
        (tmp_path / f"folder/{n:03}.txt").write_text(text)
    parquet = prepare(config(tmp_path / "a.parquet", tmp_path / "data", text_field="body"))
    plain = prepare(config(tmp_path / "folder", tmp_path / "data"))
    assert parquet.fingerprint == plain.fingerprint
    assert_refused(config(tmp_path / "a.parquet", tmp_path / "data"), "body", "data.text_field")


def test_records_may_begin_with_a_mark_of_their_encoding(tmp_path: Path) -> None:
    """The first line was refused as no JSON object with a field that it has."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    assert list(TextShard((file,), "text", None).documents()) == ["one", "two"]


def test_max_bytes_is_the_size_of_the_text_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for n in range(4):
        (tmp_path / f"folder/{n}.txt").write_text("".join(DOCUMENTS[10 * n : 10 * n + 10]))
    whole = "".join(DOCUMENTS[:40]).encode()
    for limit in (1001, 3000):
        taken = "".join(decoded(prepare(config(tmp_path / "folder", tmp_path / "data", max_bytes=limit)))).encode()
        assert limit - 4 < len(taken) <= limit  # a character cut in half is left out
        assert whole.startswith(taken)


def former(paths: list[Path], limit: int | None) -> list[str]:
    """The documents of plain files, each read whole, with the limit applied afterwards."""
    found, left = list[str](), sys.maxsize if limit is None else limit
    for path in paths:
        text = path.read_text(encoding="utf-8-sig").encode()[:left].decode(errors="ignore")
        found += [text] if text else []
        left -= len(text.encode())
        if left <= 0:
            break
    return found


def said(read: Callable[[], list[str]]) -> list[str] | int:
    """What was read, or the byte that is no UTF-8."""
    try:
        return read()
    except UnicodeDecodeError as error:
        return error.start
    except UserError as error:
        return int(str(error).split("no UTF-8 at byte ")[1].split(";")[0].replace(",", ""))


PARTS = [b"a", b"word ", b"\r", b"\n", b"\r\n", "é".encode(), "Ω".encode(), "😀".encode(), b"\xef\xbb\xbf", b"\0"]
TEXTS = st.lists(st.lists(st.sampled_from(PARTS), max_size=12).map(b"".join), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(TEXTS, st.none() | st.integers(1, 60), st.integers(1, 40))
def test_files_that_are_read_together_and_in_part_have_the_text_of_whole_ones(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], limit: int | None, together: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    paths = [folder / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    with mock.patch.multiple(text_files, SHARD_BYTES=together, _SHARDS=1):
        shards = list(text_shards(config(folder, folder / "data", max_bytes=limit)))
    assert [path for shard in shards for path in shard.paths] == paths[: sum(len(shard.paths) for shard in shards)]
    assert [text for shard in shards for text in shard.documents()] == former(paths, limit)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from([*PARTS, b"\xff", b"\xc3", b"\xe2\x82"]), max_size=10).map(b"".join))
def test_damage_is_told_at_its_byte(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("texts") / "a.txt"
    path.write_bytes(content)
    for limit in (None, len(content) + 1):
        shard = TextShard((path,), "text", limit)
        assert said(lambda shard=shard: list(shard.documents())) == said(lambda: former([path], None))


def test_no_more_of_a_file_is_read_than_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    with path.open("wb") as file:
        file.write(b"word " * 200)
        file.truncate(2**40)  # a hole of 1 TB
    assert list(TextShard((path,), "text", 1000).documents()) == ["word " * 200]


@pytest.mark.slow
def test_many_small_files_are_few_shards_and_large_ones_a_shard_each(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(1000):
        (tmp_path / f"text/{number:03}.txt").write_text("word " * 20)
    assert 60 <= len(list(text_shards(config(tmp_path / "text", tmp_path)))) <= 70
    (tmp_path / "text/500.txt").write_text("word " * 10_000)
    assert (tmp_path / "text/500.txt",) in (s.paths for s in text_shards(config(tmp_path / "text", tmp_path)))
