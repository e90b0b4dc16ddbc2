"""Attentions that return something beside O, whose gradient reaches q and k: L, as a z-loss takes it, or weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.verdict import Diagnosis, diagnose
from flashpoint.watching import delta_collection
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import loop

HEADS, LENGTH, SIZE = 2, 24, 16


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    scores = scores_of(q.double(), k.double())
    logsumexp = scores.logsumexp(-1)
    return ((scores - logsumexp[..., None]).exp() @ v.double()).to(q.dtype), logsumexp.float()


def inner(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    """O is made of the L that is returned, by token: two uses inside, and perhaps one outside."""
    scores = scores_of(q, k)
    logsumexp = scores.logsumexp(-1).transpose(1, 2)
    weights = (scores - logsumexp.transpose(1, 2)[..., None]).exp()
    return weights @ v + 0 * logsumexp.transpose(1, 2)[..., None], logsumexp


def twice(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    """L is computed a second time, of a q that both are made of, and of k itself."""
    q = q * 1.0
    return scores_of(q, k).softmax(-1) @ v, scores_of(q, k).logsumexp(-1)


def apart(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    """L is computed a second time, of q and k themselves: O's gradients are not to be confused with its."""
    return scores_of(q, k).softmax(-1) @ v, scores_of(q, k).logsumexp(-1)


