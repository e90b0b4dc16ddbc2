"""``flashpoint.stabilize`` and ``center_keys``: what kernels get and give, against FP64 and PyTorch's own attention."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flashpoint
from flashpoint import stabilizing
from flashpoint.numerics.stabilizers import power_of_two

KNOWN = {"sdpa": F.scaled_dot_product_attention}  # where the function itself is not replaced
MODEL = nn.Linear(2, 2)


def inputs(scale: float = 1.0, heads_of_keys: int = 4) -> list[Tensor]:
    """Return q, k, v and dO [2, H, 32, 16] bfloat16; dO would vanish in FP16."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad_out = (
        torch.randn(2, heads, 32, 16, generator=generator) for heads in (4, heads_of_keys, heads_of_keys, 4)
    )
    return [(q * scale).bfloat16(), k.bfloat16(), v.bfloat16(), (grad_out * 1e-9).bfloat16()]


def passes(attend: Callable[..., Tensor], *learned: Tensor, given: list[Tensor] | None = None) -> list[Tensor]:
    """Return O, dQ, dK, dV and the gradients of what else is learned."""
    *qkv, grad_out = given or inputs()
    leaves = [x.detach().clone().requires_grad_() for x in (*qkv, *learned)]
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


def exact(bias: Tensor | None = None, causal: bool = True) -> list[Tensor]:
    *qkv, grad_out = (x.double() for x in inputs())
    leaves = [x.requires_grad_() for x in (*qkv, *([] if bias is None else [bias.detach().double()]))]
    q, k, v, *more = leaves
    scores = q @ k.mT / math.sqrt(16) + (more[0] if more else 0)
    if causal:
        scores = scores.masked_fill(torch.ones(32, 32).triu(1).bool(), -math.inf)
    out = scores.softmax(-1) @ v
    return [out, *torch.autograd.grad(out, leaves, grad_out)]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


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


def test_sequences_in_a_row_are_scaled_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale of H tokens, a key that all rows see alone would have an infinite gradient of its value."""
    module = types.ModuleType("kernels_of_packed_sequences")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("qhd,khd->hqk", q.float(), k.float()).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

    module.attend = attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    q, k, v = (torch.zeros(2048, 2, 16).bfloat16().requires_grad_() for _ in range(3))
    with torch.no_grad():
        q += 10
        k[0] += 10
    with flashpoint.stabilize(MODEL, functions=["kernels_of_packed_sequences:attend@bthd"]):
        module.attend(q, k, v).backward(torch.ones(2048, 2, 16).bfloat16())  # type: ignore[attr-defined]
    assert v.grad is not None
    torch.testing.assert_close(v.grad[0], torch.full((2, 16), 2048.0).bfloat16())


class Mode(TorchDispatchMode):
    """Sees each operation, as one that traces does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


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


