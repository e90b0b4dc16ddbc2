"""``flashpoint.stabilize`` with named functions, models of Transformers, blocks in blocks, and what it refuses."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashpoint
from tests.stabilized_passes import KNOWN, MODEL, causal, errors, exact, inputs, passes


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_compilation_under_autocast_leaves_in_bf16_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """PyTorch compiles the backward pass under the autocast of the forward pass, and casts operands of its products."""
    module, word = line_by_line(monkeypatch)
    given = [x.float() for x in inputs()]

    def attend(*qkv: Tensor) -> Tensor:
        found: Tensor = module.attend(*qkv)
        return found

    off = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
        with flashpoint.stabilize(MODEL, functions=[word]):
            with torch.autocast("cpu", torch.bfloat16):
                out = call(*(leaves := [x.clone().requires_grad_() for x in given[:3]]))
            found = [out, *torch.autograd.grad(out, leaves, given[3].to(out.dtype))]
        off[compiled] = max(errors(found, exact(causal=False))[1:])
        assert ("it has BF16 in its backward pass" in capfd.readouterr().err) == compiled
    assert off[True] > 3 * off[False]


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_who_computes_it_line_by_line_in_transformers_is_told_of_others(capfd: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=32, attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager").bfloat16()
    with flashpoint.stabilize(model):
        model(torch.arange(32)[None]).logits.sum().backward()
    assert "another attn_implementation than eager" in capfd.readouterr().err
    with flashpoint.stabilize(MODEL):
        pass
    assert "attn_implementation" not in capfd.readouterr().err


def test_a_block_that_nobody_begins_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    flashpoint.stabilize(MODEL)
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert F.scaled_dot_product_attention is KNOWN["sdpa"]


def test_what_is_no_model_or_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="functions='math:exp': give a list"):
        flashpoint.stabilize(MODEL, functions="math:exp")
    with pytest.raises(TypeError, match="Module"), flashpoint.stabilize(causal):  # type: ignore[arg-type]
        pass
    with (
        pytest.raises(ValueError, match="no_such"),
        flashpoint.stabilize(MODEL, functions=["no_such:f"]),
    ):
        pass
    assert F.scaled_dot_product_attention is KNOWN["sdpa"]
