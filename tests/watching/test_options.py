"""Options of watching that are refused, in one line each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flashpoint
from tests.watching.loops import Pair, loop

COUNTS = ["interval", "weights_interval", "log_interval", "sequences", "steps", "logits_interval"]


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (2.5, TypeError), ("5", TypeError), (True, TypeError)])
@pytest.mark.parametrize("option", COUNTS)
def test_an_option_that_is_no_count_is_refused(tmp_path: Path, option: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{option}={value!r}: give a whole number, 1 or more"):
        flashpoint.watch(Pair(), runs_dir=tmp_path, **{option: value})
    assert not any(tmp_path.iterdir())


def test_counts_of_numpy_are_taken(tmp_path: Path) -> None:
    assert (
        loop(tmp_path, warmup_steps=np.int64(0), **{option: np.int64(2) for option in COUNTS[:4]}).verdict
        == "stable to 4"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"warmup_steps": -1}, "warmup_steps=-1: give a whole number, 0 or more"),
        ({"functions": [":b"]}, "functions=:b: give MODULE:NAME"),
        ({"functions": ["torch"]}, "functions=torch: give MODULE:NAME"),
        ({"functions": [".torch:b"]}, "give MODULE:NAME of an installed module"),
        ({"functions": ["torch:Tensor"]}, "torch has no function Tensor"),
        ({"wandb": "foo"}, "wandb='foo': give one of disabled, offline"),
        ({"name": "a\nb"}, r"name='a\\nb': a name cannot hold characters that do not print"),
        *[
            ({"name": name}, "name=.*a name cannot")
            for name in ("../x", "..", ".", "/x", "a/b", "a\0", "~a", "a*", "a:b")
        ],
        *[
            ({option: value}, f"{option}=.*give a number above 0")
            for option in ("margin", "max_logit")
            for value in (0, -1.0, float("nan"))
        ],
        ({"name": "reference"}, "name=reference: reserved"),
        *[({"name": name}, "an empty name") for name in ("", " ")],
        ({"runs_dir": "~/runs"}, "runs_dir=~/runs: would make a folder named ~; give /"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_folder_is_made(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        flashpoint.watch(Pair(), **{"runs_dir": tmp_path / "runs", **options})
    assert "\n" not in str(refused.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"functions": "flash_attn:flash_attn_func"}, "give a list of MODULE:NAME"),
        ({"functions": None}, "give a list of MODULE:NAME"),
        ({"margin": "0.3"}, "margin='0.3': give a number above 0"),
        ({"save_batch": 0}, "save_batch=0: give True or False"),
        ({"wandb_paths": None}, "wandb_paths=None: give True or False"),
        ({"name": 3}, "name=3: give the name of one folder"),
        ({"runs_dir": 3}, "runs_dir=3: give a folder; the run's own is made in it"),
        ({"model": torch.sin}, "no torch.nn.Module; give the model"),
    ],
)
def test_what_is_of_another_kind_is_a_type_error(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        flashpoint.watch(**{"model": Pair(), "runs_dir": tmp_path / "runs", **options})
    assert not any(tmp_path.iterdir())


def test_a_model_without_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Identity has no parameters"):
        flashpoint.watch(nn.Identity(), runs_dir=tmp_path)
    with pytest.raises(ValueError, match="Sequential have no shape yet"):
        flashpoint.watch(nn.Sequential(nn.LazyLinear(8)), runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())