@pytest.mark.parametrize("tokens", [1, 3, 1000])
def test_the_power_of_two_is_the_largest_that_keeps_the_sum_below(tokens: int) -> None:
    """Of every number of BF16, also where it is looked up."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[:: 1 if tokens == 1 else 61]
    for number in every.unbind():
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


@pytest.mark.parametrize("heads_of_keys", [2, 4])
def test_compiled_it_counts_as_in_eager_mode(heads_of_keys: int) -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k, v, _ = inputs(heads_of_keys=heads_of_keys)
    for number in (1e5, math.inf, -math.inf, math.nan, 65_280.0):  # the last is BF16's largest that fits
        k[1, 1, 3, 5] = number
        counts = []
        for attend in (grouped, torch.compile(grouped, backend="aot_eager", fullgraph=True)):
            torch._dynamo.reset()
            with flashpoint.stabilize(MODEL) as told:
                attend(q, k, v)
                counts.append(told.clamped)
        assert counts == [int(abs(number) > 65_504)] * 2


def test_one_tensor_as_keys_and_values_is_traced() -> None:
    torch._dynamo.reset()
    q, k, _, grad_out = (x.requires_grad_() for x in inputs())
    found = []
    with flashpoint.stabilize(MODEL):
        for attend in (causal, torch.compile(causal, backend="aot_eager", fullgraph=True)):
            found.append(torch.autograd.grad(attend(q, k, k), (q, k), grad_out))
    for one, other in zip(*found, strict=True):
        assert one.equal(other)


def test_a_named_function_with_another_output_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient that reaches L is scaled as that of O is."""
    module = types.ModuleType("kernels_of_a_library")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert q.dtype is expected
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / 4
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float())
        return out.to(q.dtype), scores.logsumexp(-1)

    module.attend = attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    *qkv, grad_out = (x.transpose(1, 2).contiguous() for x in inputs())

    def gradients() -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in qkv]
        out, logsumexp = module.attend(*leaves)  # type: ignore[attr-defined]
        return list(torch.autograd.grad((out, logsumexp), leaves, (grad_out, torch.full_like(logsumexp, 1e-9))))

    expected = torch.bfloat16
    plain = gradients()
    with flashpoint.stabilize(MODEL, functions=["kernels_of_a_library:attend@bthd"]):
        expected = torch.float16
        inside = gradients()
    assert module.attend is attend  # type: ignore[attr-defined]
    assert max(errors(inside, [x.double() for x in plain])) < 2**-6


