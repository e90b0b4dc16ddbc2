"""The Triton kernels against the PyTorch attention with the same variant, and against FP64.

Runs under Triton's interpreter without a GPU and compiled with one. Outputs may differ by the order of FP32 sums,
which flips a rounding to BF16 now and then: by one ulp of BF16, on few elements.
"""

import dataclasses
import functools
import json
import math
from typing import Any, Literal

import pytest
import torch
import yaml
from torch import Tensor

from flashpoint.numerics import launch, reference
from flashpoint.numerics.choices import NEAREST, STOCHASTIC, UNROUNDED, Rounding
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import ROUNDING_POINTS, AttentionVariant
from flashpoint_kernels import tile_sizes
from tests.conftest import REPOSITORY
from tests.numerics.oracle import exact_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FROM_FILES = {
    path.stem: AttentionVariant.from_dict(yaml.safe_load(path.read_text()))
    for path in sorted((REPOSITORY / "configs/attn").glob("*.yaml"))
    if path.stem != "sdpa"
}


def in_format(rounding: Rounding) -> AttentionVariant:
    """Every rounding point alike."""
    return AttentionVariant(**dict.fromkeys(ROUNDING_POINTS, rounding))  # type: ignore[arg-type]


VARIANTS = {
    **FROM_FILES,
    "rounded_normalizer": AttentionVariant(scores=NEAREST, normalizer="rounded"),
    "normalized_for_delta": AttentionVariant(normalizer="before_product", block_k=None, delta="out_fp32"),
    "offset": AttentionVariant(shift="offset", shift_offset=1.5),
    "small_blocks": AttentionVariant(
        scores=NEAREST, out_unnormalized=NEAREST, out_unnormalized_when="per_block", block_k=16, delta="out_fp32"
    ),
    "dynamic_gamma": AttentionVariant(scores=NEAREST, shift="dynamic_max", gamma=0.75, tie_tolerance=1e-3, block_k=16),
    "dynamic_exact": dataclasses.replace(FROM_FILES["flash_fixed_paper"], exact_row_sum=True),
    "dynamic_untiled": AttentionVariant(scores=NEAREST, shift="dynamic_max", beta=2.0, block_k=None),
    "released_64": dataclasses.replace(FROM_FILES["released_fixed"], block_k=64, delta="out_fp32"),
    "all_stochastic": in_format(STOCHASTIC),
    "fp32": AttentionVariant(probs=UNROUNDED, out=UNROUNDED, grad_scores=UNROUNDED),
    "independent_per_block": AttentionVariant(
        scores=NEAREST, out_unnormalized=STOCHASTIC, out_unnormalized_when="per_block", out=STOCHASTIC,
        delta="out_independent", block_k=16,
    ),
    "coarse": in_format(Rounding("nearest", 4)),
    "fine": in_format(Rounding("nearest", 10)),
    "coarse_stochastic": in_format(Rounding("stochastic", 5)),
    "fine_stochastic": in_format(Rounding("stochastic", 8)),
}  # fmt: skip
THREE_TILES = ("flash_bf16", "dynamic_exact", "flash_delta_pdp", "flash_stochastic", "flash_untiled", "released_fixed")
SHAPES = [
    *(pytest.param(name, 65, 32, marks=[] if name in FROM_FILES else [pytest.mark.slow]) for name in VARIANTS),
    # Three tiles of keys; each takes the interpreter seconds, and what differs in them is running maximum and products.
    *(
        pytest.param(name, 130, 64, marks=pytest.mark.slow)
        for name in (VARIANTS if torch.cuda.is_available() else THREE_TILES)
    ),
]
NAMES = ("out", "logsumexp", "grad_q", "grad_k", "grad_v")


