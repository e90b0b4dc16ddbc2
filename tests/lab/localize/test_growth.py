"""From which starts W_Q grows beyond chance, and the share of a branch, on norms that are known."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.localize.branches import Branches
from flashpoint.lab.localize.growth import Effect, Measure, NoGrowthError, Start, find_starts, fit
from flashpoint.lab.localize.questions import answers
from flashpoint.lab.localize.subject import Trained
from flashpoint.runs.folder import RunFolder

LAYERS, HEADS = 4, 4
Cells = frozenset[tuple[int, int]]


def cells(layers: Sequence[int], heads: Sequence[int] | None = None) -> Cells:
    return frozenset((layer, head) for layer in layers for head in heads or range(1, HEADS + 1))


@dataclass(frozen=True)
class Chaotic:
    """A run whose every branch errs by chance, by up to a hundredth, and in which some heads of layer 2 grow.

    Attributes:
        grown: by start, growth of each head of layer 2 in nats, and then of layer 3, if it grows.
        needs: of each head that grows, those of layer 2 that have to have the run's attention.
    """

    grown: dict[int, tuple[float, ...]]
    needs: dict[int, tuple[int, ...]] = field(default_factory=dict)

    divisible = True
    whole = cells(range(1, LAYERS + 1))
    twin: Cells = frozenset()
    second_twin: Cells = frozenset({(0, 1), (0, 2)})  # of no layer

    @property
    def run(self) -> Any:
        return SimpleNamespace(
            shape=SimpleNamespace(n_layer=LAYERS, n_head=HEADS),
            config=SimpleNamespace(train=SimpleNamespace(warmup_steps=0)),
            failed_at=None,
            outcome=SimpleNamespace(step=10_000),
            verdict="stable to 10,000",
        )

    @property
    def checkpoints(self) -> list[int]:
        return list(self.grown)

    def only_in(self, cells: NDArray[np.bool_]) -> Cells:
        return frozenset((int(layer) + 1, int(head) + 1) for layer, head in np.argwhere(cells))

    def changes(self) -> Iterator[tuple[str, Cells]]:
        yield from ()

    def describe(self, attention: Cells) -> str:
        return str(sorted(attention))

    def identity(self, attention: Cells, start: int) -> str:
        return self.describe(attention)

    def train(self, attention: Cells, start: int, steps: int, folder: Path) -> Trained:
        chance = np.random.default_rng([start, *(10 * layer + head for layer, head in sorted(attention))])
        norms = np.exp(chance.uniform(-0.005, 0.005, (LAYERS, HEADS)))
        for number, growth in enumerate(self.grown[start]):
            layer, head = 2 + number // HEADS, 1 + number % HEADS
            if all((layer, other) in attention for other in self.needs.get(head, (head,))):
                norms[layer - 1, head - 1] *= np.exp(growth)
        return Trained("stable", None, norms.tolist())


def told(subject: Chaotic, folder: Path, starts: int, question: str, gpus: int = 1) -> list[tuple[str, str]]:
    with Branches(subject, RunFolder(folder), 200, None, gpus) as branches:
        *_, stand = answers(branches, starts)
    return [(one.verdict, one.evidence) for one in stand if one.question == question]


def test_of_heads_that_grow_from_different_starts_each_is_judged_where_it_grows(tmp_path: Path) -> None:
    """The share of one head in the growth of all would be 0 from one start, and 1 from another."""
    grown = {1000: (0.0, 0.4, 0.0, 0.0), 2000: (0.0, 0.4, 0.3, 0.0), 3000: (0.0, 0.0, 0.5, 0.0)}
    found = [verdict for verdict, _ in told(Chaotic(grown), tmp_path, 3, "heads")]
    assert found == [
        "head 2 of layer 2 alone: grows",
        "head 3 of layer 2 alone: grows",
        "heads 2, 3 of layer 2 together: sufficient",
        "heads 2, 3 of layer 2: necessary: the others do not grow",
    ]
    assert [verdict for verdict, _ in told(Chaotic(grown), tmp_path, 3, "layers")] == [
        "layer 2 alone: sufficient",
        "layer 2: necessary: the others do not grow",
    ]


def test_a_head_that_grows_by_another_ones_attention_is_not_named(tmp_path: Path) -> None:
    grown = dict.fromkeys((1000, 2000, 3000), (0.5, 0.0, 0.1, 0.0))
    found = [verdict for verdict, _ in told(Chaotic(grown, {3: (1,)}), tmp_path, 3, "heads")]
    assert found == [
        "head 1 of layer 2 alone: grows",
        "head 3 of layer 2 alone: does not grow",
        "head 1 of layer 2 alone: sufficient",
        "head 1 of layer 2: necessary: the others do not grow",
    ]


def test_heads_that_act_together_are_found_by_delta_debugging(tmp_path: Path) -> None:
    """Head 1 grows if it and head 4, which does not grow, have the run's attention: none alone."""
    grown = dict.fromkeys((1000, 2000, 3000), (0.5, 0.0, 0.0, 0.0))
    found = [verdict for verdict, _ in told(Chaotic(grown, {1: (1, 4)}), tmp_path, 3, "heads")]
    assert found == [
        "head 1 of layer 2 alone: does not grow",
        "heads 1, 4 of layer 2 together: sufficient",
        "heads 1, 4 of layer 2: necessary: the others do not grow",
    ]


