"""Loops of other shapes than the examples', and mistakes that users make in them."""

import collections
import copy
import json
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flashpoint
from flashpoint.capture.sources import read_calls
from flashpoint.capture.watched import Watch
from flashpoint.errors import UserError
from flashpoint.runs.recorded import Run
from flashpoint.runs.select import open_run
from tests.capture.test_watch import spectral_norms


class Block(nn.Module):
    """Attention of x to itself, or to ``y``; q, k and v are parts of one tensor, as ``unbind`` gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if y is not None:
            _, k, v = self.qkv(y).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=y is None)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Pair(nn.Module):
    """Two blocks, one after the other or each called by the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def loop(
    runs: Path,
    model: nn.Module | None = None,
    step: Callable[[nn.Module, int, Watch], Any] | None = None,
    steps: int = 4,
    **options: Any,
) -> Run:
    """Train so many steps; ``step`` takes one itself and tells the watch."""
    torch.manual_seed(0)
    model = Pair() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"interval": 1, "weights_interval": 1, "log_interval": 2, **options}
    with flashpoint.watch(model, runs_dir=runs, name="own", **options) as watched:
        for number in range(steps):
            (step or plain)(model, number, watched)
            optimizer.step()
            optimizer.zero_grad()
    return open_run("own", runs)


def plain(model: nn.Module, _number: int, watched: Watch) -> None:
    x = torch.randn(3, 12, 32)
    loss = model(x).square().mean()
    loss.backward()
    watched.step(loss, x)


def test_parts_of_one_tensor_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Pair()
    expected = [spectral_norms(block.qkv.weight[:32]) for block in (model.first, model.second)]
    run = loop(tmp_path, model, steps=1)
    assert capsys.readouterr().err == ""
    np.testing.assert_allclose(run.columns["w_q_spectral_norm"][1][..., 0], expected, rtol=1e-3)


def test_parts_of_a_model_may_be_called_one_by_one(tmp_path: Path) -> None:
    """With gradients accumulated: the first forward pass alone is observed, and no hook of the model tells its end."""

    def step(model: Any, _number: int, watched: Watch) -> None:
        expected.extend([spectral_norms(block.qkv.weight[:32]) for block in (model.first, model.second)])
        for _ in range(3):
            loss = model.second(model.first(torch.randn(3, 12, 32))).square().mean() / 3
            loss.backward()
        watched.step(loss)

    expected: list[Any] = []
    run = loop(tmp_path, step=step, steps=1)
    assert run.config["model"]["n_layer"] == 2
    np.testing.assert_allclose(run.columns["w_q_spectral_norm"][1][..., 0], expected, rtol=1e-3)


@pytest.mark.parametrize("before", [True, False])
def test_a_pass_without_a_backward_pass_is_not_the_trainings(tmp_path: Path, before: bool) -> None:
    """An evaluation that forgets ``no_grad``, and another model beside: neither is captured."""

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        watched.capture()
        if before:
            teacher(model(torch.randn(1, 7, 32)))
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean()
        teacher(x)
        loss.backward()
        watched.step(loss)

    teacher = Pair()
    loop(tmp_path, step=step, steps=1)
    assert [(call.layer, tuple(call.q.shape)) for call in read_calls(tmp_path / "own")] == [
        (1, (3, 4, 12, 8)), (2, (3, 4, 12, 8)),
    ]  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_found_or_missed_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reentrant: bool
) -> None:
    class Checkpointed(Pair):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.first, x, use_reentrant=reentrant)
            return checkpoint(self.second, x, use_reentrant=reentrant)

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32, requires_grad=True)).square().mean()
        loss.backward()
        watched.step(loss)

    run = loop(tmp_path, Checkpointed(), step, steps=1)
    assert ("w_q_spectral_norm" in run.columns) != reentrant
    assert ("use_reentrant=False" in capsys.readouterr().err) == reentrant


def test_layers_of_several_lengths_are_measured_and_cross_attention_is_left_out_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Crossed(Pair):
        def forward(self, x: Tensor) -> Tensor:
            memory = self.first(torch.cat([x, x], 1))
            return self.second(self.second(x), memory)

    run = loop(tmp_path, Crossed())
    assert run.config["model"]["n_layer"] == 2
    assert run.columns["row_sum_relative_bias"][0].tolist() == [0, 1, 2, 3]
    assert capsys.readouterr().err.count("two lengths") == 1


