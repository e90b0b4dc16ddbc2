"""Tensors that several attentions take, or one takes twice: a call is kept with the gradients that it gave itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashpoint
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.verdict import diagnose
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import loop
from tests.watching.test_named_calls import captured

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashpoint.attention(q, k, v, is_causal=True, enable_gqa=True)


def in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Takes k and v in two slices each: their gradients come in parts."""
    ks, vs = ([part.repeat_interleave(2, 1) for part in x.split(8, 2)] for x in (k, v))
    scores = torch.cat([q @ part.mT for part in ks], -1) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    first, second = scores.masked_fill(later, -torch.inf).softmax(-1).split(8, -1)
    return first @ vs[0] + second @ vs[1]


class Sharing(nn.Module):
    """Two layers. The second takes the keys and values of the first, or each takes one tensor as both."""

    def __init__(self, attend: Attend, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attend, self.tied = attend, tied
        self.q = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, 8)).transpose(1, 2)

        k, v = map(heads, self.kv(x).chunk(2, -1))
        for q in self.q:
            x = x + self.out(self.attend(heads(q(x)), k, k if self.tied else v).transpose(1, 2).flatten(2))
        return x + torch.cat((k, v), 1).transpose(1, 2).flatten(2)  # used outside of the attention, too


def alone(call: AttentionCall, attend: Attend) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v)]
    return torch.autograd.grad(attend(*leaves), leaves, call.grad_out)


def around(context: str) -> Any:
    if context == "math":
        return sdpa_kernel(SDPBackend.MATH)
    return torch.autocast("cpu", torch.bfloat16, enabled=context == "autocast")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("attend", [sdpa, ours])
@pytest.mark.parametrize("context", ["fused", "math", "autocast"])
def test_gradients_are_those_of_the_call_alone(tmp_path: Path, attend: Attend, tied: bool, context: str) -> None:
    with around(context):
        run = loop(tmp_path, Sharing(attend, tied), captured, steps=1)
        calls = read_calls(tmp_path / "own")
        assert len(calls) == 2
        for call in calls:
            for kept, expected in zip((call.grad_q, call.grad_k, call.grad_v), alone(call, attend), strict=True):
                torch.testing.assert_close(kept, expected)
    if attend is sdpa:  # ours rounds FP32 to BF16, which is found
        assert [diagnose(call).findings for call in calls] == [(), ()]
    assert run.manifest.not_recorded == ()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_parts_are_summed_and_a_named_function_with_one_tensor_twice_lacks_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool
) -> None:
    model = Sharing(lambda q, k, v: in_blocks(q, k, v), tied)
    run = loop(tmp_path, model, captured, steps=1, functions=[f"{__name__}:in_blocks"])
    for call in read_calls(tmp_path / "own"):
        expected = alone(call, in_blocks)
        torch.testing.assert_close(
            (call.grad_q, call.grad_k, call.grad_v), (expected[0], None, None) if tied else expected
        )
        assert diagnose(call).findings == ()
    lines = [f"{__name__}:in_blocks: gradients of k, v, not to be told from others of the same tensor"]
    assert run.manifest.not_recorded == tuple(lines * tied)
    assert (f"some gradients are not recorded ({lines[0]})" in capsys.readouterr().err) is tied


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("attend", [sdpa, ours, in_blocks])
@pytest.mark.parametrize("context", ["fused", "math", "autocast"])
def test_no_bit_of_the_gradients_changes(tmp_path: Path, attend: Attend, tied: bool, context: str) -> None:
    models = [Sharing(lambda q, k, v: globals()[attend.__name__](q, k, v), tied) for _ in range(2)]
    x = torch.randn(3, 12, 32)
    with around(context):
        losses = [models[0](x).square().mean()]
        with flashpoint.watch(models[1], runs_dir=tmp_path, functions=[f"{__name__}:in_blocks"]) as watched:
            losses.append(models[1](x).square().mean())
            for loss in losses:
                loss.backward()
            watched.step(losses[1], x)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_two_backward_passes_leave_the_gradients_of_the_last_one(tmp_path: Path) -> None:
    def twice(model: nn.Module, _number: int, watched: Watch) -> None:
        watched.capture(sequences=0)
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        watched.step(loss, x)

    loop(tmp_path, Sharing(lambda q, k, v: in_blocks(q, k, v), False), twice, 1, functions=[f"{__name__}:in_blocks"])
    for call in read_calls(tmp_path / "own"):
        torch.testing.assert_close((call.grad_q, call.grad_k, call.grad_v), alone(call, in_blocks))
