"""Which runs a word on the command line names, with the shell and Python's file names as oracles."""

import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashpoint.cli.run_words import expand_braces, open_run, select_runs
from flashpoint.errors import UserError
from flashpoint.lab.evidence.archiving import archive
from tests.lab.evidence.kept import write_kept_run
from tests.records import write_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/ with two runs, and two experiments in the tables, of one a run in a folder too."""
    monkeypatch.chdir(tmp_path)
    runs = [write_kept_run(tmp_path / "made" / f"{name}-{seed}") for name in ("bf16", "fp32") for seed in (0, 1, 10)]
    archive(runs, "ignite", tmp_path / "runs/reference")
    archive(runs[:1], "laptop", tmp_path / "runs/reference")
    for path in ("runs/one", "runs/two", "runs/reference/ignite/taped", "elsewhere/a", "elsewhere/b"):
        write_run(tmp_path / path, {"name": "flash_fp32"})
    (tmp_path / "elsewhere/notes.txt").touch()
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("one", ["runs/one"]),
        ("runs/one", ["runs/one"]),
        ("elsewhere", ["elsewhere/a", "elsewhere/b"]),
        ("elsewhere/[b-z]", ["elsewhere/b"]),
        ("else*", ["elsewhere/a", "elsewhere/b"]),
        ("{two,one}", ["runs/two", "runs/one"]),
        ("t*", ["runs/two"]),
        ("ignite:bf16-0", ["ignite:bf16-0"]),
        ("ignite:bf16-1*", ["ignite:bf16-1", "ignite:bf16-10"]),
        ("ignite:{fp32,bf16}-[01]", ["ignite:fp32-0", "ignite:fp32-1", "ignite:bf16-0", "ignite:bf16-1"]),
        ("{laptop,ignite}:bf16-0", ["laptop:bf16-0", "ignite:bf16-0"]),
        ("*:*-0", ["ignite:bf16-0", "ignite:fp32-0", "laptop:bf16-0"]),
        ("ignite:t*", ["runs/reference/ignite/taped"]),
    ],
)
def test_a_word_names_runs(here: Path, word: str, names: list[str]) -> None:
    assert [run.where for run in select_runs([word])] == names


def test_words_keep_their_order_and_a_run_may_come_twice(here: Path) -> None:
    assert [run.where for run in select_runs(["two", "laptop:*", "two"])] == ["runs/two", "laptop:bf16-0", "runs/two"]


def test_a_folder_goes_before_the_evidence(here: Path) -> None:
    write_run(here / "laptop:bf16-0", {"name": "flash_fp32"})
    assert open_run("laptop:bf16-0").folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "nowhere",
            "nowhere: no run there (no config.json); give a run's folder, e.g. runs/NAME, or EXPERIMENT:PATTERN",
        ),
        ("no*", "no*: no run there"),
        ("", "'': no name; give a run's folder, e.g. runs/NAME, or EXPERIMENT:PATTERN"),
        ("{one,}", "'': no name"),
        ("elsewhere/no.txt", "elsewhere/no.txt: no run there"),
        ("ignit:*", "ignit:*: no experiment ignit in runs/reference; did you mean ignite?"),
        ("laptop:fp*", "laptop:fp*: no run of laptop is named fp*; it has bf16-0"),
        ("{laptop,ignite}:bf16-10", "laptop:bf16-10: no run of laptop is named bf16-10; it has bf16-0"),
    ],
)
def test_a_word_that_names_nothing_is_one_line(here: Path, word: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        select_runs([word])
    assert str(error.value).startswith(told)


def test_where_there_is_no_evidence_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a:b: no experiment a in .*/reference; it has none"):
        select_runs(["a:b"], tmp_path)


def test_one_run_is_one(here: Path) -> None:
    assert open_run("one").name == "one"
    with pytest.raises(UserError, match=r"elsewhere: names 2 runs, one is needed; give one of a, b"):
        open_run("elsewhere")


@pytest.mark.parametrize(
    "word", ["a{b,c}d", "{a,b{c,d}e}-{1,2}", "{a}", "{a,b", "x{,y}", "a,b", "}{,z}", "{{a,b},c}", "{{a,b}", "a{b}{c,d}"]
)
def test_braces_are_those_of_the_shell(word: str) -> None:
    assert expand_braces(word) == in_bash([word])[0]


def test_braces_in_disorder_are_those_of_the_shell() -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("ab-{},", (1, 1, 1, 3, 3, 3), k=draw.randint(1, 14))) for _ in range(2000)]
    # A shell drops a word that is empty; here it is refused later.
    assert [[one for one in expand_braces(word) if one] for word in words] == in_bash(words)


def in_bash(words: Sequence[str]) -> list[list[str]]:
    """Return what each word becomes, in Bash, as other words; each is one argument of ``argv``."""
    script = "\n".join(f"argv {word}" for word in words)
    argv = "argv() { [ $# = 0 ] || printf '%s\\0' \"$@\"; printf '\\n'; }"
    shell = subprocess.run(["bash"], input=f"set -f\n{argv}\n{script}", capture_output=True, text=True, check=True)
    return [line.split("\0")[:-1] for line in shell.stdout.splitlines()]
