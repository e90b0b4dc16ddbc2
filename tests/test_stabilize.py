"""``flashpoint.stabilize`` of PyTorch's own call, and ``center_keys``: what kernels get and give, against FP64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flashpoint
from flashpoint import stabilizing
from flashpoint.numerics.stabilizers import power_of_two
from tests.stabilized_passes import KNOWN, MODEL, causal, errors, exact, inputs, passes


def seen_dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Return the dtypes that PyTorch's attention is called with from now on."""
    seen = []

    def call(q: Tensor, *more: Any, **options: Any) -> Tensor:
        seen.append(q.dtype)
        return KNOWN["sdpa"](q, *more, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", call)
    monkeypatch.setattr(stabilizing, "_SDPA", [call])
    return seen


def test_o_and_gradients_are_those_of_fp64_and_the_kernel_sees_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_dtypes(monkeypatch)
    with flashpoint.stabilize(MODEL) as told:
        found = passes(causal)
    assert seen == [torch.float16]
    assert {x.dtype for x in found} == {torch.bfloat16}
    assert max(errors(found, exact())) < 2**-8
    assert told.clamped == 0


def test_it_is_undone_at_the_end_and_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        with flashpoint.stabilize(MODEL):
            assert F.scaled_dot_product_attention is not KNOWN["sdpa"]
            raise RuntimeError("of the loop")

    with pytest.raises(RuntimeError, match="of the loop"):
        fails()
    assert F.scaled_dot_product_attention is KNOWN["sdpa"]
    assert causal(*inputs()[:3]).equal(KNOWN["sdpa"](*inputs()[:3], is_causal=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_dtypes_stay_as_they_are_and_that_is_told(dtype: torch.dtype, capfd: pytest.CaptureFixture[str]) -> None:
    q, k, v, _ = (x.to(dtype) for x in inputs())
    with flashpoint.stabilize(MODEL):
        assert causal(q, k, v).equal(KNOWN["sdpa"](q, k, v, is_causal=True))
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_under_autocast_o_is_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_dtypes(monkeypatch)
    q, k, v, _ = (x.float() for x in inputs())
    with flashpoint.stabilize(MODEL), torch.autocast("cpu", torch.bfloat16):
        out = causal(q, k, v)
    assert (out.dtype, seen) == (torch.bfloat16, [torch.float16])
    assert float((out.double() - exact()[0]).norm() / exact()[0].norm()) < 2**-8


def test_gradients_of_a_learned_bias_are_scaled_back() -> None:
    bias = torch.linspace(-2, 2, 32 * 32).reshape(1, 1, 32, 32).bfloat16()
    with flashpoint.stabilize(MODEL):
        found = passes(lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias), bias)
    assert max(errors(found, exact(bias, causal=False))) < 2**-7


def test_masks_and_keys_of_fewer_heads() -> None:
    """A mask's −3e38 is no number of FP16."""
    q, k, v, _ = inputs(heads_of_keys=2)
    visible = torch.ones(32, 32).tril().bool()
    low = torch.zeros(32, 32).masked_fill(~visible, torch.finfo(torch.bfloat16).min).bfloat16()
    wanted = KNOWN["sdpa"](q.double(), k.double(), v.double(), visible, enable_gqa=True)
    with flashpoint.stabilize(MODEL):
        for mask in (visible, low):
            out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            assert float((out.double() - wanted).norm() / wanted.norm()) < 2**-8
            assert not mask.requires_grad


def test_what_does_not_fit_fp16_is_counted_and_told(capfd: pytest.CaptureFixture[str]) -> None:
    with flashpoint.stabilize(MODEL) as told:
        passes(causal, given=inputs(1e6))
        passes(causal)
        assert told.clamped == 1
        for _ in range(100):
            causal(*inputs(1e6)[:3])
        assert told.clamped == 101
    assert len(capfd.readouterr().err.splitlines()) == 2  # one of the first call


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_that_fp16_makes_infinite_are_counted_and_told(
    backend: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """dQ is dS·K. A dO that is infinite itself is not of FP16."""
    torch._dynamo.reset()
    q, k, v, grad_out = inputs()
    large = [q / 1000, k * 1e4, v, grad_out]
    attend = causal if backend is None else torch.compile(causal, backend=backend, fullgraph=True)
    assert all(bool(x.isfinite().all()) for x in passes(causal, given=large))
    with flashpoint.stabilize(MODEL) as told:
        passes(attend)
        passes(attend, given=[q, k, v, grad_out / 0])
        assert told.overflowed == 0
        for _ in range(2):
            assert not bool(passes(attend, given=large)[1].isfinite().all())
        assert told.overflowed == 2
        assert told.clamped == 0
    assert len(capfd.readouterr().err.splitlines()) == 2  # one of the first call


def test_a_row_that_a_mask_closes_is_as_without() -> None:
    q, k, v, _ = inputs()
    mask = torch.zeros(32, 32).bfloat16()
    mask[3] = -math.inf
    wanted = F.scaled_dot_product_attention(q, k, v, mask)
    with flashpoint.stabilize(MODEL):
        for bias in (mask, mask.clone().requires_grad_()):
            out = F.scaled_dot_product_attention(q, k, v, bias)
            torch.testing.assert_close(out, wanted, rtol=2**-6, atol=2**-6, equal_nan=True)


class Mode(TorchDispatchMode):
    """Sees each operation, as one that traces does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1e6])
@pytest.mark.parametrize("size", [1e-30, 1.0, math.nan, 0.0])
def test_what_eager_mode_keeps_or_computes_at_once_changes_no_bit(scale: float, size: float) -> None:
    """A mode sees operations that each do one thing. Gradients below 2⁻¹²⁶ do not count: they are rounded twice."""
    projected = torch.randn(2, 32, 3 * 4 * 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    qkv = [part.unflatten(-1, (4, 16)).transpose(1, 2) for part in (projected * scale).chunk(3, -1)]
    given = [*qkv, (inputs()[3].float() * 1e9 * size).bfloat16()]
    bias = torch.linspace(-2, 2, 32 * 32).reshape(1, 1, 32, 32).bfloat16()

    def attend(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors)

    with flashpoint.stabilize(MODEL) as told:
        eager = passes(attend, bias, given=given)
        with Mode():
            traced = passes(attend, bias, given=given)
    assert told.clamped == (0 if scale == 1.0 else 6)
    for one, other in zip(eager, traced, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 3, 1000])
def test_the_power_of_two_is_the_largest_that_keeps_the_sum_below(tokens: int) -> None:
    """Of every number of BF16, also where it is looked up."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    some = every[::61]
    for number in (torch.cat([every[: 2**15], some]) if tokens == 1 else some).unbind():  # first those without a sign
        grad_out = number.reshape(1, 1, 1, 1).expand(1, 1, tokens, 1)
        largest = abs(float(number)) * tokens
        wanted = 1.0
        if 0 < largest < 2.0**128:
            wanted = 2.0 ** min(15 - math.frexp(largest)[1], 126)
        assert float(power_of_two(grad_out)) == wanted


def test_with_checkpointing() -> None:
    with flashpoint.stabilize(MODEL):
        plain = passes(causal)
        again = passes(lambda *qkv: checkpoint(causal, *qkv, use_reentrant=False))
    for one, other in zip(plain, again, strict=True):
        assert one.equal(other)


@pytest.mark.slow
def test_compiled_in_the_block_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(causal, backend="aot_eager", fullgraph=True)
    before = passes(compiled)
    with flashpoint.stabilize(MODEL) as told:
        inside = passes(compiled)
        passes(compiled, given=inputs(1e6))
        eager = passes(causal)
        assert told.clamped == 1
    after = passes(compiled)
    for one, other in zip(inside, eager, strict=True):
        assert one.equal(other)
    for one, other in zip(before, after, strict=True):
        assert one.equal(other)
    assert not inside[0].equal(before[0])


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
def test_compiled_once_for_any_length_several_calls_are_as_eager(checkpoints: bool) -> None:
    torch._dynamo.reset()

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
        mask = (distance / 64).to(q.dtype)
        first = checkpoint(causal, q, k, v, use_reentrant=False) if checkpoints else causal(q, k, v)
        return F.scaled_dot_product_attention(q, k, first, attn_mask=mask)

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True, dynamic=True)
    before = counters["stats"]["unique_graphs"]
    with flashpoint.stabilize(MODEL):
        for tokens in (20, 24):  # were one the number of features, the graph would hold for that length alone
            given = [x[:, :, :tokens] for x in inputs()]
            for one, other in zip(passes(twice, given=given), passes(compiled, given=given), strict=True):
                assert one.equal(other)
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.slow
@pytest.mark.parametrize("heads_of_keys", [2, 4])
def test_compiled_under_autocast_it_is_as_eager(heads_of_keys: int) -> None:
    torch._dynamo.reset()

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def under_autocast(attend: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(*qkv)

    given = [x.float() for x in inputs(heads_of_keys=heads_of_keys)]
    with flashpoint.stabilize(MODEL) as told:
        eager, compiled = (
            passes(functools.partial(under_autocast, attend), given=given)
            for attend in (grouped, torch.compile(grouped, backend="aot_eager", fullgraph=True))
        )
        assert (told.clamped, told.overflowed) == (0, 0)
    for one, other in zip(eager, compiled, strict=True):
        assert one.equal(other)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_pytorchs_causal_bias_is_what_it_is_without(
    bias: Callable[..., Tensor], dtype: torch.dtype, compiled: bool
) -> None:
    """It holds no numbers. Keys before the queries have it close others where it ends at the lower right."""
    torch._dynamo.reset()
    lengths = (32, 32) if bias is causal_upper_left else (20, 32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias(*lengths))

    q, k, v, grad_out = (x.to(dtype) for x in inputs())
    given = [q[:, :, -lengths[0] :], k, v, grad_out[:, :, -lengths[0] :]]
    leaves = [x.double().requires_grad_() for x in given[:3]]
    seen = torch.ones(lengths, dtype=torch.bool).tril(lengths[1] - lengths[0])
    weights = (leaves[0] @ leaves[1].mT / 4).masked_fill(~seen, -math.inf).softmax(-1)
    wanted = [weights @ leaves[2], *torch.autograd.grad(weights @ leaves[2], leaves, given[3].double())]
    function = torch.compile(attend, backend="aot_eager") if compiled else attend
    with flashpoint.stabilize(MODEL) as told:
        found = passes(function, given=given)
    assert told.called == (dtype == torch.bfloat16)
    assert max(errors(found, wanted)) < (2**-8 if dtype == torch.bfloat16 else 1e-5)


def test_a_block_begins_again_as_autocast_does(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen, block = seen_dtypes(monkeypatch), flashpoint.stabilize(MODEL)
    for _ in range(2):
        with block as told:
            passes(causal)
            with block as inner:
                passes(causal)
            assert inner is told
            passes(causal)
        assert told.names == {"scaled_dot_product_attention"}
        passes(causal)
    assert seen == 2 * [*3 * [torch.float16], torch.bfloat16]
    assert capfd.readouterr().err.count("has FP16 inside") == 1


@pytest.mark.slow
def test_of_a_second_block_it_does_not_say_that_no_attention_was_called(capfd: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(causal, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with flashpoint.stabilize(MODEL) as told:
            found = passes(compiled, given=inputs(1e6))
    assert (told.clamped, told.called) == (1, True)
    assert "no attention in BF16" not in capfd.readouterr().err
    with flashpoint.stabilize(MODEL) as told:
        assert all(map(torch.equal, found, passes(causal, given=inputs(1e6))))
    with flashpoint.stabilize(MODEL) as told:
        pass
    assert not told.called
    assert "no attention in BF16" in capfd.readouterr().err


def test_it_counts_on_where_the_backward_pass_is_under_autocast() -> None:
    given = inputs()
    given[0][0, 0, 0, 0] = 1e5
    with flashpoint.stabilize(MODEL) as told, torch.autocast("cpu", torch.bfloat16):
        for _ in range(70):
            passes(causal, given=given)
        assert (told.clamped, told.overflowed) == (70, 0)


@pytest.mark.slow
@pytest.mark.parametrize("heads_of_keys", [2, 4])
def test_compiled_it_counts_as_in_eager_mode(heads_of_keys: int) -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k, v, _ = inputs(heads_of_keys=heads_of_keys)
    torch._dynamo.reset()
    for attend in (grouped, torch.compile(grouped, backend="aot_eager", fullgraph=True)):
        with flashpoint.stabilize(MODEL) as told:
            counted = 0
            for number in (1e5, math.inf, -math.inf, math.nan, 65_280.0):  # the last is BF16's largest that fits
                k[1, 1, 3, 5] = number
                attend(q, k, v)
                counted += abs(number) > 65_504
                assert told.clamped == counted


@pytest.mark.slow
def test_one_tensor_as_keys_or_queries_and_values_is_traced() -> None:
    torch._dynamo.reset()
    q, k, _, grad_out = (x.requires_grad_() for x in inputs())

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return causal(q, k, k) + causal(q, k, q)

    found = []
    with flashpoint.stabilize(MODEL):
        for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
            found.append(torch.autograd.grad(function(q, k), (q, k), grad_out))
    for one, other in zip(*found, strict=True):
        assert one.equal(other)


def test_calls_that_cannot_be_cast_stay_as_they_are() -> None:
    """Nested and empty tensors, and those inside a transform."""
    parts = [torch.randn(length, 4, 8).bfloat16() for length in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    q, k, v, _ = inputs()
    with flashpoint.stabilize(MODEL):
        assert F.scaled_dot_product_attention(nested, nested, nested).shape == nested.shape
        assert causal(q[:0], k[:0], v[:0]).shape == q[:0].shape
        found = torch.func.grad(lambda x: F.scaled_dot_product_attention(x, k, v).float().sum())(q)
    wanted = torch.func.grad(lambda x: KNOWN["sdpa"](x, k, v).float().sum())(q)
    assert found.equal(wanted)


def test_centred_keys_give_the_same_attention_and_gradients_that_sum_to_zero() -> None:
    q, k, v, grad_out = (x.double() for x in inputs())
    leaves = [x.requires_grad_() for x in (q, k + 5, v)]
    out = KNOWN["sdpa"](leaves[0], flashpoint.center_keys(leaves[1]), leaves[2], is_causal=True)
    wanted = KNOWN["sdpa"](*leaves, is_causal=True)
    torch.testing.assert_close(out, wanted)
    grad_k = torch.autograd.grad(out, leaves[1], grad_out)[0]
    torch.testing.assert_close(grad_k, torch.autograd.grad(wanted, leaves[1], grad_out)[0])
    assert float(grad_k.sum(-2).abs().max()) < 1e-12 * float(grad_k.abs().sum())
    by_token = flashpoint.center_keys(k.transpose(1, 2), dim=1)
    assert by_token.transpose(1, 2).equal(flashpoint.center_keys(k))
    assert flashpoint.center_keys(k.bfloat16()).dtype == torch.bfloat16
    for wrong, told in ((k.long(), "torch.int64"), (k.numpy(), "ndarray")):
        with pytest.raises(TypeError, match=f"k is {told}: give keys"):
            flashpoint.center_keys(wrong)
