"""The op: well formed, indifferent to strides and autocast, frugal, and the same on every launch."""

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flashpoint.numerics import dispatch, shared_graphs
from flashpoint.numerics.choices import NEAREST, STOCHASTIC, UNROUNDED
from flashpoint.numerics.dispatch import attention, sdpa_operation
from flashpoint.numerics.ops import flash_fwd_op
from flashpoint.numerics.variant import AttentionVariant
from tests.numerics.oracle import run_reference

BASELINE = AttentionVariant(scores=NEAREST, out_unnormalized=NEAREST)
CHOICES = [
    BASELINE,
    AttentionVariant(out=UNROUNDED, delta="out_fp32", block_k=None),
    AttentionVariant(out_unnormalized=STOCHASTIC, exact_row_sum=True, center_keys=True),
]
SEED_AND_STEP = torch.tensor([1, 2])


def inputs(length: int = 40, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 3, length, 16, generator=generator).bfloat16() for _ in range(3)]


def out_and_grads(tensors: list[Tensor], variant: AttentionVariant = BASELINE) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    out = attention(q, k, v, variant, layer=2, seed_and_step=SEED_AND_STEP)
    out.float().square().sum().backward()
    return [x for x in (out.detach(), q.grad, k.grad, v.grad) if x is not None]


