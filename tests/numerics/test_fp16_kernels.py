"""The kernels around an attention in FP16, in Triton's interpreter: bit for bit what PyTorch's operations give."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import flashpoint
from flashpoint.numerics import fp16_launch, stabilizers
from flashpoint_kernels.codes import CALL, FACTOR_AT
from flashpoint_kernels.rounding import INTERPRETED
from tests.stabilized_passes import MODEL, causal, errors, exact, inputs, passes

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="of the interpreter")
B, T, D = 2, 24, 16
BF16, HALF = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp16_launch, "on_device_of", lambda _: contextlib.nullcontext())


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Have kernels on a CPU, until what it yields is called."""
    torch._dynamo.reset()
    monkeypatch.setattr(stabilizers, "_is_on_gpu", lambda _: True)

    def end() -> None:
        torch._dynamo.reset()
        monkeypatch.setattr(stabilizers, "_is_on_gpu", lambda _: False)

    yield end
    torch._dynamo.reset()


def layouts(heads: int = 4) -> dict[str, Tensor]:
    """Return normal numbers [B, H, T, d], as they lie in memory in models, and as they need not."""
    generator = torch.Generator().manual_seed(heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "in order": normal(B, heads, T, D).bfloat16(),
        "by token": normal(B, T, heads, D).bfloat16().transpose(1, 2),
        "part of a projection": normal(B, T, 3, heads, D).bfloat16()[:, :, 1].transpose(1, 2),
        "at no address of 16 bytes": normal(B, heads, T, D + 3).bfloat16()[..., 1 : D + 1],
        "by feature": normal(B, heads, D, T).bfloat16().mT,
        "repeated": normal(B, 1, T, D).bfloat16().expand(B, heads, T, D),
        "every other": normal(B, heads, T, 2 * D).bfloat16()[..., ::2],
        "without the first token": normal(B, heads, T + 1, D).bfloat16()[:, :, 1:],
        "one": normal(1, 1, 1, 1).bfloat16(),
        "in a row": normal(T, heads, D).bfloat16(),
        "float32": normal(B, heads, T, D),
        "float16": normal(B, heads, T, D).half(),
    }


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1.0, 1e6, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("layout", layouts())
def test_casts_to_fp16_and_what_is_beyond_it(layout: str, number: float) -> None:
    """A tensor that holds NaN is not beyond FP16, whatever else it holds."""
    q, k = layouts()[layout], layouts(2)["by token"]
    if math.isfinite(number):
        q = q * number
    elif layout != "repeated":
        q.select(-1, 0).fill_(number)
    *cast, state = fp16_launch.to_fp16(q, k, k)
    for one, other in zip(cast, (q, k, k), strict=True):
        assert_same(one, other.float().clamp(-65504, 65504).to(HALF))
    counted = torch.zeros((), dtype=torch.int64)
    assert_same(fp16_launch.from_fp16(cast[0], BF16, state, counted), cast[0].to(BF16))
    wanted = int(float(q.abs().max()) > 65_504)
    assert int(counted) == CALL + wanted


SIZES = (1.0, 1e-9, 1e-30, 1e-36, 1e38, 0.0, math.inf, math.nan)


def factor_of(grad_out: Tensor) -> float:
    largest = float(grad_out.abs().max()) * T
    return 2.0 ** min(15 - math.frexp(largest)[1], 126) if 0 < largest < 2.0**128 else 1.0


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", layouts())
def test_dO_is_scaled_by_the_power_of_two(layout: str, size: float) -> None:
    grad_out = layouts()[layout] * size
    inside, state = fp16_launch.scaled(grad_out, T, HALF)
    factor = factor_of(grad_out)
    assert float(state[FACTOR_AT]) == factor
    is_read = (grad_out.abs() >= torch.finfo(BF16).tiny) | (grad_out == 0) | grad_out.isnan()  # by the interpreter
    wanted = (grad_out.double() * factor).to(HALF)
    assert_same(inside.where(is_read, 0), wanted.where(is_read, 0))
    assert inside.stride() == torch.empty_like(grad_out).stride()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_scaled_by_its_inverse(size: float, dtype: torch.dtype) -> None:
    grad_out = layouts()["in order"] * size
    _, state = fp16_launch.scaled(grad_out, T, HALF)
    grads = [one.half() for one in (layouts()["by token"], layouts(2)["in order"], layouts(2)["by token"])]
    grads[0][0, 0, 0, 0] = 65_504
    counted = torch.zeros((), dtype=torch.int64)
    found = fp16_launch.divided(grads, state, [dtype] * 3, counted)
    for one, other in zip(found, grads, strict=True):
        wanted = other.double() / factor_of(grad_out)
        is_normal = wanted.abs() >= torch.finfo(dtype).tiny  # others are rounded twice
        assert one.stride() == other.stride()
        assert one[is_normal].equal(wanted.to(dtype)[is_normal])
    assert int(counted) == CALL


