"""The order of questions, the budget and several processes, on a run whose growth is known: head 2 of layer 3."""

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from flashpoint.detector import DetectorConfig
from flashpoint.errors import UserError
from flashpoint.lab.config import TrainConfig
from flashpoint.lab.localize.branches import Branch, Branches, OutOfTimeError
from flashpoint.lab.localize.questions import answers
from flashpoint.lab.localize.subject import Trained
from flashpoint.runs.folder import RunFolder

LAYERS, HEADS = (1, 2, 3), (1, 2)
Cells = frozenset[tuple[int, int]]
"""Layers and heads in which an attention is the run's."""


@dataclass(frozen=True)
class FakeShape:
    n_layer: int = 3
    n_head: int = 2


@dataclass(frozen=True)
class FakeConfig:
    train: TrainConfig = field(default_factory=lambda: TrainConfig(warmup_steps=0))
    detector: DetectorConfig = field(default_factory=lambda: DetectorConfig(hold_steps=50))


@dataclass(frozen=True)
class FakeRun:
    failed_at: int = 1000
    verdict: str = "exploded at 1,000"
    shape: FakeShape = field(default_factory=FakeShape)
    config: FakeConfig = field(default_factory=FakeConfig)


@dataclass(frozen=True)
class FakeSubject:
    """W_Q of a head grows by e in the run if head 2 of layer 3 has its attention; the run is lost from step 700 on."""

    run: Any = field(default_factory=FakeRun)
    seconds: float = 0.0

    checkpoints: ClassVar = [0, 300, 500, 700, 900]
    divisible: ClassVar = True
    whole: Cells = frozenset((layer, head) for layer in LAYERS for head in HEADS)
    twin: Cells = frozenset()
    second_twin: Cells = frozenset({(0, 1)})  # of no layer

    def only_in(self, cells: NDArray[np.bool_]) -> Cells:
        return frozenset((int(layer) + 1, int(head) + 1) for layer, head in np.argwhere(cells))

    def changes(self) -> Iterator[tuple[str, Cells]]:
        yield "nothing", self.whole
        yield "everything", self.twin

    def describe(self, attention: Cells) -> str:
        return str(sorted(attention))

    def identity(self, attention: Cells, start: int) -> str:
        return self.describe(attention)

    def train(self, attention: Cells, start: int, steps: int, folder: Path) -> Trained:
        time.sleep(self.seconds)
        norms = np.ones((len(LAYERS), len(HEADS)))
        norms[2, 1] = np.e if (3, 2) in attention else 1.0
        explodes = start + steps > 1000 and ((3, 2) in attention or start >= 700)
        return Trained("exploded" if explodes else "stable", 1010 if explodes else None, norms.tolist())


def asked(folder: Path, gpus: int = 1, minutes: float | None = None, seconds: float = 0.0) -> list[tuple[str, ...]]:
    folder.mkdir(exist_ok=True)
    with Branches(FakeSubject(seconds=seconds), RunFolder(folder), 200, minutes, gpus) as branches:
        *_, stand = answers(branches, 2)
    return [(one.question, one.verdict, one.evidence) for one in stand]


EXPECTED = [
    (
        "criterion",
        "W_Q against the twin's after 200 steps from 500, 700",
        "growth ×2.72, chance ×1.00; growth ×2.72, chance ×1.00",
    ),
    ("layers", "layer 3 alone: sufficient", "1.00 ± 0.00 of the growth, 2 of 2 starts"),
    ("layers", "layer 3: necessary: the others do not grow", "0.00 ± 0.00 of the growth, 0 of 2 starts"),
    ("heads", "head 2 of layer 3 alone: sufficient", "1.00 ± 0.00 of the growth, 2 of 2 starts"),
    ("heads", "head 2 of layer 3: necessary: the others do not grow", "0.00 ± 0.00 of the growth, 0 of 2 starts"),
    ("choice", "nothing: does not stop the growth", "1.00 ± 0.00 of the growth, 2 of 2 starts"),
    ("choice", "everything: stops the growth", "0.00 ± 0.00 of the growth, 0 of 2 starts"),
    ("no return", "the twin holds from step 500, and no longer from 700", "to step 1,250; one branch a checkpoint"),
    ("onset", "head 2 of layer 3 alone: explodes at 1,010", "from step 500 to 1,250; the run failed at 1,000"),
    ("onset", "without layer 3: does not explode", "from step 500 to 1,250; the run failed at 1,000"),
]


