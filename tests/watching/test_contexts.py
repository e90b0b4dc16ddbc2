"""Contexts of PyTorch that a loop enters and leaves while a step is recorded stay the loop's."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

import flashpoint
from flashpoint.cli.run_words import open_run
from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair


def one_step(model: nn.Module, watched: Watch) -> None:
    loss = model(torch.ones(3, 12, 32, device="cpu")).square().mean()
    loss.backward()
    watched.step(loss)
    model.zero_grad()


def default() -> str:
    return torch.empty(1).device.type


@pytest.mark.parametrize("around", ["steps", "loop", "watch"])
def test_a_device_context_begins_and_ends_where_the_loop_says(tmp_path: Path, around: str) -> None:
    model = Pair()

    def entered(place: str) -> contextlib.AbstractContextManager[object]:
        return torch.device("meta") if place == around else contextlib.nullcontext()

    with (
        entered("watch"),
        flashpoint.watch(model, runs_dir=tmp_path, name="own", interval=2) as watched,
        entered("loop"),
    ):
        for _ in range(5):
            with entered("steps"):
                one_step(model, watched)
                assert default() == "meta"
            assert default() == ("cpu" if around == "steps" else "meta")
    assert default() == "cpu"
    assert open_run("own", tmp_path).columns["row_sum_relative_bias"][0].tolist() == [0, 1, 3]


def test_a_default_device_may_change_while_a_step_is_recorded(tmp_path: Path) -> None:
    model = Pair()
    try:
        torch.set_default_device("meta")
        with flashpoint.watch(model, runs_dir=tmp_path, name="own", interval=1) as watched:
            one_step(model, watched)
            torch.set_default_device("cpu")
            one_step(model, watched)
            torch.set_default_device(None)
            one_step(model, watched)
            torch.set_default_device("meta")
            one_step(model, watched)
            assert default() == "meta"
    finally:
        torch.set_default_device(None)
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # PyTorch 2.6 would look for a device in the None
    assert default() == "cpu"
    assert open_run("own", tmp_path).columns["row_sum_relative_bias"][0].tolist() == [0, 1, 2, 3]
