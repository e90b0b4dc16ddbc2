"""What is said where the packages of the laboratory are not installed."""

import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from flashpoint import errors, extras
from flashpoint.extras import from_lab, missing
from tests.records import call, refusal, write_run


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation of which Hydra and PyArrow are missing."""

    def distribution(name: str) -> None:
        if name in ("hydra-core", "pyarrow"):
            raise PackageNotFoundError(name)

    needed = ["torch>=2.6", "hydra-core<1.4,>=1.3; extra == 'lab'", 'scipy>=1; extra == "lab"', "pyarrow; extra=='lab'"]
    needed += ["pytest; extra == 'dev'", "rich>=13"]
    monkeypatch.setattr(extras, "requires", lambda _: needed)
    monkeypatch.setattr(extras, "distribution", distribution)
    missing.cache_clear()
    yield
    missing.cache_clear()


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("verb", ["train", "survival", "report"])
def test_a_verb_of_the_laboratory_says_which_extra_it_needs(verb: str) -> None:
    line = refusal(call(verb, "--help"))
    assert f"flashpoint {verb}" in line
    assert "hydra-core, pyarrow" in line
    assert shlex.split(line.split("; ")[-1]) == [sys.executable, "-m", "pip", "install", "flashpoint[lab]"]


@pytest.mark.usefixtures("light")
def test_what_needs_the_laboratory_says_so_and_what_does_not_goes_on(tmp_path: Path) -> None:
    trained = write_run(tmp_path / "trained", {"name": "flash_bf16"})
    assert f"{trained}, a run of flashpoint train: needs hydra-core" in refusal(call("runs", trained))
    assert "ignite:*, of the evidence tables: needs hydra-core" in refusal(call("runs", "ignite:*"))
    assert call("runs", "--help").returncode == 0


@pytest.mark.usefixtures("light")
def test_without_pip_uv_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda _: None)
    command = shlex.split(refusal(call("report", "--help")).split("; ")[-1])
    assert command == ["uv", "pip", "install", "--python", sys.executable, "flashpoint[lab]"]


def test_an_attribute_of_the_laboratory_is_found_by_name() -> None:
    assert from_lab("report.page:page", "a page").__name__ == "page"