def test_attention_that_begins_late_is_found(tmp_path: Path) -> None:
    class Late(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if begun else self.first.out(x)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        begun.extend([True] * (number == 3))
        plain(model, number, watched)

    begun: list[bool] = []
    run = loop(tmp_path, Late(), step, steps=8, interval=500, weights_interval=8)
    assert run.columns["row_sum_relative_bias"][0].tolist() == [4]
    assert "w_q_spectral_norm" in run.columns


def test_layers_that_are_skipped_in_some_steps_leave_a_readable_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Skipping(Pair):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return super().forward(x) if len(calls) % 2 else self.first(x)

    calls: list[Tensor] = []
    run = loop(tmp_path, Skipping())
    assert run.columns["row_sum_relative_bias"][0].tolist() == [0, 2]
    assert capsys.readouterr().err.count("not every step has all of them") == 1


def test_copies_and_files_of_the_model_have_nothing_of_the_watch(tmp_path: Path) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            other(torch.randn(1, 7, 32)).sum().backward()
        watched.capture()
        plain(model, number, watched)

    loop(tmp_path, step=step, steps=1)
    assert read_calls(tmp_path / "own")[0].q.shape[0] == 3


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("step, backward", "no gradient came to any attention before watched.step"),
        ("backward, zero_grad, step", "no gradients at watched.step"),
    ],
)
def test_step_in_the_wrong_place_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str, told: str
) -> None:
    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        if order == "step, backward":
            watched.step(loss)
        loss.backward()
        if order != "step, backward":
            model.zero_grad()
            watched.step(loss)

    assert loop(tmp_path, step=step).columns["loss"][0].tolist() == [0, 1, 2, 3]
    assert capsys.readouterr().err.count(told) == 1


def test_step_that_is_forgotten_or_outside_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Pair()
    with flashpoint.watch(model, runs_dir=tmp_path, name="own") as watched:
        model(torch.randn(3, 12, 32)).sum().backward()
    assert "watched.step was never called" in capsys.readouterr().err
    plain(model, 0, watched)
    watched.capture()
    told = capsys.readouterr().err
    assert "step outside of the block" in told
    assert "capture outside of the block" in told
    with flashpoint.watch(model, runs_dir=tmp_path, name="own") as watched:
        plain(model, 0, watched)
    with pytest.raises(UserError, match="entered once"), watched:
        pass
    assert (tmp_path / "own-2").is_dir()


@pytest.mark.parametrize(("error", "said"), [(KeyboardInterrupt, "SIGINT"), (ZeroDivisionError, "ZeroDivisionError")])
def test_what_ends_the_loop_early_is_kept(tmp_path: Path, error: type[BaseException], said: str) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 2:
            raise error
        plain(model, number, watched)

    with pytest.raises(error):
        loop(tmp_path, step=step)
    outcome = json.loads((tmp_path / "own/outcome.json").read_text())
    assert (outcome["outcome"], outcome["step"], outcome["interrupted"]) == ("stable", 2, said)


def test_a_folder_that_is_gone_does_not_end_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            (tmp_path / "own").rename(tmp_path / "elsewhere")
        plain(model, number, watched)

    with pytest.raises(UserError, match="no run there"):
        loop(tmp_path, step=step)
    assert "writing the verdict failed (FileNotFoundError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"loss": torch.ones(64)}, "the loss has 64 numbers: give one"),
        ({"loss": None}, "the loss is NoneType: give a number"),
        ({"accuracy": [1, 2]}, "accuracy is list: give a number"),
        ({"grad_norm": "large"}, "grad_norm is str: give a number"),
        ({"batch": object()}, "a batch that is object shows no tensors"),
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
    assert capsys.readouterr().err.count(told) == 1
    assert len(run.columns["row_sum_relative_bias"][0]) == 4
    assert ("loss" in run.columns) == ("loss" not in given)


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


