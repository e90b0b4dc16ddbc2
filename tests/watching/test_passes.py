"""Which forward and backward pass of a step is recorded, where there are several, or where one fails."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair, beside_the_first_line, loop, plain


def tells_captures_alone(told: str) -> bool:
    lines = [line for line in beside_the_first_line(told).splitlines() if line.startswith("watch own:")]
    return all("asked for; wrote" in line or line.endswith("says what its attention did") for line in lines)


def assert_gradients_are_of(call: AttentionCall) -> None:
    """They are those that autograd gives for the recorded Q, K, V and dO."""
    q, k, v = (x.double().requires_grad_() for x in (call.q, call.k, call.v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = torch.autograd.grad(out, (q, k, v), call.grad_out.double())
    for got, exact in zip((call.grad_q, call.grad_k, call.grad_v), expected, strict=True):
        torch.testing.assert_close(got, exact.float())


def test_of_micro_batches_the_first_is_recorded_whatever_the_others_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of other sizes, the last one partial; the second forward pass may come before the first backward pass."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        watched.capture(sequences=0)
        batches = [torch.randn(size, 12, 32) for size in (3, 5, 1)]
        losses = [model(x).square().mean() / 3 for x in batches[:2]]
        for loss in losses:
            loss.backward()
        (last := model(batches[2]).square().mean() / 3).backward()
        watched.step(sum([*losses, last]), batches)

    run = loop(tmp_path, step=step, steps=2)
    assert run.columns["row_sum_relative_bias"][1].shape == (2, 4, 2)
    calls = read_calls(tmp_path / "own")
    assert [call.q.shape[0] for call in calls] == [3, 3]
    for call in calls:
        assert_gradients_are_of(call)
    assert tells_captures_alone(capsys.readouterr().err)


def test_layers_in_reentrant_checkpoints_are_left_out_aloud_beside_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Half(Pair):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.first, x, use_reentrant=True)
            return self.second(out)

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32, requires_grad=True)).square().mean()
        loss.backward()
        watched.step(loss)

    run = loop(tmp_path, Half(), step)
    assert run.shape.n_layer == 1
    assert capsys.readouterr().err.count("use_reentrant=False") == 1
    assert ["use_reentrant=False" in reason for reason in run.manifest.not_recorded] == [True]


def test_a_whole_model_in_a_checkpoint_is_recorded_once(tmp_path: Path) -> None:
    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        watched.capture(sequences=0)
        x = torch.randn(3, 12, 32, requires_grad=True)
        out: Tensor = checkpoint(model, x, use_reentrant=False)
        loss = out.square().mean()
        loss.backward()
        watched.step(loss)

    loop(tmp_path, step=step, steps=1)
    calls = read_calls(tmp_path / "own")
    assert [call.layer for call in calls] == [1, 2]
    for call in calls:
        assert_gradients_are_of(call)


def test_what_an_evaluation_has_is_not_told_of_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its masks, and generation with one query at a time."""

    class Masked(Pair):
        def forward(self, x: Tensor, queries: int = 12) -> Tensor:
            if self.training:
                return super().forward(x)
            q = x.unflatten(-1, (4, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(q[:, :, -queries:], q, q, attn_mask=torch.rand(queries, 12) > 0.3)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        model.eval()
        for without in (torch.no_grad(), torch.inference_mode()):
            with without:
                for queries in (12, 1):
                    model(torch.randn(2, 12, 32), queries)
        model.train()
        plain(model, number, watched)

    run = loop(tmp_path, Masked(), step)
    assert run.columns["row_sum_relative_bias"][1].shape == (2, 4, 4)
    assert run.manifest.not_recorded == ()
    assert beside_the_first_line(capsys.readouterr().err) == ""


def test_an_evaluation_is_no_reason_why_the_training_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever trains with dropout, and evaluates in the step that is observed, has no checkpoints to look for."""

    class Dropping(Pair):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.first.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 12, 32))
        model.train()
        plain(model, number, watched)

    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.Generator().get_state())  # another than is drawn from
    run = loop(tmp_path, Dropping(), step)
    assert ["dropout" in reason for reason in run.manifest.not_recorded] == [True]
    assert "use_reentrant" not in capsys.readouterr().err


class Failing(torch.autograd.Function):
    """Nothing forwards; backwards what ``error`` says."""

    error: Exception | None = None

    @staticmethod
    def forward(_context: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Failing.error is not None:
            raise Failing.error
        return gradient


class Fallible(Pair):
    interrupted = False

    def forward(self, x: Tensor) -> Tensor:
        x = Failing.apply(self.first(x))
        if self.interrupted:
            raise KeyboardInterrupt
        return self.second(x)


def test_a_pass_whose_backward_pass_failed_is_not_taken_for_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As without memory: the loop passes over the batch, and the pass that follows is recorded in its place."""

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        watched.capture(sequences=0)
        for error in (torch.OutOfMemoryError("mine"), None):
            Failing.error = error
            loss = model(torch.randn(5 if error else 3, 12, 32)).square().mean()
            try:
                loss.backward()
            except torch.OutOfMemoryError:
                model.zero_grad()
        watched.step(loss)

    run = loop(tmp_path, Fallible(), step, steps=2)
    assert run.shape.n_layer == 2
    calls = read_calls(tmp_path / "own")
    assert [(call.layer, call.q.shape[0]) for call in calls] == [(1, 3), (2, 3)]
    for call in calls:
        assert_gradients_are_of(call)
    assert tells_captures_alone(capsys.readouterr().err)


def test_after_an_interrupt_inside_the_model_another_model_is_not_taken_for_it(tmp_path: Path) -> None:
    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        assert isinstance(model, Fallible)
        for model.interrupted in (True, False):
            x = torch.randn(3, 12, 32)
            try:
                loss = model(x).square().mean() + other(x).square().mean()
            except KeyboardInterrupt:
                continue
            loss.backward()
        watched.step(loss)

    Failing.error, other = None, Pair()
    run = loop(tmp_path, Fallible(), step, steps=2)
    assert run.shape.n_layer == 2
    assert run.columns["row_sum_relative_bias"][1].shape == (2, 4, 2)


def test_layers_that_get_no_gradient_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Unused(Pair):
        def forward(self, x: Tensor) -> Tensor:
            self.unused = self.second(x)
            return self.first(x)

    loop(tmp_path, Unused())
    assert capsys.readouterr().err.count("no gradient came to them before watched.step") == 1


@pytest.mark.parametrize("penalty", [True, False])
def test_a_call_that_is_differentiated_twice_is_left_out_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], penalty: bool
) -> None:
    """Its second backward pass brings gradients that are not of its dO alone. A pass beside it is recorded."""

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        watched.capture(sequences=0)
        x = torch.randn(3, 12, 32, requires_grad=True)
        with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = slope.square().mean() + out.square().mean()
            if not penalty:
                loss = loss + model(torch.randn(2, 12, 32)).square().mean()
            loss.backward()
        watched.step(loss)

    run = loop(tmp_path, step=step, steps=2)
    if penalty:
        assert "row_sum_relative_bias" not in run.columns
        assert capsys.readouterr().err.count("no attention was recorded: differentiated twice") == 1
    else:
        calls = read_calls(tmp_path / "own")
        assert [(call.layer, call.q.shape[0]) for call in calls] == [(1, 2), (2, 2)]
        for call in calls:
            assert_gradients_are_of(call)