def weighted(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    weights = scores_of(q, k).softmax(-1)
    return weights @ v, weights


class _Flash(torch.autograd.Function):
    """Attention in BF16 as kernels have it, which returns O and L; ``lost`` heads pass over the gradient of L."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lost: int) -> tuple[Tensor, Tensor]:
        q, k, v = (x.bfloat16() for x in (q, k, v))
        scores = scores_of(q.float(), k.float())
        logsumexp = scores.logsumexp(-1)
        unnormalized = (scores - scores.amax(-1, keepdim=True)).exp()
        out = (unnormalized.bfloat16().float() @ v.float() / unnormalized.sum(-1, keepdim=True)).bfloat16()
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.lost = lost
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, of_logsumexp: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, logsumexp = (x.float() for x in ctx.saved_tensors)
        probs = (scores_of(q, k) - logsumexp[..., None]).exp()
        kept = torch.arange(q.shape[1])[:, None] >= ctx.lost
        delta = (grad_out.float() * out).sum(-1) - of_logsumexp * kept
        grad_scores = (probs * (grad_out.float() @ v.mT - delta[..., None])).bfloat16().float() * q.shape[-1] ** -0.5
        grad_v = probs.bfloat16().float().mT @ grad_out.float()
        return *(x.bfloat16() for x in (grad_scores @ k, grad_scores.mT @ q, grad_v)), None


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _Flash.apply(q, k, v, 0)
    return found


def losing(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _Flash.apply(q, k, v, HEADS)
    return found


def losing_one(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _Flash.apply(q, k, v, 1)
    return found


Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Model(nn.Module):
    """A layer that returns what its attention does; ``dtype`` is what the attention computes in."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qkv, self.name, self.dtype = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE), name, dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).to(self.dtype).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        found: tuple[Tensor, Tensor] = globals()[self.name](3 * q, 2 * k, v)
        return found


def stepping(share: float, apart: bool = False) -> Callable[[nn.Module, int, Watch], None]:
    """Return a step whose loss takes the other output by a share; ``apart`` in a backward pass of its own, before."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 0:
            watched.capture(sequences=16)
        x = torch.randn(8, LENGTH, HEADS * SIZE)
        out, other = model(x)
        loss, beside = out.float().square().mean(), share * other.float().square().mean()
        if apart:
            beside.backward(retain_graph=True)
        (loss + beside if share and not apart else loss).backward()
        watched.step(loss, x)

    return step


def recorded(tmp_path: Path, name: str, share: float, **options: Any) -> tuple[AttentionCall, Diagnosis]:
    dtype = torch.bfloat16 if name in ("flash", "losing", "losing_one") else torch.float32
    word = [f"{__name__}:{name}"]
    loop(tmp_path, Model(name, dtype), stepping(share, **options), steps=3, functions=word)
    (call,) = read_calls(tmp_path / "own")
    return call, diagnose(call)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "inner", "flash"])
@pytest.mark.parametrize("share", [1e-4, 0.1, 100.0])
def test_a_gradient_of_l_is_recorded_and_counted_in(tmp_path: Path, name: str, share: float) -> None:
    call, diagnosis = recorded(tmp_path, name, share)
    assert call.grad_logsumexp is not None
    expected = scores_of(call.q.double(), call.k.double()).logsumexp(-1)
    expected *= 2 * share / expected.numel()  # of the mean of squares
    torch.testing.assert_close(call.grad_logsumexp.double(), expected, rtol=1e-3, atol=1e-3 * float(expected.std()))
    assert diagnosis.findings == ()
    assert diagnosis.bias is None
    assert delta_samples(tmp_path) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "inner", "weighted", "flash"])
def test_without_a_gradient_of_its_own_another_output_changes_nothing(tmp_path: Path, name: str) -> None:
    call, diagnosis = recorded(tmp_path, name, 0.0)
    assert call.is_of_out_alone
    assert diagnosis.findings == ()
    assert diagnosis.bias is not None
    assert diagnosis.bias.judges
    assert delta_samples(tmp_path) == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "weighted"])
def test_a_gradient_in_a_backward_pass_of_its_own_is_not_of_the_recorded_one(tmp_path: Path, name: str) -> None:
    call, diagnosis = recorded(tmp_path, name, 1.0, apart=True)
    assert call.is_of_out_alone
    assert diagnosis.findings == ()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.001, 0.1, 100.0])
@pytest.mark.parametrize(("name", "heads"), [("losing", (1, 2)), ("losing_one", (1,))])
def test_a_lost_gradient_of_l_is_named(tmp_path: Path, name: str, heads: tuple[int, ...], share: float) -> None:
    _, diagnosis = recorded(tmp_path, name, share)
    (found,) = diagnosis.findings
    assert (found.kind, found.heads) == ("gradients_off", heads)
    assert found.text.startswith("dQ lacks the gradient that came to L")


def test_a_gradient_of_weights_is_told_and_gradients_are_not_judged(tmp_path: Path) -> None:
    call, diagnosis = recorded(tmp_path, "weighted", 100.0)
    assert call.other_gradients == f"output 2 [8, {HEADS}, {LENGTH}, {LENGTH}]"
    assert call.grad_logsumexp is None
    assert diagnosis.findings == ()
    assert diagnosis.bias is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "alone"), [("apart", True), ("twice", False)])
def test_a_gradient_of_l_by_ways_of_its_own_is_no_finding(tmp_path: Path, name: str, alone: bool) -> None:
    call, diagnosis = recorded(tmp_path, name, 1.0)
    assert call.is_of_out_alone is alone
    assert call.grad_logsumexp is None
    assert diagnosis.findings == ()


class Merging(Model):
    """Attention to two chunks of keys, merged by their L as ring attention does."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).to(self.dtype).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        parts = [globals()[self.name](3 * q, 2 * keys, v) for keys in (k, k.roll(1, 1))]
        shares = torch.stack([logsumexp for _, logsumexp in parts]).softmax(0)
        out = sum(share[..., None] * part.float() for share, (part, _) in zip(shares, parts, strict=True))
        assert isinstance(out, Tensor)
        return out, torch.zeros(1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lost"), [("exact", False), ("flash", False), ("losing", True)])
def test_attentions_that_are_merged_by_l_are_judged_with_it(tmp_path: Path, name: str, lost: bool) -> None:
    dtype = torch.float32 if name == "exact" else torch.bfloat16
    loop(tmp_path, Merging(name, dtype), stepping(0.0), steps=2, functions=[f"{__name__}:{name}"])
    calls = read_calls(tmp_path / "own")
    assert len(calls) == 2
    assert all(call.grad_logsumexp is not None for call in calls)
    assert [len(diagnose(call).findings) for call in calls] == [int(lost)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "inner", "weighted", "flash"])
def test_no_bit_of_the_training_changes(tmp_path: Path, name: str) -> None:
    """Beside a loop that does the same and watches nothing."""
    weights = []
    for watches in (True, False):
        torch.manual_seed(1)
        model = Model(name)
        if watches:
            loop(tmp_path, model, stepping(0.1), functions=[f"{__name__}:{name}"])
        else:
            torch.manual_seed(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for number in range(4):
                stepping(0.1)(model, number, Mock())
                optimizer.step()
                optimizer.zero_grad()
        weights.append(model.qkv.weight.detach())
    assert torch.equal(*weights)


def delta_samples(runs: Path) -> int:
    """Sequences after the capture in which δ was measured."""
    (capture,) = (runs / "own/captures").iterdir()
    file = capture / "delta.jsonl"
    return sum(len(sample.steps) for sample in delta_collection.read(file).values()) if file.is_file() else 0