def test_the_answers_are_those_of_the_run(tmp_path: Path) -> None:
    assert asked(tmp_path) == EXPECTED
    log = [json.loads(line) for line in (tmp_path / "localize.jsonl").read_text().splitlines()]
    assert len({one["key"] for one in log}) == len(log)
    assert asked(tmp_path) == EXPECTED  # and nothing is trained anew
    assert len((tmp_path / "localize.jsonl").read_text().splitlines()) == len(log)


class Lost(FakeSubject):
    """Lost from its first step on."""

    def train(self, attention: Cells, start: int, steps: int, folder: Path) -> Trained:
        trained = super().train(attention, start, steps, folder)
        return Trained("exploded", 1010, trained.norms) if start + steps > 1000 else trained


def test_a_run_that_is_lost_from_its_beginning_has_no_step_from_which_the_twin_holds(tmp_path: Path) -> None:
    with Branches(Lost(), RunFolder(tmp_path), 200, None) as branches:
        *_, stand = answers(branches, 2)
    assert [one.verdict for one in stand if one.question == "no return"] == ["the twin holds from no checkpoint"]


class ManyCheckpoints(FakeSubject):
    """The twin, too, is lost from some step on."""

    checkpoints: ClassVar = list(range(0, 1000, 40))
    lost_from: ClassVar = 0
    asked: ClassVar[list[int]] = []

    def train(self, attention: Cells, start: int, steps: int, folder: Path) -> Trained:
        trained = super().train(attention, start, steps, folder)
        if attention != self.twin or steps == 200:
            return trained
        self.asked.append(start)
        return (
            Trained("exploded", 1010, trained.norms)
            if start >= self.lost_from
            else Trained("stable", None, trained.norms)
        )