def test_a_step_that_a_gradient_scaler_skips_is_captured_and_is_no_verdict(tmp_path: Path) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean()
        loss.backward()
        watched.step(loss, x, grad_norm=float("inf") if number in (1, 3) else 1.0)

    assert loop(tmp_path, step=step).verdict == "stable to 4"
    assert [path.name for path in (tmp_path / "own/captures").iterdir()] == ["step-0000001"]


def test_a_capture_of_a_model_without_attention_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            watched.capture()
        plain(model, number, watched)

    loop(tmp_path, nn.Linear(32, 32), step, interval=500)
    assert "functions=['MODULE:NAME']" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"watched\.capture\(\) in the loop makes one"):
        read_calls(tmp_path / "own")


def test_a_model_without_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Identity has no parameters"):
        flashpoint.watch(nn.Identity(), runs_dir=tmp_path)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def test_a_function_is_seen_where_another_module_has_imported_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``from MODULE import attend`` in the model's file; a reference in an object is not seen, and that is told."""
    theirs: Any = types.ModuleType("theirs")
    theirs.attend = attend
    monkeypatch.setitem(sys.modules, "theirs", theirs)

    class Imported(Pair):
        kept = staticmethod(attend)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.first.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            out: Tensor = (theirs.attend if named else self.kept)(q, k, v)
            return out

    for named in (True, False):
        run = loop(tmp_path / str(named), Imported(), steps=1, functions=[f"{__name__}:attend"])
        assert ("row_sum_relative_bias" in run.columns) == named
        assert ("called by its name in a module" in capsys.readouterr().err) != named
    assert theirs.attend is attend


def hidden_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_token(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int = 1) -> Tensor:
    near = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(1 - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


@pytest.mark.parametrize(
    ("word", "causal"),
    [("attend", False), ("hidden_mask", True), ("by_token@bthd", True), ("by_token", None), ("windowed", None)],
)
def test_a_named_function_is_recorded_as_what_it_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, causal: bool | None
) -> None:
    """A mask inside is seen by O; what is neither causal nor full attention is left out aloud."""

    class Named(Pair):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.first.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
            if name != "by_token":
                q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            out: Tensor = globals()[name](q, k * 8, v)
            return out

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        watched.capture()
        plain(model, number, watched)

    name = word.partition("@")[0]
    loop(tmp_path, Named(), step, steps=2, functions=[f"{__name__}:{word}"])
    if causal is None:
        assert f"{name}: O is not softmax" in capsys.readouterr().err
    else:
        assert [call.is_causal for call in read_calls(tmp_path / "own")] == [causal]


def test_an_explosion_that_ends_the_loop_is_captured(tmp_path: Path) -> None:
    """The loop stops by the verdict, so that no step follows: the last observation is kept."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        loss.backward()
        watched.step(loss * 0 + (1.0 if number < 200 else 9.0))
        if watched.verdict != "stable":
            raise StopIteration

    with pytest.raises(StopIteration):
        loop(tmp_path, step=step, steps=600, interval=500)
    assert open_run("own", tmp_path).verdict.startswith("exploded")
    assert [call.layer for call in read_calls(tmp_path / "own")] == [1, 2]


def test_a_capture_that_never_came_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        plain(model, number, watched)
        watched.capture("why not")

    loop(tmp_path, nn.Linear(32, 32), step, steps=1)
    assert "no capture (why not)" in capsys.readouterr().err


def test_two_models_of_one_loop_are_watched_in_turn(tmp_path: Path) -> None:
    """As in adversarial training: their recordings overlap, and nothing of them stays behind."""
    models = [Pair(), Pair()]
    with (
        flashpoint.watch(models[0], runs_dir=tmp_path, name="one", interval=3) as one,
        flashpoint.watch(models[1], runs_dir=tmp_path, name="other", interval=3) as other,
    ):
        for number in range(6):
            plain(models[0], number, one)
            plain(models[1], number, other)
    for name in ("one", "other"):  # an observation that finds the other one under way comes some steps later
        run = open_run(name, tmp_path)
        assert len(run.columns["row_sum_relative_bias"][0]) >= 2
        assert run.config["model"]["n_layer"] == 2
    assert not torch.overrides._get_current_function_mode_stack()
    assert not any(module._forward_hooks or module._forward_pre_hooks for model in models for module in model.modules())
