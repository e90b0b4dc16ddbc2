"""YAML files of the user's own are checked before anything is built of them."""

import os
from pathlib import Path

import pytest

from flashpoint.errors import UserError
from flashpoint.lab.cli.yaml_files import check_yaml
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
def test_files_that_a_chosen_one_names_are_checked_and_others_are_not(train: Command, tmp_path: Path) -> None:
    for path, text in {
        "attn/broken.yaml": "{",
        "attn/own.yaml": "defaults: [base, _self_]\nname: own",
        "attn/base.yaml": "defaults: [flash_bf16, /model@_global_.nothing: bomb]",
        "model/bomb.yaml": BOMB,
    }.items():
        (tmp_path / "mine" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / path).write_text(text)
    told = "mine/model/bomb.yaml: ", "values once its aliases are written out"
    assert_one_line(train("--config-dir", "mine", "attn=own", tiny=False), *told)
    assert_one_line(train("-m", "-cd=mine", "attn=glob(o*)", tiny=False), "mine/attn/broken.yaml: no YAML")


def test_the_project_has_no_such_file(tmp_path: Path) -> None:
    for path in CONFIGS.rglob("*.yaml"):
        check_yaml(path)
    (tmp_path / "empty.yaml").touch()
    check_yaml(tmp_path / "empty.yaml")