def line_by_line(monkeypatch: pytest.MonkeyPatch, expected: torch.dtype = torch.float16) -> tuple[Any, str]:
    """Return a module whose ``attend`` computes attention in the dtype of q, and the word that names it."""
    module: Any = types.ModuleType("attention_line_by_line")

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        assert query.dtype is expected
        return (query @ key.mT / 4 + bias).softmax(-1) @ value

    module.attend = attend
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module, f"{module.__name__}:attend"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_named_function_with_a_bias_and_arguments_by_name(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    module, word = line_by_line(monkeypatch)
    bias = torch.linspace(-2, 2, 32 * 32).reshape(1, 1, 32, 32).bfloat16()
    wanted = exact(bias, causal=False)
    for attend in (
        lambda q, k, v, b: module.attend(q, k, v, b),
        lambda q, k, v, b: module.attend(q, key=k, value=v, bias=b),
        lambda q, k, v, b: module.attend(bias=b, value=v, key=k, query=q),
    ):
        with flashpoint.stabilize(MODEL, functions=[word]):
            call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
            found = passes(call, bias)
            assert max(errors(found, wanted)) < 2**-7
            out = attend(*inputs()[:3], bias)  # one that is not learned
        assert out.equal(found[0])


def test_a_named_function_under_autocast_is_cast_inside_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias in FP32 makes weights of FP32, which autocast casts to the dtype of V."""
    module, word = line_by_line(monkeypatch)
    bias = torch.linspace(-2, 2, 32 * 32).reshape(1, 1, 32, 32)
    given = [x.float() for x in inputs()]
    with flashpoint.stabilize(MODEL, functions=[word]), torch.autocast("cpu", torch.bfloat16):
        found = passes(module.attend, bias, given=given)
    assert [x.dtype for x in found] == [torch.bfloat16, *[torch.float32] * 4]
    assert max(errors(found, exact(bias, causal=False))) < 2**-7


def test_gradients_of_a_learned_sink_are_scaled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number a head, which a kernel wants in its own dtype."""
    module: Any = types.ModuleType("attention_with_sinks")

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        assert sinks.dtype in (torch.bfloat16, torch.float64)
        scores = q.to(v.dtype) @ k.mT / 4
        sink = sinks.to(v.dtype)[:, None, None].expand(2, 4, 32, 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v

    module.attend = attend
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sinks = torch.linspace(-2, 2, 4).bfloat16()
    wanted = passes(attend, sinks.double(), given=[x.double() for x in inputs()])
    with flashpoint.stabilize(MODEL, functions=["attention_with_sinks:attend"]):
        found = passes(module.attend, sinks)
    assert max(errors(found, wanted)) < 2**-7


def test_a_function_that_learns_what_is_no_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient would be scaled as dO is, and not back."""
    module, word = line_by_line(monkeypatch)
    attend, bias = module.attend, torch.zeros(32, 32).half().requires_grad_()
    module.attend = lambda q, k, v: attend(q, k, v, bias * 2)
    with flashpoint.stabilize(MODEL, functions=[word]):
        with torch.no_grad():
            module.attend(*inputs()[:3])
        with pytest.raises(ValueError, match="arguments"):
            passes(module.attend)
    assert bias.grad is None


def test_second_derivatives_are_refused_and_a_graph_of_the_first_is_not() -> None:
    """Cotangents of the first gradient would be divided by the power of two in FP16."""
    q, k, v = (x.requires_grad_() for x in inputs()[:3])
    with flashpoint.stabilize(MODEL), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = torch.autograd.grad(causal(q, k, v).sum(), (q, k, v))
        found = torch.autograd.grad(causal(q, k, v).sum(), (q, k, v), create_graph=True)
        for one, other in zip(found, wanted, strict=True):
            assert one.equal(other)
        with pytest.raises(RuntimeError, match="twice"):
            found[0].float().square().sum().backward()


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


def test_a_block_in_a_block_belongs_to_it(capfd: pytest.CaptureFixture[str]) -> None:
    """As of a teacher and a student: each is told of once, and by nobody that no attention was called."""
    with flashpoint.stabilize(MODEL) as outer:
        with flashpoint.stabilize(nn.Linear(2, 2)) as inner:
            passes(causal, given=inputs(1e6))
        passes(causal)
        assert outer.clamped == inner.clamped == 1
    assert F.scaled_dot_product_attention is KNOWN["sdpa"]
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2
    assert "no attention" not in "".join(told)


def test_a_model_that_is_on_meta_and_gets_its_numbers_later() -> None:
    model = nn.Linear(2, 2, device="meta")
    with flashpoint.stabilize(model):
        passes(causal, given=[x.to("meta") for x in inputs()])
        model.to_empty(device="cpu")
        passes(causal)


def test_what_keeps_an_attention_of_the_block_has_the_usual_one_after_it() -> None:
    with flashpoint.stabilize(MODEL):
        kept = F.scaled_dot_product_attention
        inside = kept(*inputs()[:3])
    assert kept(*inputs()[:3]).equal(KNOWN["sdpa"](*inputs()[:3]))
    assert not kept(*inputs()[:3]).equal(inside)


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32, attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").bfloat16().eval()
    tokens = torch.arange(32)[None]
    wanted = model.double()(tokens, labels=tokens).loss
    model.bfloat16()
    with flashpoint.stabilize(model) as told:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    assert told.clamped == 0
    assert abs(float(loss) - float(wanted)) < 0.05
    assert all(bool(x.grad.isfinite().all()) for x in model.parameters() if x.grad is not None)


def test_another_attention_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that is called through the interface alone, as flash-attn is."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = []

    def kernel(module: nn.Module, q: Tensor, *more: Any, **options: Any) -> Any:
        seen.append(q.dtype)
        return sdpa_attention_forward(module, q, *more, **options)

    transformers.AttentionInterface.register("a_kernel", kernel)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=32, attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="a_kernel").bfloat16()
    with flashpoint.stabilize(model):
        model(torch.arange(32)[None]).logits.sum().backward()
    assert seen == [torch.float16]


def test_a_block_that_nobody_begins_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    flashpoint.stabilize(MODEL)
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert F.scaled_dot_product_attention is KNOWN["sdpa"]


def test_what_is_no_model_or_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="Module"), flashpoint.stabilize(causal):  # type: ignore[arg-type]
        pass
    with (
        pytest.raises(ValueError, match="no_such"),
        flashpoint.stabilize(MODEL, functions=["no_such:f"]),
    ):
        pass
    assert F.scaled_dot_product_attention is KNOWN["sdpa"]


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
