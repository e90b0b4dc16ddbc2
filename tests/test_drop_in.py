"""The drop-in attention: its gradients in every layout against FP64, and torch.compile with it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

import flashpoint
from flashpoint.drop_in import attention, variant_of
from flashpoint.numerics.choices import STOCHASTIC, DeltaError, Rounding
from flashpoint.numerics.variant import AttentionVariant
from tests import releases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(heads: int, heads_kv: int, length: int, size: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v and dO."""
    generator = torch.Generator().manual_seed(size + length)
    shapes = [(2, heads, length, size), *[(2, heads_kv, length, size)] * 2, (2, heads, length, size)]
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes]


def out_and_grads(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    *qkv, grad_out = (x.clone() for x in inputs)
    leaves = [x.requires_grad_() for x in qkv]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]


def exact(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    """From the definition, in the inputs' dtype."""
    groups, (length, size) = q.shape[1] // k.shape[1], q.shape[-2:]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.mT * (size**-0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return scores.softmax(-1) @ v


LAYOUTS = [
    # heads, heads of keys, T, d, causal, scale
    (2, 2, 33, 16, True, None),
    (2, 2, 33, 16, False, None),
    (4, 2, 65, 24, True, None),
    (4, 1, 130, 64, False, 0.3),
    (6, 3, 70, 80, True, 0.05),
    (2, 1, 3, 128, True, None),
    (2, 2, 5, 8, False, None),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["flash_exact_rowsum", "flash_bf16", "flash_unrounded_out", "flash_centered", "released"]
)
@pytest.mark.parametrize(("heads", "heads_kv", "length", "size", "is_causal", "scale"), LAYOUTS)
def test_it_is_as_near_to_fp64_as_baseline_attention_in_bf16(
    variant: str, heads: int, heads_kv: int, length: int, size: int, is_causal: bool, scale: float | None
) -> None:
    inputs = tensors(heads, heads_kv, length, size)
    options = {"is_causal": is_causal, "scale": scale}
    found = out_and_grads(lambda *qkv: attention(*qkv, **options, enable_gqa=True, variant=variant), inputs)
    golden = out_and_grads(lambda *qkv: exact(*qkv, **options), [x.double() for x in inputs])
    baseline = out_and_grads(lambda *qkv: exact(*qkv, **options), inputs)
    for one, other, wanted in zip(found, baseline, golden, strict=True):
        assert one.shape == wanted.shape
        assert one.dtype == torch.bfloat16
        assert (one - wanted).norm() <= 2 * (other - wanted).norm() + 1e-3 * wanted.norm()


def test_in_fp32_nothing_but_the_variants_roundings_is_rounded() -> None:
    plain = AttentionVariant.from_dict(dict.fromkeys(("probs", "out", "grad_scores"), "none"))
    inputs = tensors(4, 2, 50, 20, torch.float32)
    for is_causal in (True, False):
        found = out_and_grads(lambda *qkv: attention(*qkv, is_causal=is_causal, enable_gqa=True, variant=plain), inputs)  # noqa: B023
        golden = out_and_grads(lambda *qkv: exact(*qkv, is_causal, None), [x.double() for x in inputs])  # noqa: B023
        for one, wanted in zip(found, golden, strict=True):
            torch.testing.assert_close(one.double(), wanted, rtol=1e-4, atol=1e-5)


def test_grouped_heads_are_those_of_pytorchs_attention() -> None:
    inputs = tensors(6, 2, 40, 32)
    found, expected = (
        out_and_grads(lambda *qkv: function(*qkv, is_causal=True, enable_gqa=True), inputs)  # noqa: B023
        for function in (flashpoint.attention, F.scaled_dot_product_attention)
    )
    for one, other in zip(found, expected, strict=True):
        assert (one - other).float().norm() <= 0.02 * other.float().norm()


@releases.traces_attention
@pytest.mark.slow
def test_compiled_it_computes_the_same_bits() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.sin(), k, v, is_causal=True, enable_gqa=True, variant="flash_fixed").float()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for heads, length in ((4, 40), (4, 24), (4, 56), (2, 56)):  # from the second one on PyTorch compiles for any
        inputs = tensors(heads, 2, length, 24)
        for one, other in zip(out_and_grads(compiled, inputs), out_and_grads(loss, inputs), strict=True):
            assert torch.equal(one, other)


def test_under_autocast_it_takes_what_pytorchs_attention_takes() -> None:
    q, k, v, _ = tensors(2, 2, 20, 16, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = attention(q, k, v, is_causal=True)
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True))


def test_autocast_leaves_fp64_as_it_is_and_it_is_refused() -> None:
    q, k, v, _ = tensors(2, 2, 20, 16, torch.float64)
    with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(ValueError, match="float64"):
        attention(q, k, v, is_causal=True)


