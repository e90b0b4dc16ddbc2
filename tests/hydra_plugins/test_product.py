"""The sweeper: which runs a command line means, counted before they are listed."""

import itertools
import re
from typing import Any

import pytest
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from flashpoint.errors import UserError
from hydra_plugins.flashpoint_launcher._sweep import named
from hydra_plugins.flashpoint_launcher.product import MOST_RUNS, ProductSweeper
from tests.conftest import Command
from tests.verdicts import assert_one_line


class Launcher:
    """Keeps what it is to run."""

    jobs: list[list[str]]

    def launch(self, job_overrides: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
        self.jobs = job_overrides
        assert initial_job_idx == 0
        return []


class Context:
    """Hydra's: the options of a group, and what was composed before the first run."""

    def __init__(self) -> None:
        self.config_loader: Any = self
        self.composed: list[list[str]] = []

    def get_group_options(self, group: str, results_filter: object) -> list[str]:
        return {"attn": ["flash_bf16", "flash_fixed", "sdpa"]}[group]

    def load_sweep_config(self, master_config: object, sweep_overrides: list[str]) -> None:
        self.composed.append(sweep_overrides)


def runs_of(*arguments: str, **params: str) -> list[list[str]]:
    sweeper, launcher, context = ProductSweeper(params), Launcher(), Context()
    sweeper.hydra_context, sweeper.launcher, sweeper.config = context, launcher, OmegaConf.create()  # type: ignore
    sweeper.sweep(list(arguments))
    values = set(itertools.chain.from_iterable(launcher.jobs))
    tried = set(itertools.chain.from_iterable(context.composed))
    assert tried <= values
    assert {value.partition("=")[0] for value in tried} == {value.partition("=")[0] for value in values}
    if not any("range" in argument for argument in arguments):
        assert tried == values  # each was seen to compose
    assert len(context.composed) <= len(values)
    return launcher.jobs


def test_a_sweep_is_every_combination_in_the_order_of_the_command_line() -> None:
    names, seeds = ("flash_bf16", "flash_fixed"), range(8)
    expected = [[f"attn={name}", "train.steps=3", f"seed={seed}"] for name in names for seed in seeds]
    assert runs_of("attn=flash_bf16,flash_fixed", "train.steps=3", "seed=range(8)") == expected


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("seed=range(2,7,2)", ["2", "4", "6"]),
        ("seed=range(3,0,-1)", ["3", "2", "1"]),
        ("train.lr=range(0,0.3,0.1)", ["0.0", "0.1", "0.2"]),
        ("train.lr=range(0,0.9,0.3)", ["0.0", "0.3", "0.6"]),  # Hydra has four
        ("train.lr=range(1e-4,5e-4,1e-4)", ["0.0001", "0.0002", "0.0003", "0.0004"]),
        ("train.lr=range(0.3,0,-0.1)", ["0.3", "0.2", "0.1"]),
        ("train.lr=range(0,1,0.4)", ["0.0", "0.4", "0.8"]),
        ("train.lr=1e-3,2e-3", ["0.001", "0.002"]),
        ("attn=choice(sdpa,flash_fixed)", ["sdpa", "flash_fixed"]),
        ("attn=glob(flash_*)", ["flash_bf16", "flash_fixed"]),
        ("attn=glob(*,exclude=flash_*)", ["sdpa"]),
        ("attn.layers=[1],[2,3]", ["[1]", "[2,3]"]),
        ("data.path='a b','c,d'", ["'a b'", "'c,d'"]),
        ("++seed=1,2", ["1", "2"]),
        ("seed=sort(3,1,2)", ["1", "2", "3"]),
        ("seed=5", ["5"]),
    ],
)
def test_the_values_of_a_key(argument: str, values: list[str]) -> None:
    key = argument.partition("=")[0]
    assert runs_of(argument) == [[f"{key}={value}"] for value in values]