@pytest.mark.slow
@pytest.mark.parametrize("variant", CHOICES, ids=["baseline", "fp32", "stochastic"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_op_passes_pytorchs_own_checks(variant: AttentionVariant, transposed: bool) -> None:
    q, k, v = ((x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x).requires_grad_() for x in inputs())
    arguments = (q, k, v, SEED_AND_STEP, variant.key, 2, True, 0.25)
    torch.library.opcheck(flash_fwd_op, arguments)


@pytest.mark.parametrize("variant", CHOICES, ids=["baseline", "fp32", "stochastic"])
def test_strides_change_no_bit(variant: AttentionVariant) -> None:
    contiguous = inputs()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in contiguous]
    for one, other in zip(out_and_grads(contiguous, variant), out_and_grads(strided, variant), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("variant", CHOICES, ids=["baseline", "fp32", "stochastic"])
def test_autocast_changes_no_bit(variant: AttentionVariant) -> None:
    plain = out_and_grads(inputs(), variant)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = out_and_grads(inputs(), variant)
    for one, other in zip(plain, cast, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("variant", CHOICES, ids=["baseline", "fp32", "stochastic"])
def test_two_launches_give_the_same_bits(variant: AttentionVariant) -> None:
    for one, other in zip(out_and_grads(inputs(), variant), out_and_grads(inputs(), variant), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_stochastic_rounding_is_unbiased_over_steps() -> None:
    """The mean of n outputs nears the unrounded one like 1/√n; one BF16 ulp is at most 2⁻⁷ relative."""
    q, k, v = inputs()
    stochastic = AttentionVariant(probs=UNROUNDED, out=UNROUNDED, out_unnormalized=STOCHASTIC)
    unrounded = AttentionVariant(probs=UNROUNDED, out=UNROUNDED)
    exact = attention(q, k, v, unrounded, layer=1, seed_and_step=SEED_AND_STEP)
    steps = 400
    outs = torch.stack(
        [attention(q, k, v, stochastic, layer=1, seed_and_step=torch.tensor([1, step])) for step in range(steps)]
    )
    assert not torch.equal(outs[0], outs[1])
    # A rounding to one of two neighbours u apart has standard deviation ≤ u/2 ≤ 2⁻⁸·|O|.
    limit = 5 * 2**-8 * exact.abs() / math.sqrt(steps) + 1e-7
    assert ((outs.mean(0) - exact).abs() <= limit).float().mean() > 0.9999
    bias = ((outs.mean(0) - exact) / exact.abs()).mean().item()
    assert abs(bias) < 5 * 2**-8 / math.sqrt(steps * exact.numel())


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("block", [64, 200, 512, None])
def test_nothing_larger_than_a_block_row_is_materialised(block: int | None) -> None:
    length = 1024
    q, k, v = (x[:1, :1] for x in inputs(length))
    variant = AttentionVariant(scores=NEAREST, exact_row_sum=True, block_k=block)
    with Largest() as largest:
        run_reference(q, k, v, v, variant)
    assert length * 32 < largest.elements <= length * 128  # a block row, of 2²⁰ scores in all


def test_the_production_kernel_is_named_as_pytorch_was_told_to_choose() -> None:
    (q, *_) = inputs()
    assert sdpa_operation(q) == "ScaledDotProductFlashAttentionForCpu"  # PyTorch's only fused one on CPUs
    with sdpa_kernel(SDPBackend.MATH):
        assert sdpa_operation(q) == "math"


def test_the_first_variant_of_each_form_has_the_same_name_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then one compilation serves all, from process to process."""
    rounded, exact, saving = (AttentionVariant(**some) for some in ({}, {"exact_row_sum": True}, {"delta": "out_fp32"}))
    names = []
    mixed = AttentionVariant(layers=(2,), elsewhere=exact)
    monkeypatch.setattr(shared_graphs, "_KEYS", {})
    for variant in (rounded, mixed, exact):
        shared_graphs.forget_graphs()
        names.append(shared_graphs.graph_name(variant.key))
    assert names[0] == names[1] == names[2] == shared_graphs.graph_name(exact.key)
    second, layers = (AttentionVariant(delta="out_fp32", layers=(n,), elsewhere=exact) for n in (1, 2))
    assert len({names[1], *(shared_graphs.graph_name(one.key) for one in (rounded, saving, second, layers))}) == 5


def test_under_its_name_in_graphs_a_variant_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_graphs, "_KEYS", {})
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 24, 16, generator=generator).bfloat16() for _ in range(3))
    for variant in (AttentionVariant(exact_row_sum=True), AttentionVariant()):
        name = shared_graphs.graph_name(variant.key)
        results = [flash_fwd_op(q, k, v, SEED_AND_STEP, word, 1, True, 0.25) for word in (variant.key, name)]
        assert all(map(torch.equal, *results))


@pytest.mark.slow
def test_what_an_op_calls_is_not_compiled_where_a_graph_breaks_beside_it() -> None:
    """The compiler would drop rounding points of the reference."""
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        compiled.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    q, k, v = (torch.randn(1, 2, 32, 16).bfloat16() for _ in range(3))

    def step() -> Tensor:
        try:
            torch._dynamo.graph_break()
            out: Tensor = flash_fwd_op(q, k, v, SEED_AND_STEP, AttentionVariant().key, 1, True, 0.25)[0]
            return out
        finally:
            compiled.append("the end")

    torch._dynamo.reset()
    out = torch.compile(step, backend=backend)()
    assert set(compiled) <= {"the end", "flashpoint.flash_fwd.default", "<built-in function getitem>"}
    assert out.equal(step())


class Seen(TorchDispatchMode):
    """Remembers the ops of this package that PyTorch's dispatcher hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.extend([func.__name__] if func.namespace == "flashpoint" else [])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", CHOICES, ids=["baseline", "fp32", "stochastic"])
def test_called_without_an_op_it_gives_the_same_bits(variant: AttentionVariant) -> None:
    """Nothing but a mode of PyTorch's, or a compiler, asks for the op."""
    with Seen() as seen:
        by_op = out_and_grads(inputs(), variant)
    assert seen.ops == ["flash_fwd.default", "flash_bwd.default"]
    with pytest.MonkeyPatch.context() as patched:
        for name in ("flash_fwd_op", "flash_bwd_op"):
            patched.delattr(dispatch, name)
        directly = out_and_grads(inputs(), variant)
    assert all(map(torch.equal, by_op, directly))


def test_a_mode_of_the_backward_pass_alone_sees_the_op_and_the_same_bits() -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    grads = []
    for mode in (Seen(), contextlib.nullcontext()):
        out = attention(q, k, v, BASELINE, layer=2, seed_and_step=SEED_AND_STEP)
        with mode:
            grads.append(torch.autograd.grad(out, (q, k, v), v.detach()))
        if isinstance(mode, Seen):
            assert mode.ops == ["flash_bwd.default"]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_change_no_bit(reentrant: bool) -> None:
    def of(*qkv: Tensor) -> Tensor:
        return attention(*qkv, BASELINE, layer=2, seed_and_step=SEED_AND_STEP)

    q, k, v = (x.requires_grad_() for x in inputs())
    plain = torch.autograd.grad(of(q, k, v).float().square().sum(), (q, k, v))
    for x in (q, k, v):
        x.grad = None
    checkpoint(of, q, k, v, use_reentrant=reentrant).float().square().sum().backward()
    assert all(x.grad is not None and x.grad.equal(grad) for x, grad in zip((q, k, v), plain, strict=True))


@pytest.mark.parametrize("variant", CHOICES)
def test_threads_that_share_the_sequences_change_no_bit(variant: AttentionVariant) -> None:
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(out_and_grads(inputs(length=99, batch=8), variant))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


def test_a_batch_of_no_sequences_has_no_result() -> None:
    assert all(len(x) == 0 for x in out_and_grads(inputs(batch=0)))