def test_an_output_that_nothing_depends_on_has_no_gradient() -> None:
    class Dropped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> None:
            return None

    q, k, v, _ = tensors(2, 2, 20, 16)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    loss = Dropped.apply(attention(*inputs, is_causal=True)).float().sum() + q.float().sum()
    loss.backward()
    assert torch.equal(q.grad, torch.ones_like(q))
    assert k.grad is None or not k.grad.any()


def test_stochastic_rounding_takes_its_bits_from_the_caller() -> None:
    q, k, v, _ = tensors(2, 2, 20, 16)
    variant = dataclasses.replace(variant_of("flash_bf16"), out=STOCHASTIC)
    outs = [
        attention(q, k, v, variant=variant, seed_and_step=torch.tensor([3, step], device=DEVICE)) for step in (0, 0, 1)
    ]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    with pytest.raises(ValueError, match="seed_and_step"):
        attention(q, k, v, variant=variant)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"attn_mask": torch.ones(20, 20, dtype=torch.bool)}, "attn_mask"),
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"variant": "flash_bf17"}, "flash_bf17"),
        ({"key": torch.zeros(2, 3, 20, 16, dtype=torch.bfloat16)}, "key"),
        ({"key": torch.zeros(2, 1, 20, 16, dtype=torch.bfloat16)}, "key"),
        ({"query": torch.zeros(2, 2, 1, 16, dtype=torch.bfloat16)}, "query"),
        ({"query": torch.zeros(2, 2, 20, 16, dtype=torch.float16)}, "float16"),
        ({"query": torch.zeros(20, 16, dtype=torch.bfloat16)}, "query"),
        (dict.fromkeys(("query", "key"), torch.zeros(2, 2, 0, 16, dtype=torch.bfloat16)), "no token"),
        (dict.fromkeys(("query", "key"), torch.zeros(0, 2, 8, 16, dtype=torch.bfloat16)), "no token"),
    ],
)
def test_what_it_does_not_compute_is_one_clear_error(arguments: dict[str, Tensor], named: str) -> None:
    q, k, v, _ = (x.cpu() for x in tensors(2, 2, 20, 16))
    arguments = {"query": q, "key": k, "value": arguments.get("key", v), **arguments}
    with pytest.raises(ValueError, match=named) as raised:
        attention(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


TWO_LAYERS = AttentionVariant(
    name="two", delta_error=DeltaError(kind="bias", size=1.0, interval=5, trajectory=((1.0,), (2.0,)))
)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"layer": 0}, r"layer=0: give one from 1 to 4,095"),
        ({"layer": -1}, r"layer=-1: give one from 1 to 4,095"),
        ({"layer": 4096}, r"layer=4096: give one from 1 to 4,095"),
        ({"layer": 1.5}, r"layer is float: give an int"),
        ({"layer": torch.tensor(1)}, r"layer is Tensor: give an int"),
        ({"seed_and_step": [3, 0]}, r"seed_and_step is list: give a tensor, \[2\] int64"),
        ({"layer": 3, "variant": TWO_LAYERS}, r"layer=3: variant=two has errors of δ for layers 1 to 2"),
        ({"scale": math.nan}, r"scale=nan: give a finite number, or None for 1/√d"),
        ({"scale": math.inf}, r"scale=inf: give a finite number"),
        ({"scale": torch.tensor(0.2, requires_grad=True)}, r"scale: no gradient goes to it; multiply query"),
        ({"scale": torch.tensor([0.1, 0.2])}, r"scale: no gradient goes to it; multiply query"),
        ({"seed_and_step": torch.zeros(2)}, r"seed_and_step \[2\] float32: give \[2\] int64"),
        ({"seed_and_step": torch.zeros(3, dtype=torch.int64)}, r"seed_and_step \[3\] int64: give \[2\] int64"),
    ],
)
def test_what_would_be_another_attention_is_one_clear_error(arguments: dict[str, Any], told: str) -> None:
    """Layer 0 had the last factor of a trajectory, and layer 4,096 the random bits of another stream."""
    with pytest.raises(ValueError, match=told) as raised:
        attention(*tensors(2, 2, 20, 16)[:3], **arguments)
    assert "\n" not in str(raised.value)


def test_a_wrong_call_is_refused_each_time_also_after_one_that_equals_it() -> None:
    q, k, v, _ = tensors(2, 2, 20, 16)
    attention(q, k, v, layer=1, scale=1.0)
    wrong: list[dict[str, Any]] = [{"layer": 1.0}, {"scale": torch.ones((), requires_grad=True)}, {"dropout_p": 0.1}]
    for arguments in wrong * 2:
        with pytest.raises(ValueError, match="|".join(arguments)):
            attention(q, k, v, **({"layer": 1, "scale": 1.0} | arguments))
    for _ in range(2):
        with pytest.raises(ValueError, match="one device"):
            attention(q, k.to("meta"), v, layer=1, scale=1.0)