@pytest.mark.slow
@pytest.mark.parametrize("lost_from", [*range(0, 1000, 40), 1000])
def test_the_point_of_no_return_is_found_wherever_it_is_by_the_shortest_branches(
    lost_from: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(ManyCheckpoints, "asked", asked)
    monkeypatch.setattr(ManyCheckpoints, "lost_from", lost_from)
    with Branches(ManyCheckpoints(), RunFolder(tmp_path), 200, None) as branches:
        *_, stand = answers(branches, 2)
    found = next(one.verdict for one in stand if one.question == "no return")
    if lost_from == 0:
        assert found == "the twin holds from no checkpoint"
    elif lost_from == 1000:
        assert found == "the twin holds from step 960, the last checkpoint"
    else:
        assert found == f"the twin holds from step {lost_from - 40:,}, and no longer from {lost_from:,}"
    longest = 1000 - max(0, lost_from - 40)  # of what has to be trained up to the failure
    assert all(1000 - start <= 2 * longest for start in asked)


def test_branches_that_will_be_asked_for_train_while_others_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three processes the first has what is asked for now; the two others do not wait for it."""
    begun, let = threading.Semaphore(0), threading.Event()

    class Waiting(FakeSubject):
        def train(self, attention: Cells, start: int, steps: int, folder: Path) -> Trained:
            if start == 0:
                assert begun.acquire(timeout=60)
                assert begun.acquire(timeout=60)
            else:
                begun.release()
                assert let.wait(60)
            return super().train(attention, start, steps, folder)

    monkeypatch.setattr("flashpoint.lab.localize.branches.branch_processes", ThreadPoolExecutor)
    now, *later = (Branch(FakeSubject.twin, start, 200) for start in (0, 300, 500))
    with Branches(Waiting(), RunFolder(tmp_path), 200, None, gpus=3) as branches:
        branches.ahead([*later, now])
        branches.train([now])
        assert branches.trained == 1
        let.set()
        branches.train(later)
        assert branches.trained == 3


def test_of_branches_that_an_earlier_version_kept_only_the_second_twins_are_missing(tmp_path: Path) -> None:
    asked(tmp_path)
    log = tmp_path / "localize.jsonl"
    whole = log.read_text().splitlines()
    second = [line for line in whole if json.loads(line)["attention"] == str(sorted(FakeSubject.second_twin))]
    assert len(second) == 2  # one a start
    log.write_text("".join(f"{line}\n" for line in whole if line not in second))
    assert asked(tmp_path) == EXPECTED
    assert [_told(line) for line in log.read_text().splitlines()[-2:]] == [_told(line) for line in second]
    assert len(log.read_text().splitlines()) == len(whole)


def test_branches_of_which_the_time_is_not_known_count(tmp_path: Path) -> None:
    asked(tmp_path)
    log = tmp_path / "localize.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        del line["seconds"]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert asked(tmp_path, minutes=1) == EXPECTED
    assert len(log.read_text().splitlines()) == len(lines)
    log.write_text(f"{json.dumps({**lines[0], 'steps': 0})}\n")
    with pytest.raises(UserError, match="steps: found 0, expected more than 0"):
        asked(tmp_path)


@pytest.mark.slow
def test_a_line_cut_short_costs_its_branch_alone(tmp_path: Path) -> None:
    """A process was killed as it wrote, twice."""
    assert asked(tmp_path) == EXPECTED
    log = tmp_path / "localize.jsonl"
    whole = log.read_bytes()
    for length in (len(whole) - 30, len(whole) // 2):
        log.write_bytes(whole[:length])
        for _ in range(2):
            assert asked(tmp_path) == EXPECTED
        assert sorted(map(_told, log.read_text().splitlines())) == sorted(map(_told, whole.decode().splitlines()))


def _told(line: str) -> str:
    return json.dumps({**json.loads(line), "seconds": 0})


@pytest.mark.parametrize("norms", [[[1.0, 1.0], [1.0]], [[1.0]]])
def test_norms_of_another_model_are_refused(tmp_path: Path, norms: list[list[float]]) -> None:
    asked(tmp_path)
    log = tmp_path / "localize.jsonl"
    first, *others = log.read_text().splitlines()
    log.write_text("\n".join([json.dumps({**json.loads(first), "norms": norms}), *others, ""]))
    with pytest.raises(UserError, match="delete it, and branches are trained anew"):
        asked(tmp_path)


@pytest.mark.slow
def test_branches_side_by_side_give_the_same_answers(tmp_path: Path) -> None:
    assert asked(tmp_path, gpus=2) == EXPECTED


@dataclass(frozen=True)
class Failing(FakeSubject):
    """A branch from step 500 fails at once, or takes its process along."""

    dies: bool = False

    def train(self, attention: Cells, start: int, steps: int, folder: Path) -> Trained:
        if start == 500 and self.dies:
            os._exit(1)
        if start == 500:
            raise UserError("the memory of device cuda is full; lower the model")
        return super().train(attention, start, steps, folder)


@pytest.mark.slow
def test_a_branch_that_fails_leaves_those_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subject = Failing(seconds=1.0)
    pair = [Branch(subject.whole, 500, 200), Branch(subject.whole, 300, 200), Branch(subject.whole, 0, 200)]
    with (
        pytest.raises(UserError, match="lower the model; or give fewer --gpus"),
        Branches(subject, RunFolder(tmp_path), 200, None, gpus=2) as branches,
    ):
        branches.train(pair)
    assert "waiting for what trains beside it: 1" in capsys.readouterr().err
    assert [json.loads(line)["start"] for line in (tmp_path / "localize.jsonl").read_text().splitlines()] == [300]


@pytest.mark.slow
def test_a_process_that_dies_is_told_in_one_line(tmp_path: Path) -> None:
    subject = Failing(dies=True)
    with (
        pytest.raises(UserError, match=r"a process died in a branch from step 500, .* give fewer --gpus"),
        Branches(subject, RunFolder(tmp_path), 200, None, gpus=2) as branches,
    ):
        branches.train([Branch(subject.whole, 500, 200)])


def test_a_second_localisation_of_a_run_is_refused(tmp_path: Path) -> None:
    with (
        Branches(FakeSubject(), RunFolder(tmp_path), 200, None),
        pytest.raises(UserError, match="another process localises it"),
        Branches(FakeSubject(), RunFolder(tmp_path), 200, None),
    ):
        pass


class Clock:
    """A clock that runs while a branch sleeps: a busy machine's would run on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_no_branch_is_begun_that_would_end_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch takes 50 s, and there are 120: two fit, and what was trained is kept."""
    clock = Clock()
    monkeypatch.setattr("flashpoint.lab.localize.branches.time", clock)
    monkeypatch.setattr("tests.lab.localize.test_branches.time", clock)
    found = asked(tmp_path, minutes=2, seconds=50)
    assert [question for question, *_ in found] == ["time"]
    assert len((tmp_path / "localize.jsonl").read_text().splitlines()) == 2
    with Branches(FakeSubject(seconds=1), RunFolder(tmp_path), 200, 0) as branches, pytest.raises(OutOfTimeError):
        branches.train([Branch(FakeSubject.twin, start, 200) for start in (0, 300)])


@pytest.mark.parametrize(
    ("branches", "last", "used", "missing"),
    [
        (14, "choice", "", "no return, onset"),
        (13, "choice", "1 of 2 starts", "no return, onset"),
        (10, "choice", "1 of 2 starts", "no return, onset"),
        (8, "layers", "", "heads, choice, no return, onset"),
        (1, "time", "", "criterion, layers, heads, choice, no return, onset"),
    ],
)
def test_when_time_runs_out_all_questions_have_the_answers_of_fewer_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, branches: int, last: str, used: str, missing: str
) -> None:
    """To find two starts takes 6 branches. From each layers and heads take 2, and the choices none: they are known."""
    clock = Clock()
    monkeypatch.setattr("flashpoint.lab.localize.branches.time", clock)
    monkeypatch.setattr("tests.lab.localize.test_branches.time", clock)
    found = asked(tmp_path, minutes=branches, seconds=60)
    assert found[-1] == ("time", f"over; not answered: {missing}; the same command goes on from here", used)
    assert found[-2:][0][0] == last


