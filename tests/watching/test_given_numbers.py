"""Losses, metrics, gradient norms and batches that a loop gives: read as they are, or told once."""

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair, loop


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"loss": torch.ones(64)}, "the loss has 64 numbers: give one"),
        ({"loss": None}, "the loss is NoneType: give a number"),
        ({"accuracy": [1, 2]}, "accuracy is list: give a number"),
        ({"grad_norm": "large"}, "grad_norm is str: give a number"),
        ({"grad_norm": torch.empty((), device="meta")}, "grad_norm is a tensor without memory, or a sparse one"),
        ({"grad_norm": torch.tensor(1.0).to_sparse()}, "grad_norm is a tensor without memory, or a sparse one"),
        ({"batch": object()}, "a batch that is object shows no tensors"),
        ({"step": 3}, "the watch itself logs step"),
        ({"w_q_spectral_norm": 3.0}, "the watch itself logs w_q_spectral_norm"),
    ],
)
def test_what_is_no_number_is_told_once_and_all_else_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], told: str
) -> None:
    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        loss.backward()
        watched.step(**{"loss": loss, **given})

    run = loop(tmp_path, step=step)
    lines = capsys.readouterr().err
    assert lines.count(told) == 1
    assert len(run.columns["row_sum_relative_bias"][0]) == 4
    assert ("loss" in run.columns) == ("loss" not in given)
    assert lines.count("no loss was read, and nothing is judged") == ("loss" in given)
    assert run.verdict == ("stopped at 4" if "loss" in given else "stable to 4")


def test_a_loss_of_every_token_is_told_once_whatever_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        losses = model(torch.randn(3, 12 + number, 32)).square().mean((0, 2))
        losses.mean().backward()
        watched.step(losses, x1=torch.ones(number + 2), x2=torch.ones(()))  # type: ignore[arg-type]

    loop(tmp_path, step=step)
    told = capsys.readouterr().err
    assert told.count("the loss has 12 numbers") == told.count("reading the loss failed") == 1
    assert told.count("x1 has 2 numbers") == told.count("logging metrics failed") == 1


def test_a_gradient_norm_that_cannot_be_read_costs_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Unreadable(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.stack:
                raise NotImplementedError("no such thing")
            return super().__torch_function__(func, types, args, kwargs)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        loss.backward()
        norm = torch.tensor(1.0)
        watched.step(loss, grad_norm=norm.as_subclass(Unreadable) if number == 1 else norm)

    run = loop(tmp_path, step=step)
    assert run.columns["loss"][0].tolist() == [0, 1, 2, 3]
    assert run.columns["grad_norm"][0].tolist() == [2, 3]
    assert capsys.readouterr().err.count("reading the gradient norms failed (NotImplementedError: no such thing)") == 1


def test_numbers_in_one_buffer_are_those_of_their_steps(tmp_path: Path) -> None:
    """As the outputs of a CUDA graph, which the next replay overwrites."""
    loss, norm = torch.empty(()), torch.empty(1)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        model(torch.randn(3, 12, 32)).square().mean().backward()
        watched.step(loss.fill_(number), grad_norm=norm.fill_(10 + number))

    run = loop(tmp_path, step=step, log_interval=4)
    assert run.columns["loss"][1].ravel().tolist() == [0, 1, 2, 3]
    assert run.columns["grad_norm"][1].ravel().tolist() == [10, 11, 12, 13]


def test_batches_in_one_buffer_are_told_apart_and_none_is_kept_for_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer = torch.empty(3, 12, 32)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(buffer.normal_()).square().mean()
        loss.backward()
        watched.step(loss * float("nan") if number == 2 else loss, buffer)

    loop(tmp_path, step=step, steps=8, log_interval=8)
    rows = (tmp_path / "own/batches.csv").read_text().split()
    assert len({row.partition(",")[2] for row in rows}) == 8
    assert "its tensors have been overwritten" in capsys.readouterr().err
    assert not (tmp_path / "own/captures/step-0000002/batch.pt").exists()


def test_a_mapping_of_arrays_is_a_batch(tmp_path: Path) -> None:
    """As Transformers' BatchEncoding, which is no dict; as a dict of tensors with the same numbers."""
    x = torch.arange(6)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        loss.backward()
        watched.capture()
        watched.step(loss, collections.UserDict(ids=x.numpy()) if number == 0 else {"ids": x + number - 1})

    loop(tmp_path, step=step, steps=3)
    first, second, third = (row.partition(",")[2] for row in (tmp_path / "own/batches.csv").read_text().split())
    assert first == second != third
    assert torch.equal(torch.load(tmp_path / "own/captures/step-0000000/batch.pt")["ids"], x)


def test_the_norm_of_sparse_gradients_is_that_of_dense_ones(tmp_path: Path) -> None:
    class Embedded(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 32, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.embed(x))

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        loss = model(torch.arange(12).reshape(1, 12) % 9).square().mean()
        loss.backward()
        dense = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
        expected.append(float(torch.cat([one.flatten() for one in dense]).double().norm()))
        watched.step(loss)

    expected: list[float] = []
    run = loop(tmp_path, Embedded(), step, log_interval=1)
    np.testing.assert_allclose(run.columns["grad_norm"][1].ravel(), expected, rtol=1e-5)