@pytest.mark.slow
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1), (2,), (0, 2), (0, 1, 2), ()])
def test_a_backward_pass_overflows_where_dq_or_dk_is_not_finite_and_dv_is(bad: tuple[int, ...], number: float) -> None:
    grads = [layouts()["by token"].half() for _ in range(3)]
    for at in bad:
        grads[at][-1, -1, -1, -1] = number
    wanted = int(bool(bad) and 2 not in bad)
    counted = torch.zeros((), dtype=torch.int64)
    for calls in (1, 2):
        _, state = fp16_launch.scaled(grads[0], T, HALF)
        found = fp16_launch.divided(grads, state, [BF16] * 3, counted)
        assert int(counted) == calls * (CALL + wanted)
        assert [bool(one.isfinite().all()) for one in found] == [at not in bad for at in range(3)]


Attend = Callable[..., Tensor]


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, torch.ones(32, 32).tril().bool())


def _checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found: Tensor = checkpoint(causal, q, k, v, use_reentrant=False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("attend", [causal, _grouped, _masked, _checkpointed])
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_in_eager_mode_kernels_change_no_bit(by_kernels: Callable[[], None], attend: Attend, scale: float) -> None:
    given = inputs(scale, heads_of_keys=2 if attend is _grouped else 4)
    found, counted = [], []
    for _ in range(2):
        with flashpoint.stabilize(MODEL) as told:
            found.append(passes(attend, given=given))
            found[-1] += passes(attend, given=[*given[:3], given[3] / 0])
            counted.append((told.clamped, told.overflowed, told._beyond.calls, told._overflowed.calls))
        by_kernels()
    for one, other in zip(*found, strict=True):
        assert_same(one, other)
    assert counted[0] == counted[1] or attend is _checkpointed  # which repeats a call until it has what it wants


def test_a_learned_bias_and_a_second_output_are_scaled_back(by_kernels: Callable[[], None]) -> None:
    bias = torch.linspace(-2, 2, 32 * 32).reshape(1, 1, 32, 32).bfloat16()

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias)

    with flashpoint.stabilize(MODEL):
        assert max(errors(passes(attend, bias), exact(bias, causal=False))) < 2**-7

    def logarithms(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q.float() @ k.float().mT / 4
        return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)

    found = []
    for _ in range(2):
        leaves = [x.requires_grad_() for x in inputs()[:3]]
        out, logsumexp = stabilizers.in_fp16(logarithms, *leaves)
        grads = inputs()[3], torch.full_like(logsumexp, 1e-9)
        found.append([out, logsumexp, *torch.autograd.grad((out, logsumexp), leaves, grads)])
        by_kernels()
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


def test_second_derivatives_are_refused(by_kernels: Callable[[], None]) -> None:
    q, k, v = (x.requires_grad_() for x in inputs()[:3])
    with flashpoint.stabilize(MODEL), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = torch.autograd.grad(causal(q, k, v).sum(), (q, k, v))
        found = torch.autograd.grad(causal(q, k, v).sum(), (q, k, v), create_graph=True)
        for one, other in zip(found, wanted, strict=True):
            assert one.equal(other)
        with pytest.raises(RuntimeError, match="twice"):
            found[0].float().square().sum().backward()