def test_heads_of_two_layers_are_named_layer_by_layer(tmp_path: Path) -> None:
    """Head 1 of layer 2 and head 3 of layer 3 grow: neither head 3 of layer 2 nor head 1 of layer 3 takes part."""
    grown = dict.fromkeys((1000, 2000, 3000), (0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.4, 0.0))
    verdicts = told(Chaotic(grown), tmp_path, 3, "layers")
    assert [verdict for verdict, _ in verdicts][2:] == [
        "layers 2, 3 together: sufficient",
        "layers 2, 3: necessary: the others do not grow",
    ]
    assert [verdict for verdict, _ in told(Chaotic(grown), tmp_path, 3, "heads")] == [
        "head 1 of layer 2 alone: grows",
        "head 3 of layer 3 alone: grows",
        "head 1 of layer 2 and head 3 of layer 3 together: sufficient",
        "head 1 of layer 2 and head 3 of layer 3: necessary: the others do not grow",
    ]


def test_the_share_is_that_of_the_heads_that_grow(tmp_path: Path) -> None:
    subject = Chaotic({3000: (0.3, 0.0, 0.5, 0.0)})
    with Branches(subject, RunFolder(tmp_path), 200, None) as branches:
        starts, _ = find_starts(branches, 1)
        measure = Measure(branches, starts)
        whole = measure.effect(subject.whole)
        # chance: at most 0.01 of two heads, twice
        assert whole.branch == whole.run == {3000: pytest.approx(0.8, abs=4 * 0.01)}
        assert measure.effect(subject.twin).branch == {3000: 0.0}
        assert measure.effect(cells([2], [1])).branch == {3000: pytest.approx(0.3, abs=4 * 0.01)}


@dataclass(frozen=True)
class Known(Chaotic):
    """A run whose branches end with norms that are known, from every start alike.

    Attributes:
        ends: ln of the norms, [n_layer, n_head] or one for all: of the run, and of the second twin. The twin's are 1.
        outcome: of the second twin.
    """

    ends: tuple[Any, Any] = (0.0, 0.0)
    outcome: Any = "stable"

    def train(self, attention: Cells, start: int, steps: int, folder: Path) -> Trained:
        logs = {self.twin: 0.0, self.second_twin: self.ends[1]}.get(attention, self.ends[0])
        outcome = self.outcome if attention == self.second_twin else "stable"
        onset = start + 100 if outcome == "exploded" else None
        return Trained(outcome, onset, np.exp(np.zeros((LAYERS, HEADS)) + logs).tolist())


def starts_of(subject: Known, folder: Path) -> tuple[list[Start], list[Start]]:
    folder.mkdir(exist_ok=True)
    with Branches(subject, RunFolder(folder), 200, None) as branches:
        return find_starts(branches, 2)