def with_one_bit(kernel: str, **choices: Any) -> AttentionVariant:
    return AttentionVariant(name="one bit", kernel=kernel, out=Rounding("nearest", bits=1), **choices)  # type: ignore[arg-type]


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=releases.traces_attention)])
@pytest.mark.parametrize(
    ("variant", "layer"),
    [
        (with_one_bit("sdpa"), 1),
        (with_one_bit("sdpa_math"), 1),
        (with_one_bit("sdpa", shift_keys="sequence"), 1),
        (with_one_bit("flash", layers=(1,), elsewhere=with_one_bit("sdpa")), 2),
    ],
    ids=lambda given: str(getattr(given, "kernel", given)),
)
def test_bits_that_a_kernel_of_another_library_does_not_read_are_refused(
    variant: AttentionVariant, layer: int, compiles: bool
) -> None:
    def out(x: Tensor) -> Tensor:
        return attention(x, x, x, variant=variant, layer=layer)

    function = torch.compile(out, backend="eager") if compiles else out
    with pytest.raises(Exception, match=r"does not read out\.bits=1; leave it at 7"):
        function(tensors(2, 2, 20, 16)[0])


@pytest.mark.parametrize("kernel", ["flash", "sdpa"])
@pytest.mark.parametrize("shift", ["shift_keys", "shift_values"])
def test_one_shift_alone_stands_before_each_kernel(kernel: str, shift: str) -> None:
    """What is subtracted rounds keys or values anew, and changes nothing else."""
    q, k, v, _ = tensors(2, 2, 40, 16)
    plain, shifting = (
        AttentionVariant(kernel=kernel, **choices)  # type: ignore[arg-type]
        for choices in ({}, {shift: "sequence"})
    )
    unshifted, shifted = (attention(q, k + 3, v + 3, variant=one) for one in (plain, shifting))
    wanted = exact(q.double(), (k + 3).double(), (v + 3).double(), False, None)
    assert not torch.equal(shifted, unshifted)
    assert (shifted - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.slow
@releases.traces_attention
def test_compiled_it_takes_other_layers_and_scales_and_refuses_the_same() -> None:
    def out(x: Tensor, layer: int, scale: float) -> Tensor:
        return attention(x, x, x, layer=layer, scale=scale)

    compiled, x = torch.compile(out, fullgraph=True, backend="aot_eager"), tensors(2, 2, 20, 16)[0]
    for layer, scale in ((1, 0.5), (2, 0.25), (3, 0.1), (4095, 1.0)):
        assert torch.equal(compiled(x, layer, scale), out(x, layer, scale))
    with pytest.raises(Exception, match="layer=4096"):
        compiled(x, 4096, 0.5)


@pytest.mark.parametrize(("heads", "heads_kv"), [(0, 0), (4, 0)])
def test_no_head_is_one_clear_error(heads: int, heads_kv: int) -> None:
    with pytest.raises(ValueError, match=r"value \[2, 0, 20, 16\]: no head; give H and H_kv of 1 or more"):
        attention(*tensors(heads, heads_kv, 20, 16)[:3], enable_gqa=True)


def test_a_variant_is_a_name_or_a_variant() -> None:
    with pytest.raises(ValueError, match="variant=None: give a name of configs/attn, or an AttentionVariant"):
        attention(*tensors(2, 2, 20, 16)[:3], variant=None)  # type: ignore[arg-type]


def test_of_second_derivatives_one_clear_error_names_what_has_them() -> None:
    def second(variant: str) -> Tensor:
        q, k, v = (x.requires_grad_() for x in tensors(2, 2, 20, 16, torch.float32)[:3])
        (grad,) = torch.autograd.grad(attention(q, k, v, variant=variant).square().sum(), q, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), q)[0]

    with pytest.raises(ValueError, match=r"no second derivatives; choose variant='sdpa' inside .*MATH"):
        second("flash_exact_rowsum")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert second("sdpa").isfinite().all()


def test_derivatives_in_forward_mode_are_refused() -> None:
    q, k, v = tensors(2, 2, 20, 16)[:3]
    with pytest.raises(ValueError, match="no derivatives in forward mode"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (torch.ones_like(q),))
    with forward_ad.dual_level(), pytest.raises(ValueError, match="no derivatives in forward mode"):
        attention(q, k, forward_ad.make_dual(v, torch.ones_like(v)))


def test_on_the_meta_device_it_has_pytorchs_shapes() -> None:
    q, k, v, grad_out = (x.to("meta") for x in tensors(4, 2, 20, 24))
    for function in (attention, F.scaled_dot_product_attention):
        out, *grads = out_and_grads(lambda *qkv: function(*qkv, is_causal=True, enable_gqa=True), [q, k, v, grad_out])  # noqa: B023
        assert [(x.shape, x.dtype) for x in (out, *grads)] == [(x.shape, x.dtype) for x in (q, q, k, v)]


def test_heads_of_more_than_128_features_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 128"):
        attention(*tensors(1, 1, 4, 256)[:3])
