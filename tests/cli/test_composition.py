"""What Hydra composes: YAML files of the user's own, checked before anything is built of them, and its mode."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hydra.types import RunMode
from omegaconf import DictConfig

from flashpoint.errors import UserError
from flashpoint.lab.cli.composition import check_yaml
from flashpoint.lab.cli.train import main
from tests.composed import CONFIGS
from tests.conftest import Command
from tests.verdicts import assert_one_line

BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""A billion values once its aliases are written out."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"name: \xff", "no UTF-8 at byte 6; convert the file"),
        (b"name: [1\n  - :", "no YAML: .+ in line 2; correct the file"),
        (b"name: x\n\tbeta: 3", "no YAML: .+ in line 2"),
        (b"\x00", "no YAML: "),
        (b"- x\n- y", "no keys with values"),
        (b"3", "no keys with values"),
        (b"name: x\n---\nname: y", "2 documents; put one into each file"),
        (b"{" * 5000, "nested too deeply"),
        (b"a: &a {b: *a}", "line 1 holds itself by an alias"),
        (BOMB.encode(), "[0-9,]+ values once its aliases are written out"),
        (b"#" * 300_000, "more than 256 KiB"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(tmp_path: Path, text: bytes, told: str) -> None:
    (path := tmp_path / "mine.yaml").write_bytes(text)
    with pytest.raises(UserError, match=rf"{path}: {told}") as error:
        check_yaml(path)
    assert "\n" not in str(error.value)


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").mkdir()
    os.symlink("loop.yaml", tmp_path / "loop.yaml")
    for name in ("mine.yaml", "loop.yaml"):
        with pytest.raises(UserError, match=rf"{name}: .+; make it a readable file or remove it"):
            check_yaml(tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prob: {mode: stochastic}", ["attn.prob: no such key", "did you mean attn.probs?"]),
        ("probs: {mod: stochastic}", ["attn.probs.mod: no such key"]),
        ("probs: stochastic", ["stochastic stands where", "{mode: stochastic}"]),
        ("delta_error: 3", ["3 stands where a group of keys"]),
        ("layers: {a: 3}", ["correct the file"]),
    ],
)
def test_an_attention_with_a_wrong_key_is_one_line_that_names_its_file(
    train: Command, tmp_path: Path, text: str, told: list[str]
) -> None:
    (folder := tmp_path / "mine/attn").mkdir(parents=True)
    (folder / "own.yaml").write_text(f"name: own\n{text}\n")
    assert_one_line(train("--config-dir", "mine", "attn=own", tiny=False), "attn/own: ", *told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train={steps: 3, stepz: 1}"], "train.stepz: no such key; did you mean train.steps?"),
        (["attn.out={mod: x}"], "attn.out.mod: no such key; flashpoint"),  # not: did you mean attn.out?
        (["seed=null"], "seed=null: it cannot be null; give a value"),
        (["-m", "seed=0,1", "hydra.sweeper.max_batch_size=1"], "hydra.sweeper.max_batch_size: the launchers take all"),
    ],
)
def test_an_override_that_no_run_can_take_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["flashpoint"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit) as end:
        main(["experiment=laptop", "train.device=warp", *arguments])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {told}")


def test_the_project_has_no_such_file(tmp_path: Path) -> None:
    for path in CONFIGS.rglob("*.yaml"):
        check_yaml(path)
    (tmp_path / "empty.yaml").touch()
    check_yaml(tmp_path / "empty.yaml")


def test_a_configuration_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = Hydra.compose_config
    modes = []

    def compose_config(*arguments: Any, run_mode: RunMode, **options: Any) -> DictConfig:
        modes.append(run_mode)
        return composed(*arguments, run_mode=run_mode, **options)

    monkeypatch.setattr(Hydra, "compose_config", compose_config)
    monkeypatch.setattr(sys, "argv", ["flashpoint"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit):
        main(["experiment=laptop", "attn.layers=[9]"])
    assert modes == [RunMode.RUN]


@pytest.mark.slow
@pytest.mark.parametrize("found_by", [("--config-dir", "mine"), ("hydra.searchpath=[mine]",)])
def test_the_mode_that_a_users_file_sets_is_taken(train: Command, tmp_path: Path, found_by: tuple[str, ...]) -> None:
    (folder := tmp_path / "mine/sweep").mkdir(parents=True)
    sweep = "hydra: {mode: MULTIRUN, sweeper: {params: {seed: '0,1'}}}"
    (folder / "two.yaml").write_text(f"# @package _global_\n{sweep}\n")
    result = train(*found_by, "+sweep=two", "train.steps=2", "probes.attention_interval=0")
    assert result.stdout.count("outcome=stable step=2 ") == 2, result.stderr