def start(step: int, growth: NDArray[np.float64] | list[list[float]], chance: float = 0.02) -> Start:
    growth = np.array(growth, np.float64)
    return Start(step, np.ones_like(growth), growth, chance)


def grid(**changed: float) -> NDArray[np.float64]:
    """Growth by chance of 4 layers of 4 heads, 0.02 at most, but for some: ``of_12=0.3`` is layer 1, head 2."""
    growth = np.resize([0.02, -0.02, 0.01], (4, 4))
    for name, value in changed.items():
        layer, head = map(int, name.removeprefix("of_"))
        growth[layer - 1, head - 1] = value
    return growth


def test_a_head_grows_from_three_times_chance_on() -> None:
    found = start(1, grid(of_12=0.0601, of_33=0.0599, of_44=0.5))
    assert [tuple(map(int, cell)) for cell in np.argwhere(found.growing)] == [(0, 1), (3, 3)]
    assert found.evidence == "growth ×1.65, chance ×1.02"
    assert not start(1, grid(of_12=0.9), chance=0.31).growing.any()
    assert not start(1, np.full((4, 4), np.nan)).growing.any()
    assert not start(1, grid(of_12=0.9), chance=np.nan).growing.any()


@pytest.mark.parametrize("sign", [1, -1])
def test_chance_is_what_the_second_twin_differs_by_in_either_direction(tmp_path: Path, sign: int) -> None:
    """A head that the second twin has larger says as much of chance as one that it has smaller."""
    pair = sign * grid(of_34=0.1)
    (found, _), others = starts_of(Known({0: (), 1000: ()}, ends=(grid(of_12=0.31, of_44=0.29), pair)), tmp_path)
    assert found.chance == pytest.approx(0.1)
    assert (found.evidence, others) == ("growth ×1.36, chance ×1.11", [])
    assert [tuple(map(int, cell)) for cell in np.argwhere(found.growing)] == [(0, 1)]


def test_a_drift_of_all_heads_is_growth_only_if_it_is_clear_of_chance(tmp_path: Path) -> None:
    """No head of the run's branch ends below the twin's: of that branch alone chance would seem to be nothing."""
    pair, (low, high) = np.resize([0.02, -0.02, 0.01], (4, 4)), (0.058, 0.062)
    with pytest.raises(NoGrowthError, match=r"by ×1\.06 in 200 steps, where chance makes ×1\.02"):
        starts_of(Known({0: (), 1000: ()}, ends=(low, pair)), tmp_path / "low")
    found, others = starts_of(Known({0: (), 1000: ()}, ends=(high, pair)), tmp_path / "high")
    assert ([one.growing.all() for one in found], others) == ([True, True], [])
    with pytest.raises(NoGrowthError):  # of one start it is not confirmed
        starts_of(Known({1000: ()}, ends=(high, pair)), tmp_path / "one")


@pytest.mark.parametrize(("pair", "outcome"), [(np.nan, "nonfinite"), (0.01, "exploded"), (-np.inf, "stable")])
def test_where_the_second_twin_fails_chance_is_not_measured(tmp_path: Path, pair: float, outcome: str) -> None:
    subject = Known({0: (), 1000: ()}, ends=(0.9, pair), outcome=outcome)
    with pytest.raises(UserError, match="or the second twin, by which chance is measured, has exploded; give fewer"):
        starts_of(subject, tmp_path / "all")

    class FromTheNewest(Known):
        def train(self, attention: Cells, start: int, steps: int, folder: Path) -> Trained:
            if attention == self.second_twin and start < 1000:
                return super().train(self.twin, start, steps, folder)
            return super().train(attention, start, steps, folder)

    found = told(FromTheNewest(subject.grown, ends=subject.ends, outcome=outcome), tmp_path, 2, "starts")
    verdict = "step 1,000: chance cannot be measured here: the second twin explodes, or its W_Q is no number"
    assert found[0] == (verdict, "growth ×2.46, chance not known")
    assert found[1][0].startswith("1 of 2 that were asked for")
    assert len(found) == 2


def test_a_head_that_grows_a_tenth_of_the_largest_growth_takes_no_part() -> None:
    assert start(1, [[0.089, 0.091], [0.9, 0.0]]).growing.tolist() == [[False, True], [True, False]]


