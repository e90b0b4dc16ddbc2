"""Every source gives its documents once, in a fixed order, and says in one line what it cannot read."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flashpoint.config import DataConfig
from flashpoint.data import corpus
from flashpoint.data.corpus import Shard, TextShard, source_shards
from flashpoint.data.prepare import prepare
from flashpoint.data.tokenizer import load_bpe
from flashpoint.errors import UserError
from tests.data.texts import DOCUMENTS, assert_refused, config, decoded


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
    assert dataset.sidecar["characters"] == len(DOCUMENTS[0])
    (tmp_path / "text/gone.txt").symlink_to(tmp_path / "nowhere")
    assert_refused(config(tmp_path / "text", tmp_path / "data"), "gone.txt", "mend or delete")


def test_a_file_that_vanishes_is_not_blamed_on_the_data_root(tmp_path: Path) -> None:
    shard = corpus.TextShard(tmp_path / "gone.txt", "text", None)
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
    assert list(TextShard(file, "text", None).documents()) == ["one", "two"]


def test_max_bytes_is_the_size_of_the_text_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for n in range(4):
        (tmp_path / f"folder/{n}.txt").write_text("".join(DOCUMENTS[10 * n : 10 * n + 10]))
    whole = "".join(DOCUMENTS[:40]).encode()
    for limit in (1001, 3000):
        dataset = prepare(config(tmp_path / "folder", tmp_path / "data", max_bytes=limit))
        tokenizer = load_bpe(dataset.path / "tokenizer.json")
        taken = "".join(decoded(np.concatenate([dataset.train, dataset.val]), tokenizer)).encode()
        assert limit - 4 < len(taken) <= limit  # a character cut in half is left out
        assert whole.startswith(taken)


# The Python corpus


@pytest.fixture
def site(tmp_path: Path) -> list[Path]:
    """Folders of an interpreter: its library, and packages installed within."""
    roots = [tmp_path / "lib", tmp_path / "lib/site-packages"]
    files = {
        "lib/a.py": "print(1)\n",
        "lib/copy_of_a.py": "print(1)\n",
        "lib/__pycache__/a.cpython-311.pyc": "x",
        "lib/__pycache__/cached.py": "cached",
        "lib/binary.so": "x",
        "lib/empty.py": "\n",
        "lib/large.py": "#" * 1_000_001,
        "lib/site-packages/b.md": "# b\n",
        "lib/site-packages/c/c.pyi": "c: int\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "lib/latin.py").write_bytes(b"# \xe9\n")
    return roots


def shards_of(roots: list[Path], max_bytes: int | None = None) -> list[Shard]:
    """The corpus of an interpreter that has these folders, the library's first."""
    folders = {"stdlib": roots[0], "purelib": roots[-1], "platlib": roots[-1]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(folders[name]))
        return source_shards(DataConfig(source="python_corpus", max_bytes=max_bytes))


def texts(roots: list[Path], max_bytes: int | None = None) -> list[str]:
    return [text for shard in shards_of(roots, max_bytes) for text in shard.documents()]


def test_the_python_corpus_takes_each_text_once(site: list[Path]) -> None:
    assert sorted(texts(site)) == ["# b\n", "c: int\n", "print(1)\n"]


def test_the_python_corpus_is_ordered_by_the_hash_of_relative_names(
    site: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"a.py": "print(1)\n", "copy_of_a.py": "print(1)\n", "b.md": "# b\n", "c/c.pyi": "c: int\n"}
    by_hash = [names[name] for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())]
    expected = list(dict.fromkeys(by_hash))
    assert texts(site) == expected
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda root: reversed(list(walk(root))))
    assert [text for text in texts(site) if text != "cached"] == expected


def test_packages_of_the_base_interpreter_are_no_part_of_a_virtual_environment(site: list[Path]) -> None:
    assert texts([site[0]]) == ["print(1)\n"]


@pytest.mark.parametrize("change", ["rewritten", "deleted"])
def test_a_file_that_changes_during_preparation_is_refused(site: list[Path], change: str) -> None:
    shards = shards_of(site)
    file = site[1] / "b.md"
    file.unlink() if change == "deleted" else file.write_text("# c\n")
    with pytest.raises(UserError, match=r"b\.md: changed while the corpus was prepared; run again"):
        [list(shard.documents()) for shard in shards]


def test_a_python_corpus_of_many_shards_is_that_of_one(site: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = texts(site)
    monkeypatch.setattr(corpus, "SHARD_BYTES", 1)
    assert len(shards_of(site)) == 3
    assert texts(site) == whole


def test_max_bytes_is_the_size_of_the_python_corpus(site: list[Path]) -> None:
    whole = "".join(texts(site))
    for limit in range(1, len(whole) + 1):
        assert "".join(texts(site, limit)) == whole[:limit]


# OpenWebText


@pytest.fixture(autouse=True)
def _forget_openwebtext() -> Iterator[None]:
    yield
    corpus.load_openwebtext.cache_clear()


@pytest.mark.parametrize("script_on_main", [False, True])
def test_openwebtext_is_taken_in_ranges_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script_on_main: bool
) -> None:
    import datasets

    loaded = datasets.Dataset.from_dict({"text": DOCUMENTS})

    def load_dataset(name: str, split: str, revision: str = "main") -> datasets.Dataset:
        assert (name, split) == ("Skylion007/openwebtext", "train")
        if script_on_main and revision == "main":
            raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")
        return loaded

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(corpus, "OPENWEBTEXT_SHARD", 70)
    settings = DataConfig(source="openwebtext", vocab_size=300, val_fraction=0.1, root=str(tmp_path), workers=1)
    dataset = prepare(settings)
    tokens = np.concatenate([dataset.train, dataset.val])
    assert decoded(tokens, load_bpe(dataset.path / "tokenizer.json")) == DOCUMENTS


def test_openwebtext_without_a_network_names_the_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host\nat all")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert_refused(DataConfig(source="openwebtext", root=str(tmp_path)), "data=openwebtext", "data=python_corpus")