def test_a_shuffled_range_has_each_value_once() -> None:
    assert sorted(runs_of("seed=shuffle(range(20))")) == sorted([f"seed={seed}"] for seed in range(20))


def test_a_key_that_is_given_again_counts_once_in_its_first_place() -> None:
    assert runs_of("seed=9", "train.steps=3", seed="1,2", attn="sdpa") == [["seed=9", "attn=sdpa", "train.steps=3"]]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["seed=range(1,1000000000000)"], "seed=range(1,1000000000000): more than 10,000 values"),
        (["train.lr=range(0,inf)"], r"train.lr=range(0,inf): "),
        (["seed=shuffle(range(0,100000000))"], "seed=shuffle(range(0,100000000)): more than 10,000 values"),
        (["seed=range(200)", "model.init_seed=range(200)"], "the sweep has 40,000 runs; give 10,000 at most"),
        (["seed=range(0)"], "the sweep has no run"),
        (["seed=range(5,2)"], "the sweep has no run"),
        (["attn=glob(nothing*)"], "the sweep has no run"),
        (["train.lr=interval(0,1)"], "train.lr=interval(0,1): takes any number between two; list some"),
        (["seed=range(1,2,0)"], "seed=range(1,2,0): "),
        (["train.lr=range(0,1,0.0)"], "train.lr=range(0,1,0.0): "),
        (["train.lr=range(nan,1,0.5)"], "train.lr=range(nan,1,0.5): "),
    ],
)
def test_what_is_no_list_of_runs_is_refused_before_it_is_listed(arguments: list[str], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        runs_of(*arguments)


def test_as_many_runs_as_are_allowed_are_told_apart_in_time() -> None:
    jobs = named(
        runs_of(f"seed=range({MOST_RUNS // 4})", "attn=flash_bf16,sdpa", "train.lr=0.1,0.2"), [None] * MOST_RUNS
    )
    assert len({job.name for job in jobs}) == MOST_RUNS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["seed=range(0)"], "the sweep has no run"),
        (["seed=1,2", "run_name=same"], "run_name=same: 2 runs of one sweep cannot have one name"),
        (["seed=1,1"], "seed=1: more than once in this sweep"),
        (["seed=1,abc"], "seed=abc"),
        (["attn.elsewhere=flash_fp32", "attn.layers=[9],[8]"], "2 of 2 runs failed"),
        (["hydra/launcher=gpus", "hydra.launcher.sweep=../x", "seed=1,2"], "hydra.launcher.sweep=../x: "),
        (["hydra/launcher=gpus", "seed=1,1"], "seed=1: more than once in this sweep"),
    ],
)
def test_a_refused_sweep_leaves_nothing(train: Command, tmp_path: Any, arguments: list[str], told: str) -> None:
    assert_one_line(train("-m", *arguments), told)
    assert not list(tmp_path.iterdir())


def test_of_a_long_range_two_numbers_are_composed_before_the_first_run() -> None:
    """Composition takes a tenth of a second, and of a range all are numbers of one kind."""
    sweeper, context = ProductSweeper({}), Context()
    sweeper.hydra_context, sweeper.launcher, sweeper.config = context, Launcher(), OmegaConf.create()  # type: ignore
    sweeper.sweep(["seed=range(5000)", "train.lr=0.1,0.2"])
    composed = [["seed=0", "train.lr=0.1"], ["seed=4999", "train.lr=0.1"], ["seed=0", "train.lr=0.2"]]
    assert sorted(context.composed) == sorted(composed)


@pytest.mark.slow
def test_a_value_that_is_there_twice_is_refused_before_any_is_composed() -> None:
    sweeper, context = ProductSweeper({}), Context()
    sweeper.hydra_context, sweeper.launcher, sweeper.config = context, Launcher(), OmegaConf.create()  # type: ignore
    with pytest.raises(UserError, match=r"^seed=7: more than once in this sweep; give each value once$"):
        sweeper.sweep([f"seed={','.join(map(str, range(9_998)))},7"])
    assert not context.composed