def test_of_few_heads_a_largest_one_tells_little_and_each_start_has_to_grow_by_a_quarter() -> None:
    few = [start(step, [[growth, 0.0], [0.0, 0.0]]) for step, growth in enumerate((0.2, 0.22, 0.23))]
    assert [one.step for one in fit(few)] == [2]
    eight = [start(one.step, np.pad(one.growth, ((0, 0), (0, 2)))) for one in few]
    assert [one.step for one in fit(eight)] == [0, 1, 2]


def test_a_small_growth_counts_only_if_the_same_head_grows_from_another_start() -> None:
    """ln 1.25 = 0.223."""
    small, same, other, large = (grid(of_12=0.1), grid(of_12=0.2), grid(of_22=0.1), grid(of_33=0.23))
    starts = [start(step, growth) for step, growth in enumerate((small, same, other, large, grid()))]
    assert [one.step for one in fit(starts)] == [0, 1, 3]
    assert fit([starts[0], starts[2]]) == []


def test_of_two_starts_a_growth_of_thousandths_is_none() -> None:
    """It is clear of chance, and repeats: roundings of δ move W_Q of a run that stays stable. ln 1.02 = 0.0198."""

    def alone(growth: float, step: int) -> Start:
        grown = np.zeros((4, 4))
        grown[0, 1] = growth
        return start(step, grown, chance=1e-4)

    for growth, counts in ((0.001, False), (0.0197, False), (0.0199, True)):
        assert bool(fit([alone(growth, 0), alone(growth, 300)])) == counts
    assert fit([alone(0.0199, 0), alone(0.01, 300)]) == []


def test_a_growth_beyond_chance_that_is_too_small_is_not_said_to_be_chance(tmp_path: Path) -> None:
    subject = Chaotic({0: (0.15,), 1000: ()})
    with (
        pytest.raises(NoGrowthError) as refused,
        Branches(subject, RunFolder(tmp_path), 200, None) as branches,
    ):
        find_starts(branches, 2)
    assert "it has to grow by ×1.25, or the same head has to grow from two checkpoints" in str(refused.value)
    assert "beyond chance" not in str(refused.value)


@pytest.mark.parametrize(
    ("growths", "chosen", "refused"),
    [
        ((0.3, 0.9, 0.4, 0.5), [3000, 2000], []),
        ((0.3, 0.9, 0.0, 0.5), [3000, 1000], [2000]),
        ((0.9, float("nan"), 0.0, 0.0), [0], [3000, 2000, 1000]),
    ],
)
def test_the_newest_starts_that_grow_are_taken(
    tmp_path: Path, growths: tuple[float, ...], chosen: list[int], refused: list[int]
) -> None:
    subject = Chaotic({1000 * at: (growth, 0.0, 0.0, 0.0) for at, growth in enumerate(growths)})
    with Branches(subject, RunFolder(tmp_path), 200, None) as branches:
        found, others = find_starts(branches, 2)
    assert ([one.step for one in found], [one.step for one in others]) == (chosen, refused)


@pytest.mark.parametrize(
    ("newest_first", "chosen", "refused"),
    [
        ((0.9, 0.5, 0.0, 0.0, 0.9, 0.9), [5000, 4000], [3000, 2000]),  # before the growth nothing is looked for
        ((0.9, 0.0, 0.5, 0.0, 0.9, 0.0), [5000, 3000, 1000], [4000, 2000]),
        ((0.0, 0.0, 0.0, 0.0, 0.9, 0.9), [1000, 0], [5000, 4000, 3000, 2000]),  # none counts yet
    ],
)
def test_the_search_ends_at_two_checkpoints_before_the_growth(
    tmp_path: Path, newest_first: tuple[float, ...], chosen: list[int], refused: list[int]
) -> None:
    growths = {1000 * at: (growth, 0.0, 0.0, 0.0) for at, growth in enumerate(reversed(newest_first))}
    with Branches(Chaotic(growths), RunFolder(tmp_path), 200, None) as branches:
        found, others = find_starts(branches, 3)
    assert ([one.step for one in found], [one.step for one in others]) == (chosen, refused)


