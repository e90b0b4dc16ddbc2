"""Every source gives its documents once, in a fixed order, and says in one line what it cannot read."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashpoint.errors import UserError
from flashpoint.lab.config import DataConfig
from flashpoint.lab.data import corpus
from flashpoint.lab.data.corpus import Shard, source_shards
from flashpoint.lab.data.prepare import prepare
from tests.lab.data.texts import DOCUMENTS, assert_refused, decoded

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
    assert decoded(prepare(settings)) == DOCUMENTS


def test_openwebtext_without_a_network_names_the_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host\nat all")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert_refused(DataConfig(source="openwebtext", root=str(tmp_path)), "data=openwebtext", "data=python_corpus")
