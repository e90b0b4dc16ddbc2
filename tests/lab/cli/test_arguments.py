"""What ``flashpoint train`` refuses before Hydra composes it, what Hydra refuses, and the keys that it tells."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import MissingConfigException

from flashpoint.errors import UserError
from flashpoint.lab.build_config import key_types
from flashpoint.lab.cli.arguments import check, parsed
from flashpoint.lab.cli.composition import composed_values
from flashpoint.lab.cli.refusals import refusal
from flashpoint.lab.cli.train import main
from tests.conftest import Command
from tests.verdicts import assert_one_line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prob: {mode: stochastic}", ["attn.prob: no such key", "did you mean attn.probs?"]),
        ("probs: {mod: stochastic}", ["attn.probs.mod: no such key"]),
        ("probs: stochastic", ["Rounding", "help=all tells what each key takes"]),
        ("delta_error: 3", ["DeltaError", "help=all tells what each key takes"]),
        ("layers: {a: 3}", ["help=all tells what each key takes"]),
    ],
)
def test_an_attention_with_a_wrong_key_is_one_line_that_names_its_file(
    train: Command, tmp_path: Path, text: str, told: list[str]
) -> None:
    (folder := tmp_path / "mine/attn").mkdir(parents=True)
    (folder / "own.yaml").write_text(f"name: own\n{text}\n")
    assert_one_line(train("--config-dir", "mine", "attn=own", tiny=False), "attn/own", *told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train={steps: 3, stepz: 1}"], "train.stepz: no such key; did you mean train.steps?"),
        (["attn.out={mod: x}"], "attn.out.mod: no such key; did you mean attn.out.mode?"),
        (["train.lr.x=3"], "train.lr.x: no such key; flashpoint train help=all"),  # not: did you mean train.lr?
        (["trian.steps=3"], "trian.steps: no such key; did you mean train.steps?"),
        (["+train.new=3"], "train.new: no such key"),
        (["sed=3"], "sed: no such key; did you mean seed?"),
        (["help=al"], "help=al: help=all tells every key"),
        (["--hepl"], "unrecognized arguments: --hepl"),
        (["--experimental-rerun", "x"], "unrecognized arguments: --experimental-rerun"),
        (["-c", "jobs"], "argument --cfg/-c: invalid choice: 'jobs'"),
        (["seed=0,1"], "seed=0,1: several values are a sweep, which needs -m: flashpoint train -m 'seed=0,1'"),
        (["model="], "model=: give the name of one option: gpt2_124m, ignite, laptop"),
        (["-cd", "nowhere"], "nowhere: no folder of YAML files"),
        (["hydra.searchpath=[nowhere]"], "nowhere: no folder of YAML files"),
    ],
)
def test_a_name_that_no_run_has_is_refused_without_a_composition(arguments: list[str], told: str) -> None:
    with pytest.raises(UserError) as error:
        check(parsed(["experiment=laptop", *arguments]))
    assert str(error.value).startswith(told)


def test_a_launcher_that_is_not_installed_is_named_with_its_extra() -> None:
    """Hydra says that it cannot load a file of flashpoint's own."""
    name = "hydra/launcher/flashpoint_slurm"
    told = str(refusal(MissingConfigException(f"In 'hydra/launcher/slurm': Could not load '{name}'", name)))
    assert told.startswith("hydra/launcher=slurm: needs hydra-submitit-launcher; ")
    assert told.endswith(" -m pip install 'flashpoint[slurm]'")


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["seed=null"], ["seed=null", "seed takes a whole number"]),
        (["train.lr=abc"], ["train.lr=abc", "train.lr takes a number"]),
        (["train=3"], ["train=3", "train takes keys of its own, each set by itself, as train.steps=VALUE"]),
        (
            ["attn.layers=3"],
            ["attn.layers=3", "attn.layers takes a list, each a whole number or null, as attn.layers=[A,B]"],
        ),
        (["attn.elsewhere=${nothing}"], ["attn.elsewhere", "nothing"]),
        (
            ["model=lapto"],
            ["model=lapto: no such option; did you mean laptop? ", "FOLDER/model/lapto.yaml"],
        ),
        (["steps"], ["steps", "give KEY=VALUE"]),
        (["run_name=a#b"], ["run_name=a#b", """'run_name="a#b"'"""]),
        (["hydra.nothing=3"], ["hydra.nothing", "-c hydra"]),
        (["hydra.sweep.dir=/proc/x", "-m", "seed=1,2"], ["/proc/x: "]),
        (["-m", "seed=0,1", "hydra.sweeper.max_batch_size=1"], ["hydra.sweeper.max_batch_size"]),
    ],
)
def test_what_hydra_refuses_is_one_line_with_its_words_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    told: list[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["flashpoint"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["experiment=laptop", "train.device=cpu", *arguments])
    assert end.value.code == 2
    *begun, line = capsys.readouterr().err.splitlines()
    assert begun in ([], ["run 1 of 2: seed=1"])
    assert line.startswith("error: ")
    for fragment in told:
        assert fragment in line
    assert not list(tmp_path.iterdir())


def test_the_keys_are_those_that_hydra_composes() -> None:
    def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{name}.")

    assert {"experiment", *leaves(composed_values(["experiment=laptop"]))} == key_types().keys()


def test_flags_and_overrides_may_be_mixed() -> None:
    mixed = parsed(["-m", "seed=1,2", "-cd", "mine", "attn=sdpa", "--info", "config", "experiment=laptop"])
    assert mixed.for_hydra() == [
        "seed=1,2", "attn=sdpa", "experiment=laptop", "--multirun", "--config-dir=mine", "--info=config"
    ]  # fmt: skip
    assert parsed(["seed=1", "train.device=cpu"]).for_hydra() == ["experiment=demo_cpu", "seed=1", "train.device=cpu"]
    assert parsed(["replay=RUN"]).for_hydra() == ["replay=RUN"]
    assert parsed(["--hydra-help"]).for_hydra() == ["--hydra-help"]  # composes Hydra's configuration alone


@pytest.mark.parametrize("name", ["1e3", "1.50", "1_000", "true", "1e400", "007", "a", "null", "${seed}"])
def test_a_key_of_text_takes_its_text(name: str) -> None:
    lines = parsed(["experiment=laptop", f"run_name={name}"]).for_hydra()
    assert composed_values(lines)["run_name"] == {"null": None, "${seed}": "0"}.get(name, name)
    assert parsed(["replay=RUN", "hydra.launcher.sweep=1e-3"]).for_hydra()[1] == "hydra.launcher.sweep='1e-3'"


def test_help_all_is_help_of_every_key() -> None:
    assert parsed(["--help", "all", "model=laptop"]).for_hydra()[-2:] == ["help=all", "model=laptop"]


@pytest.mark.slow
def test_help_tells_how_to_begin_and_every_key_with_its_value(train: Command, tmp_path: Path) -> None:
    short, whole = (train(*how, tiny=False) for how in (["--help"], ["help=all", "model=laptop", "train.lr=0.25"]))
    assert (short.returncode, short.stderr, whole.returncode, whole.stderr) == (0, "", 0, "")
    assert "help=all" in short.stdout
    lines = [part for line in short.stdout.splitlines() for part in range(max(1, math.ceil(len(line) / 100)))]
    assert len(lines) <= 40  # of a screen of 100 columns
    for line in ("model.n_layer=2", "train.lr=0.25", "(one of auto, cpu, cuda)", "Optimiser steps to run."):
        assert line in whole.stdout
    printed = {line.split("=")[0].strip() for line in whole.stdout.splitlines() if "=" in line}
    sections = {key.rpartition(".")[0] for key in key_types()}
    assert key_types().keys() - sections - printed <= {"help", "experiment"}
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("found_by", [("--config-dir", "mine"), ("hydra.searchpath=[mine]",)])
def test_the_mode_that_a_users_file_sets_is_taken(train: Command, tmp_path: Path, found_by: tuple[str, ...]) -> None:
    (folder := tmp_path / "mine/sweep").mkdir(parents=True)
    sweep = "hydra: {mode: MULTIRUN, sweeper: {params: {seed: '0,1'}}}"
    (folder / "two.yaml").write_text(f"# @package _global_\n{sweep}\n")
    result = train(*found_by, "+sweep=two", "trust=true", "train.steps=2", "probes.attention_interval=0")
    assert result.stdout.count("outcome=stable step=2 ") == 2, result.stderr