def test_no_batch_is_in_two_branches(tmp_path: Path) -> None:
    subject = Chaotic({100 * at: (0.5, 0.0, 0.0, 0.0) for at in range(10)})
    with Branches(subject, RunFolder(tmp_path), 200, None) as branches:
        assert [one.step for one in find_starts(branches, 4)[0]] == [900, 700, 500, 300]


def test_starts_that_do_not_count_are_named_and_leave_the_answers_alone(tmp_path: Path) -> None:
    subject = Chaotic({0: (0.5,), 1000: (0.0,), 2000: (0.0,)})
    found = told(subject, tmp_path, 3, "starts")
    assert [verdict for verdict, _ in found[:2]] == [
        "step 2,000: no growth to localise here",
        "step 1,000: no growth to localise here",
    ]
    assert found[2][0].startswith("1 of 3 that were asked for, and no interval: keep more checkpoints")
    assert found[0][1] in ("growth ×1.01, chance ×1.01", "growth ×1.01, chance ×1.00")
    assert told(subject, tmp_path, 3, "layers")[0][0] == "layer 2 alone: sufficient, from one start"


def test_a_run_that_nowhere_grows_beyond_chance_is_refused(tmp_path: Path) -> None:
    subject = Chaotic({1000 * at: () for at in range(4)})
    with (
        pytest.raises(NoGrowthError, match=r"by ×1\.01 in 200 steps, where chance makes .* from 3 other checkpoints"),
        Branches(subject, RunFolder(tmp_path), 200, None) as branches,
    ):
        find_starts(branches, 2)
    assert not (tmp_path / "branches").exists()


def test_norms_that_are_no_numbers_have_failed_as_the_run_did(tmp_path: Path) -> None:
    class Breaking(Chaotic):
        def train(self, attention: Cells, start: int, steps: int, folder: Path) -> Trained:
            trained = super().train(attention, start, steps, folder)
            return Trained("nonfinite", start, [[float("nan")] * 4] * 4) if len(attention) == broken else trained

    subject, broken = Breaking({3000: (0.5, 0.0, 0.0, 0.0)}), 1
    with Branches(subject, RunFolder(tmp_path), 200, None) as branches:
        measure = Measure(branches, find_starts(branches, 1)[0])
        failed = measure.effect(cells([1], [1]))
        assert failed.branch == failed.run
    (tmp_path / "localize.jsonl").unlink()
    broken = LAYERS * HEADS
    with Branches(subject, RunFolder(tmp_path), 200, None) as branches, pytest.raises(UserError, match="no number"):
        find_starts(branches, 1)


def effect(run: Sequence[float], branch: Sequence[float]) -> Effect:
    return Effect(dict(enumerate(run)), dict(enumerate(branch)))


def test_an_interval_over_starts_tells_whether_it_decides() -> None:
    """Where the run grows alike from all starts: the mean share, and Student's t with two degrees of freedom, 4.303."""
    assert effect([1, 1, 1], [0.8, 0.9, 1.0]).evidence == "0.90 ± 0.25 of the growth, 3 of 3 starts"
    undecided = effect([1, 1, 1], [0.4, 0.9, 0.6])
    assert (undecided.evidence, undecided.decided) == ("0.63 ± 0.63 of the growth, 2 of 3 starts", False)
    assert effect([2], [1.6]).evidence == "0.80 of the growth, 1 of 1 starts"


def test_a_start_from_which_little_grows_says_little() -> None:
    """By hand: (1·1 + 2·1) / (1² + 2²) = 0.6; its error √((0.4² + 0.2²) / 1 / 5) = 0.2, times Student's t, 12.706.

    The second start has 2² / (1² + 2²) of the weight.
    """
    assert effect([1, 2], [1, 1]).evidence == "0.60 ± 2.54 of the growth, 1 of 2 starts, one with 80% of the weight"
    chance = effect([2.0, 1.6, 0.1], [0.1, 0.0, 0.1])  # shares of 0.05, 0 and 1
    assert (chance.grows, chance.decided, chance.votes) == (False, True, 1)