def inputs(length: int, size: int) -> list[Tensor]:
    """Tied maxima, a sink and one-signed values in one head, noise in the other."""
    generator = torch.Generator().manual_seed(length + size)
    q, k, v, grad_out = (torch.randn(1, 2, length, size, generator=generator) for _ in range(4))
    k[:, 0] = k[:, 0, torch.arange(length) // 4]
    q[:, 0] += 0.5 * k[:, 0, :1]
    v[:, 0] = -v[:, 0].abs() - 1
    return [x.bfloat16().to(DEVICE) for x in (q, k, v, grad_out)]


def run(engine: str, tensors: list[Tensor], variant: AttentionVariant, **call: Any) -> dict[str, Tensor]:
    q, k, v, grad_out = tensors
    seed_and_step = torch.tensor([5, 6], device=DEVICE)
    if engine == "kernels":
        call |= {"layer": 2, "seed_and_step": seed_and_step}
        saved = launch.flash_fwd(q, k, v, variant, **call)
        grads = launch.flash_bwd(grad_out, q, k, v, *saved, variant, **call)
    else:
        noise = noise_of(q)
        saved = reference.flash_fwd(q, k, v, variant, noise, **call)
        grads = reference.flash_bwd(grad_out, q, k, v, *saved, variant, noise, **call)
    return {name: x.double().cpu() for name, x in zip(NAMES, (*saved[:2], *grads), strict=True)}


def kernels_and_reference(tensors: list[Tensor], variant: AttentionVariant, **call: Any) -> list[dict[str, Tensor]]:
    return [run(engine, tensors, variant, **call) for engine in ("kernels", "reference")]


@functools.lru_cache
def computed(name: str, length: int, size: int) -> list[dict[str, Tensor]]:
    """Of :func:`inputs`, by both; several tests look at them."""
    return kernels_and_reference(inputs(length, size), VARIANTS[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length", "size"), SHAPES)
def test_kernels_equal_the_pytorch_attention_up_to_flips_of_a_rounding(name: str, length: int, size: int) -> None:
    """And are as close to FP64 as it is."""
    tensors = inputs(length, size)
    assert launch.kernels_support(tensors[0].dtype, tensors[0].shape[-1], VARIANTS[name])
    assert_alike(*computed(name, length, size), exact_attention(*(x.cpu() for x in tensors)))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["flash_bf16", "flash_exact_rowsum", "flash_centered", "released", "small_blocks", "all_stochastic"]
)
def test_so_they_are_where_a_query_sees_every_key(name: str) -> None:
    """With a scale that is no power of two, and a last tile that the keys do not fill."""
    tensors, call = inputs(70, 16), {"causal": False, "scale": 0.3}
    alike = kernels_and_reference(tensors, VARIANTS[name], **call)
    assert_alike(*alike, exact_attention(*(x.cpu() for x in tensors), **call))  # type: ignore[arg-type]


def assert_alike(kernel: dict[str, Tensor], expected: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    for quantity in NAMES:
        difference = (kernel[quantity] - expected[quantity]).abs()
        assert difference.norm() <= 3e-3 * expected[quantity].norm(), quantity
        flipped = (difference > 1e-5 * expected[quantity].abs().amax(-1, keepdim=True)).double().mean()
        # A flip in O moves δ, and with it a whole row of dQ.
        assert flipped < (0.01 if quantity in ("out", "logsumexp") else 0.05), quantity
        if quantity != "logsumexp":
            errors = [(x[quantity] - exact[quantity]).norm() for x in (kernel, expected)]
            assert errors[0] <= 1.1 * errors[1] + 1e-5 * exact[quantity].norm(), quantity


def noise_of(q: Tensor) -> NoiseKey:
    return NoiseKey(torch.tensor([5, 6], device=DEVICE), 2, torch.arange(2, device=DEVICE), 2, q.shape[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_exactly_decidable_is_identical(name: str) -> None:
    """q and k are small integers, so scores are exact in any order: the shift and the P̄ that are 1 must agree."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randint(-2, 3, (1, 2, 90, 16), generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    q[:, :, :, 2:] = 0  # few distinct scores, so many ties
    q[:, 1], k[:, 1] = q[:, 1].abs(), -k[:, 1].abs() - 1  # below 0
    variant = dataclasses.replace(VARIANTS[name], center_keys=False)
    seed_and_step = torch.tensor([5, 6], device=DEVICE)
    shift, ones = launch.row_statistics(q, k, q, variant, layer=2, seed_and_step=seed_and_step)
    expected_shift, expected_ones = reference.row_statistics(q, k, q, variant, noise_of(q))
    assert torch.equal(shift, expected_shift)
    assert torch.equal(ones, expected_ones)
    unnormalized = variant.normalizer != "before_product"
    if unnormalized and variant.shift == "rowmax" and variant.probs.mode == "nearest":
        scores = (q.double() @ k.double().mT).cpu().masked_fill(torch.ones(90, 90).triu(1) == 1, -torch.inf)
        tied = (scores == scores.amax(-1, keepdim=True)).sum(-1)
        assert torch.equal(ones.cpu(), tied.int())
        assert (tied > 1).double().mean() > 0.5


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("masked_blocks", ["skip", "count"])
def test_a_floor_counts_once_in_each_block_of_keys(block: int, masked_blocks: Literal["skip", "count"]) -> None:
    """By hand: the first key has a score of 20 nats, and the others 0. A query adds no more than the floor for each
    later block that it sees, and the floor, or nothing, for each that it does not see.

    A tile of queries is longer than the shorter blocks: its first queries come before the last of its blocks.
    """
    floor, score, length = 0.5, 20.0, 90
    q, k = (torch.zeros(1, 2, length, 16, dtype=torch.bfloat16, device=DEVICE) for _ in "qk")
    q[..., 0], k[:, :, 0, 0] = 4.0, score
    variant = AttentionVariant(block_k=block, denominator_floor=floor, masked_blocks=masked_blocks)
    _, logsumexp, *_ = launch.flash_fwd(q, k, k, variant, layer=1, seed_and_step=torch.zeros(2).long().to(DEVICE))
    expected = []
    for row in range(length):
        of_first = 1 + min(row, block - 1) * math.exp(-score)
        blocks = range(block, length, block) if masked_blocks == "count" else range(block, row + 1, block)
        expected.append(score + math.log(of_first + floor * len(blocks)))
    of_heads = torch.tensor(expected, dtype=torch.float64).expand(1, 2, length)
    torch.testing.assert_close(logsumexp.cpu().double(), of_heads, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", [-1, 1 << 32, -(1 << 40) + 7])
def test_of_a_wide_seed_the_lower_bits_count_and_steps_have_bits_of_their_own(seed: int) -> None:
    q, k, v, _ = inputs(20, 16)
    variant = AttentionVariant(out=STOCHASTIC)
    outs = [
        launch.flash_fwd(q, k, v, variant, layer=1, seed_and_step=torch.tensor(key, device=DEVICE))[0]
        for key in ([seed, 0], [seed, 1], [seed & 0xFFFFFFFF, 1])
    ]
    assert not torch.equal(outs[0], outs[1])
    assert torch.equal(outs[1], outs[2])


def test_keys_of_heads_2_to_the_31_elements_apart_are_centred() -> None:
    """The storage takes 4 GB of addresses, of which the keys touch a few pages."""
    apart = 1 << 30
    storage = torch.empty(2 * apart + 4096, dtype=torch.bfloat16, device=DEVICE)
    k = storage.as_strided((1, 3, 32, 16), (0, apart, 16, 1))
    k.copy_(torch.randn(k.shape, generator=torch.Generator().manual_seed(0)))
    variant = AttentionVariant(center_keys=True)
    saved = launch.flash_fwd(k, k, k, variant, layer=1, seed_and_step=torch.zeros(2).long().to(DEVICE))
    expected = k.double() - k.double().mean(-2, keepdim=True)
    torch.testing.assert_close(saved[3].double(), expected, rtol=2**-8, atol=1e-6)


STRESSES: dict[str, dict[str, float]] = {
    "plain": {},
    "sink": {"sink": 20.0},
    "large": {"scale": 22.0},  # |S| to about 500
    "one_signed": {"values": 2.0},
}


def stressed(stress: str, length: int = 80) -> list[Tensor]:
    options = {"sink": 0.0, "scale": 1.0, "values": 0.0, **STRESSES[stress]}
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad_out = (torch.randn(1, 2, length, 64, generator=generator) for _ in range(4))
    q, k = q * options["scale"] ** 0.5, k * options["scale"] ** 0.5
    k[:, :, 0] += options["sink"] * q.mean((0, 1, 2))
    v = v.abs() + options["values"] if options["values"] else v
    return [x.bfloat16().to(DEVICE) for x in (q, k, v, grad_out)]


def plain_bf16_attention(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    """What PyTorch computes in BF16 without a kernel: the yardstick of FlashAttention's own tests."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    masked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    out = scores.masked_fill(masked, -math.inf).softmax(-1) @ v
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    return {name: x.detach().double().cpu() for name, x in zip(("out", *NAMES[2:]), (out, *grads), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stress"),
    [
        *((name, stress) for name in ("flash_fp32", "flash_bf16", "flash_exact_rowsum") for stress in STRESSES),
        ("flash_delta_pdp", "one_signed"),
        ("flash_untiled", "large"),
    ],
)
def test_flashattentions_own_criterion(name: str, stress: str) -> None:
    """Error to FP64 at most twice that of a BF16 attention in PyTorch (tests of Dao's flash-attention).

    δ = rowsum(dO∘O) misses it for dQ and dK where V has one sign, in any implementation: O is then larger than its
    differences, and its rounding goes into δ. There the yardstick is the PyTorch attention of the same variant.
    """
    tensors, variant = stressed(stress), VARIANTS[name]
    exact = exact_attention(*(x.cpu() for x in tensors))  # type: ignore[arg-type]
    kernel, same_numerics = kernels_and_reference(tensors, variant)
    plain = plain_bf16_attention(*tensors)
    from_out = variant.delta == "out" and not variant.exact_row_sum
    for quantity in ("out", "grad_q", "grad_k", "grad_v"):
        error, by_reference, by_plain = (
            (x[quantity] - exact[quantity]).abs().max().item() for x in (kernel, same_numerics, plain)
        )
        if stress == "one_signed" and from_out and quantity in ("grad_q", "grad_k"):
            assert error <= 1.2 * by_reference, quantity
        else:
            assert error <= 2 * by_plain + 1e-5, quantity


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 128])
@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("name", ["flash_bf16", "standard"])
def test_edges_of_tiles(name: str, length: int, size: int) -> None:
    tensors = inputs(length, size)
    kernel, expected = kernels_and_reference(tensors, VARIANTS[name])
    for quantity in NAMES:
        scale = max(expected[quantity].abs().max().item(), expected["grad_v"].abs().max().item())
        assert (kernel[quantity] - expected[quantity]).abs().max() <= 2**-6 * scale, quantity


@pytest.mark.slow
def test_nothing_is_read_or_written_outside_the_tensors() -> None:
    """Inputs are views into storage full of NaN: one stray read would show."""
    views = []
    for x in inputs(65, 32):
        storage = torch.full((3, 4, 70, 48), math.nan, dtype=x.dtype, device=DEVICE)
        view = storage[1:2, 1:3, 2:67, 8:40]
        view.copy_(x)
        views.append(view)
    for name in ("flash_bf16", "flash_exact_rowsum_one_pass", "flash_delta_split", "flash_per_block"):
        for quantity, value in run("kernels", views, VARIANTS[name]).items():
            assert value.isfinite().all(), quantity
            assert torch.equal(value, computed(name, 65, 32)[0][quantity])


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", ["flash_fp32", "flash_per_block", "fp32", "flash_centered", "coarse", "flash_centered_grad"]
)
def test_one_launch_computes_each_head_as_if_its_variant_were_everywhere(other: str) -> None:
    mixed = dataclasses.replace(VARIANTS["flash_stochastic"], heads=(2,), elsewhere=VARIANTS[other])
    result = run("kernels", inputs(65, 32), mixed)
    of_chosen, of_other = (computed(name, 65, 32)[0] for name in ("flash_stochastic", other))
    for quantity in NAMES:
        assert torch.equal(result[quantity][:, 1], of_chosen[quantity][:, 1]), quantity
        assert torch.equal(result[quantity][:, 0], of_other[quantity][:, 0]), quantity


@pytest.mark.slow
def test_standard_attention_rounds_what_a_softmax_returns() -> None:
    """FP64 softmax of BF16 scores, its result in BF16, times V: not P̄ in BF16, divided after the product."""
    q, k, v, _ = inputs(130, 64)
    scores = (q.double() @ k.double().mT / 8).bfloat16().double()
    hidden = torch.ones(130, 130, device=DEVICE).triu(1) == 1
    p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).bfloat16().double()
    expected = (p @ v.double()).bfloat16().double().cpu()
    missed = [
        (computed(name, 130, 64)[0]["out"] != expected).double().mean() for name in ("standard", "flash_delta_pdp")
    ]
    assert missed[0] < 0.01
    assert missed[1] > 0.2


def test_what_the_kernels_lack_is_left_to_the_reference() -> None:
    assert not launch.kernels_support(torch.float32, 32, VARIANTS["flash_bf16"])
    assert not launch.kernels_support(torch.bfloat16, 24, VARIANTS["flash_bf16"])
    assert not launch.kernels_support(torch.bfloat16, 32, AttentionVariant(block_k=100))


@pytest.mark.parametrize("chip", [None, "sm_80"])
def test_tile_sizes_suit_both_backward_kernels_and_travel_as_plain_values(chip: str | None) -> None:
    for size in tile_sizes.FALLBACK:
        tiles = tile_sizes.tiles_of(chip, size)
        assert tiles.grad_q.bq % tiles.grad_kv.bq == 0  # L and δ are written in whole blocks of the former
        assert tiles.grad_q.bq % tiles.grad_q.bk == 0  # no block of keys before the diagonal reaches beyond it
        plain = tile_sizes.tile_sizes_of(chip, size)
        assert json.loads(json.dumps(plain)) == plain
        assert plain["grad_kv"]["bk"] == tiles.grad_kv.bk
    assert tile_sizes.tile_sizes_of(chip, 24) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "length", "size"), [("flash_centered", 65, 32), ("released_fixed", 130, 64), ("small_blocks", 40, 128)]
)
def test_the_tiles_of_chips_that_were_not_tuned_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str, length: int, size: int
) -> None:
    monkeypatch.setattr(tile_sizes, "TABLES", {})
    tensors = inputs(length, size)
    assert_alike(*kernels_and_reference(tensors, VARIANTS[name]), exact_attention(*(x.cpu() for x in tensors)))  # type: ignore[arg-type]
