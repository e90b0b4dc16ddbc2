"""Layers and heads: who takes the variant and who does not; and what a variant refuses."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from flashpoint.numerics.choices import NEAREST, STOCHASTIC, UNROUNDED, DeltaError, Rounding
from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.variant import AttentionVariant, variant_from_key
from tests.conftest import REPOSITORY

CHOSEN = AttentionVariant(name="stochastic", scores=NEAREST, out_unnormalized=STOCHASTIC)
PLAIN = AttentionVariant(name="plain")
FILES = sorted((REPOSITORY / "configs/attn").glob("*.yaml"))


def inputs(length: int = 70) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, length, 16, generator=generator).bfloat16() for _ in range(3)]


def out_and_grads(variant: AttentionVariant, layer: int, length: int = 70) -> list[Tensor]:
    q, k, v = (x.requires_grad_() for x in inputs(length))
    out = attention(q, k, v, variant, layer=layer, seed_and_step=torch.tensor([1, 2]))
    out.float().square().sum().backward()
    return [x for x in (out.detach(), q.grad, k.grad, v.grad) if x is not None]


def selecting(**selection: Any) -> AttentionVariant:
    return dataclasses.replace(CHOSEN, elsewhere=PLAIN, **selection)


@pytest.mark.parametrize("length", [70, 2])  # as many tokens as chosen heads
@pytest.mark.parametrize(
    ("selection", "layer", "selected"),
    [
        ({"layers": (2,)}, 2, {0, 1, 2, 3}),
        ({"layers": (2,)}, 1, set()),
        ({"heads": (1, 4)}, 5, {0, 3}),
        ({"layers": (2, 3), "heads": (3,)}, 3, {2}),
        ({"layers": (2, 3), "heads": (3,)}, 1, set()),
        ({"heads": (4, 2, 1, 3)}, 1, {0, 1, 2, 3}),
    ],
)
def test_each_head_computes_as_if_its_variant_were_everywhere(
    selection: dict[str, tuple[int, ...]], layer: int, selected: set[int], length: int
) -> None:
    mixed = out_and_grads(selecting(**selection), layer, length)
    chosen, others = out_and_grads(CHOSEN, layer, length), out_and_grads(PLAIN, layer, length)
    assert not torch.equal(chosen[0], others[0])
    for result, by_choice, by_other in zip(mixed, chosen, others, strict=True):
        for head in range(4):
            assert torch.equal(result[:, head], (by_choice if head in selected else by_other)[:, head])


def test_one_head_in_fp32_makes_the_output_fp32() -> None:
    variant = AttentionVariant(out=UNROUNDED, heads=(2,), elsewhere=PLAIN)
    q, k, v = inputs()
    out = attention(q, k, v, variant, layer=1, seed_and_step=torch.zeros(2, dtype=torch.int64))
    assert out.dtype == torch.float32
    assert torch.equal(out[:, 0], out[:, 0].bfloat16().float())
    assert not torch.equal(out[:, 1], out[:, 1].bfloat16().float())


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"out": Rounding("nearest", 3)}, torch.bfloat16),
        ({"out": Rounding("nearest", 8)}, torch.float32),
        ({"out": Rounding("nearest", 8), "heads": (2,), "elsewhere": PLAIN}, torch.float32),
    ],
)
def test_more_than_bf16s_bits_make_the_output_fp32(fields: dict, dtype: torch.dtype) -> None:
    q, k, v = inputs()
    out = attention(q, k, v, AttentionVariant(**fields), layer=1, seed_and_step=torch.zeros(2, dtype=torch.int64))
    assert out.dtype == dtype
    lower = out.float().view(torch.int32)[:, 1]
    kept = fields.get("out", NEAREST).bits
    assert not (lower & ((1 << 23 - kept) - 1)).any()
    assert (lower & ((1 << 24 - kept) - 1)).any()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_variant_file_builds_under_its_own_name_and_travels_as_a_key(path) -> None:
    variant = AttentionVariant.from_dict(yaml.safe_load(path.read_text()))
    assert variant.name == path.stem
    assert variant_from_key(variant.key) == variant


def test_no_two_variant_files_make_the_same_choices() -> None:
    choices = [AttentionVariant.from_dict(yaml.safe_load(path.read_text())).to_dict() for path in FILES]
    unnamed = [tuple(sorted({**choice, "name": ""}.items(), key=str)) for choice in choices]
    assert len(set(map(str, unnamed))) == len(FILES)


def test_a_selection_travels_whole() -> None:
    variant = selecting(layers=(2,), heads=(1, 3), delta_error=DeltaError(kind="noise", size=0.1, layers=(2,)))
    assert variant_from_key(variant.key) == variant
    assert AttentionVariant.from_dict(variant.to_dict()) == variant


BOUNDED = ("beta", "gamma", "tie_tolerance", "max_shift", "shift_offset", "denominator_floor")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kernel": "cudnn"}, "attn.kernel=cudnn"),
        ({"delta": "none"}, "attn.delta=none"),
        ({"block_k": 0}, "attn.block_k=0"),
        ({"beta": 0.5}, "attn.beta=0.5"),
        ({"gamma": 1.0}, "attn.gamma=1.0"),
        ({"gamma": 0.5, "masked_blocks": "count"}, "attn.gamma: a counted"),
        ({"tie_tolerance": -1.0}, "attn.tie_tolerance=-1.0"),
        *(({name: value}, f"attn.{name}={value}") for name in BOUNDED for value in (math.nan, math.inf)),
        ({"max_shift": -1.0}, "attn.max_shift=-1.0"),
        ({"denominator_floor": 1.0}, "attn.denominator_floor=1.0"),
        ({"shift_offset": 100.0}, "attn.shift_offset=100.0"),
        ({"normalizer": "before_product"}, "attn.normalizer=before_product"),
        ({"delta": "out_independent", "out_unnormalized": NEAREST}, "attn.delta=out_independent"),
        ({"kernel": "sdpa", "beta": 2.0}, "attn.beta=2.0: kernel=sdpa does not read it; set it to 7.0"),
        (
            {"kernel": "flex", "center_keys": True},
            "attn.center_keys=true: kernel=flex does not read it; set it to false",
        ),
        ({"kernel": "fa4", "block_k": None}, "attn.block_k=null: kernel=fa4"),
        (
            {"kernel": "sdpa_cudnn", "out_unnormalized": Rounding("nearest")},
            "attn.out_unnormalized.mode=nearest: kernel=sdpa_cudnn does not read it; set it to none",
        ),
        ({"kernel": "sdpa", "delta_error": DeltaError(kind="bias", size=1e-3)}, "attn.delta_error: kernel=sdpa"),
        (
            {"layers": (2,), "elsewhere": PLAIN, "delta_error": DeltaError(kind="bias", size=1e-3, layers=(1,))},
            "attn.delta_error.layers=[1]",
        ),
        (
            {"center_keys": True, "delta_error": DeltaError(kind="bias", size=1e-3, into="grad_k")},
            "attn.delta_error.into",
        ),
        ({"center_keys": True, "center_grad_q": True}, "attn.center_grad_q=true"),
        ({"layers": (2,)}, "attn.elsewhere"),
        ({"elsewhere": PLAIN}, "attn.elsewhere"),
        ({"layers": (), "elsewhere": PLAIN}, "attn.layers="),
        ({"layers": (0,), "elsewhere": PLAIN}, "attn.layers="),
        ({"heads": (1, 1), "elsewhere": PLAIN}, "attn.heads="),
        ({"heads": ((1,), (2,)), "elsewhere": PLAIN}, "for each of attn.layers"),
        ({"layers": (1, 2), "heads": ((1,),), "elsewhere": PLAIN}, "for each of attn.layers"),
        ({"layers": (1, 2), "heads": (1, (2,)), "elsewhere": PLAIN}, "for each of attn.layers"),
        ({"layers": (1, 2), "heads": ((1,), ()), "elsewhere": PLAIN}, "attn.heads="),
        ({"layers": (1,), "elsewhere": selecting(layers=(2,))}, "attn.elsewhere=stochastic"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_by_name(fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match="attn") as caught:
        AttentionVariant(**fields)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