def test_no_branch_starts_in_the_warm_up(tmp_path: Path) -> None:
    """There the norms of every head grow."""

    def warming_up(steps: int) -> FakeSubject:
        return FakeSubject(run=FakeRun(config=FakeConfig(train=TrainConfig(warmup_steps=steps))))

    with Branches(warming_up(300), RunFolder(tmp_path), 200, None) as branches:
        assert branches.checkpoints == [300, 500, 700]
    with pytest.raises(UserError, match="no checkpoint lies after the warm-up of 701 steps and 200 steps before that"):
        Branches(warming_up(701), RunFolder(tmp_path), 200, None)


class Wavering(FakeSubject):
    """Has an attention of which one start says that it grows, and the other that it does not."""

    half: ClassVar = frozenset({(1, 1), (2, 2)})

    def changes(self) -> Iterator[tuple[str, Cells]]:
        yield "half", self.half

    def train(self, attention: Cells, start: int, steps: int, folder: Path) -> Trained:
        trained = super().train(attention, start, steps, folder)
        if attention == self.half and start == 500:
            trained.norms[2][1] = float(np.exp(0.8))
        return trained


def test_what_the_starts_leave_open_is_called_undecided(tmp_path: Path) -> None:
    with Branches(Wavering(), RunFolder(tmp_path), 200, None) as branches:
        *_, stand = answers(branches, 2)
    found = [(one.verdict, one.evidence) for one in stand if one.question == "choice"]
    interval = "0.40 ± 5.08 of the growth, 1 of 2 starts"  # Student's t with one degree of freedom: 12.71
    assert found == [("half: undecided whether it stops the growth", interval)]
