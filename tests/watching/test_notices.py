"""Lines of a watch: who gets them, and which run they name."""

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import flashpoint
from flashpoint.listeners import Listeners
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.run import Run
from flashpoint.watching.loop import Watch
from flashpoint.watching.notices import Notices
from tests.watching.loops import Pair, loop, plain


@pytest.fixture(autouse=True)
def configuration() -> Iterator[None]:
    """Put back what a test, as a host program, sets of the loggers."""
    loggers = [logging.getLogger(name) for name in (None, "flashpoint", "flashpoint.watch")]
    before = [(one.level, one.propagate, list(one.handlers), list(one.filters)) for one in loggers]
    yield
    for one, (level, propagate, handlers, filters) in zip(loggers, before, strict=True):
        one.setLevel(level)
        one.propagate, one.handlers[:], one.filters[:] = propagate, handlers, filters


def capturing(model: nn.Module, number: int, watched: Watch) -> None:
    """A step with a capture, which is told, and a loss that is no number of the loop's, which is warned of."""
    if number == 0:
        watched.capture("mine")
    plain(model, number, watched)
    watched.step(None)  # type: ignore[arg-type]


def numbers(run: Run) -> list[float]:
    return [float(one) for one in run.columns["loss"][1].ravel()]


def test_without_a_configuration_lines_are_on_stderr_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop(tmp_path, step=capturing)
    out, err = capsys.readouterr()
    assert out == ""
    assert "watch own: step 0: mine; wrote " in err
    assert err.count("watch own: step 1: reading the loss failed") == 1


@pytest.mark.parametrize("name", [None, "flashpoint", "flashpoint.watch"])
def test_a_handler_of_the_host_program_takes_the_lines_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str | None
) -> None:
    taken = io.StringIO()
    handler = logging.StreamHandler(taken)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logging.getLogger(name).addHandler(handler)
    loop(tmp_path, step=capturing)
    assert capsys.readouterr().err == ""
    assert "INFO flashpoint.watch watch own: step 0: mine; wrote " in taken.getvalue()
    assert "WARNING flashpoint.watch watch own: step 1: reading the loss failed" in taken.getvalue()


def test_a_host_program_can_filter_and_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = logging.getLogger("flashpoint")
    package.setLevel(logging.WARNING)
    loop(tmp_path / "warnings", step=capturing)
    told = capsys.readouterr().err
    assert "reading the loss failed" in told
    assert "mine" not in told
    logging.getLogger("flashpoint.watch").addFilter(lambda record: "reading the loss" not in record.getMessage())
    loop(tmp_path / "filtered", step=capturing)
    assert "reading the loss" not in capsys.readouterr().err
    package.setLevel(logging.CRITICAL)
    loop(tmp_path / "silent", step=capturing)
    assert capsys.readouterr().err == ""


def test_who_takes_the_lines_changes_no_number(tmp_path: Path) -> None:
    runs = [loop(tmp_path / "told")]
    logging.getLogger("flashpoint").setLevel(logging.CRITICAL)
    runs.append(loop(tmp_path / "silent"))
    assert numbers(runs[0]) == numbers(runs[1])


def test_a_handler_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("gone")

    logging.getLogger("flashpoint").addHandler(Broken())
    assert loop(tmp_path, step=capturing).columns["loss"][0].tolist() == [0, 2, 4, 6]


class Raising:
    def write(self, text: str) -> int:
        raise LookupError(text)


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.slow
@pytest.mark.parametrize("stderr", [closed(), None, Raising(), io.TextIOWrapper(io.BytesIO(), "ascii")])
def test_a_stderr_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stderr: object
) -> None:
    """The host closed or replaced it. Lines of a listener that fails take the same way."""

    class Failing:
        name = "mine"

        def begun(self, folder: RunFolder, first_step: int) -> None:
            raise ValueError

    monkeypatch.setattr(sys, "stderr", stderr)
    Listeners([Failing()]).begun(RunFolder(tmp_path), 0)  # type: ignore[list-item]
    assert loop(tmp_path, step=capturing).columns["loss"][0].tolist() == [0, 2, 4, 6]
    assert capsys.readouterr().out == ""  # print takes it where there is no stderr


def test_lines_of_two_watches_name_their_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    with (
        flashpoint.watch(model, runs_dir=tmp_path, name="first") as first,
        flashpoint.watch(other, runs_dir=tmp_path, name="second") as second,
    ):
        for watched in (first, second):
            watched.step(None)  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(("watch first: ", "watch second: ")) for line in lines)
    assert {line.split(":")[0] for line in lines} == {"watch first", "watch second"}


def test_processes_other_than_the_first_record_and_tell_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    model = Pair()
    with flashpoint.watch(model, runs_dir=tmp_path) as watched:
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        watched.capture()
        watched.step(None)  # type: ignore[arg-type]
    watched.step(1.0)
    assert (watched.run, watched.verdict, watched.busy, sum(hooks)) == (None, "stable", False, 0)
    assert capsys.readouterr().err == ""
    assert not any(tmp_path.iterdir())


def test_a_part_that_fails_at_each_step_is_told_once_whatever_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    notices = Notices("own", 0)
    for number in range(3):
        notices.failed("reading the batch", RuntimeError(f"cannot view shape (2, j{number}) as [-1]"))
    notices.failed("reading the batch", ValueError("another"))
    assert capsys.readouterr().err.count("reading the batch failed") == 2
