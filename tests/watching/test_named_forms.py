"""Functions that are named: what they are told of masks, biases, caps, sinks and dropout is recorded as a form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flashpoint.diagnosis.verdict import diagnose
from tests.watching.forms import (
    BATCH,
    HEADS,
    LENGTH,
    LOWER,
    PADDED,
    SIZE,
    SOME,
    Model,
    assert_exact,
    call_of,
    captured,
)
from tests.watching.loops import loop


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
    visible: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Stands in for flash-attn's function, and has two masks more; [B, T, H, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    queries, keys = scores.shape[-2:]
    ahead = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.reshape(-1, len(alibi_slopes.flatten()), 1, 1) * ahead.abs()
    left, right = (side if side >= 0 else keys for side in window_size)
    scores = scores.masked_fill((ahead < -left) | (ahead > (0 if causal else right)), -torch.inf)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
    sinks = scores[..., :0] if s_aux is None else s_aux[:, None, None].expand_as(scores[..., :1])
    weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :keys]
    return (F.dropout(weights, dropout_p) @ v).transpose(1, 2)


def flash_with(*positional: Any, others: int | None = None, **options: Any) -> nn.Module:
    return Model(
        lambda *qkv: flash(*(x.transpose(1, 2) for x in qkv), *positional, **options).transpose(1, 2), others=others
    )


NAMED: dict[str, Callable[[], nn.Module]] = {
    "nothing": lambda: flash_with(causal=True),
    "a window": lambda: flash_with(0.0, None, True, (3, 0)),
    "a window of both sides": lambda: flash_with(window_size=(2, 1)),
    "a cap": lambda: flash_with(0.0, 0.5, True, (-1, -1), 3.0),
    "slopes": lambda: flash_with(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0]), causal=True),
    "slopes with dimensions of 1": lambda: flash_with(alibi_slopes=torch.rand(1, 4, 1, 1), causal=True),
    "a sink": lambda: flash_with(s_aux=torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64), causal=True),
    "dropout": lambda: flash_with(0.25, causal=True),
    "two lengths, causal": lambda: flash_with(causal=True, others=19),
    "two lengths, a window": lambda: flash_with(causal=True, window_size=(4, -1), others=19),
    "a mask of another name": lambda: flash_with(visible=PADDED & LOWER),
    "a mask that hides": lambda: flash_with(key_padding_mask=~SOME, causal=True),
    "all at once": lambda: flash_with(
        0.25, 0.5, True, (4, -1), 5.0, torch.tensor([0.5, 0.25, 0.1, 0.0]), torch.ones(4), PADDED, others=12
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_what_a_named_function_is_told_is_recorded(tmp_path: Path, name: str) -> None:
    call = call_of(tmp_path, NAMED[name](), functions=[f"{__name__}:flash@bthd"])
    assert call.form.is_plain is (name in ("nothing", "a sink"))
    assert_exact(call)
    assert diagnose(call).findings == ()


def causal_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As a function of a package's own that calls flash-attn's with keys of a segment before."""
    return flash(q, k, v, causal=True)


def full_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "others"),
    [(causal_inside, 19), (causal_inside, 40), (full_inside, 1), (full_inside, 19), (full_inside, 40)],
)
def test_of_two_lengths_o_shows_which_mask_is_inside(
    tmp_path: Path, inside: Callable[..., Tensor], others: int
) -> None:
    name = inside.__name__
    model = Model(lambda *qkv: globals()[name](*(x.transpose(1, 2) for x in qkv)).transpose(1, 2), others=others)
    call = call_of(tmp_path, model, functions=[f"{__name__}:{name}@bthd"])
    assert (call.form.mask is not None) is (inside is causal_inside)
    assert_exact(call)
    assert diagnose(call).findings == ()


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
) -> Tensor:
    """Stands in for flash-attn's function of sequences in a row, [T, H, d]: each by itself goes to PyTorch's."""
    assert max_seqlen_q == max_seqlen_k
    sizes = cu_seqlens_q.diff().tolist()
    each = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)), strict=True)
    parts = [F.scaled_dot_product_attention(*(x[None] for x in one), is_causal=causal)[0] for one in each]
    return torch.cat(parts, 1).transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_in_a_row_are_recorded_as_one_with_a_mask(tmp_path: Path, causal: bool) -> None:
    """A gradient between two of them would be told of the mask."""
    ends = torch.tensor([0, 5, 19, 36], dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        out = flash_varlen(
            *packed, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=17, max_seqlen_k=17, causal=causal
        )
        return out.unflatten(0, (BATCH, LENGTH)).transpose(1, 2)

    call = call_of(tmp_path, Model(attend), functions=[f"{__name__}:flash_varlen@bthd"])
    assert call.q.shape == (1, HEADS, BATCH * LENGTH, SIZE)
    assert call.form.is_causal is causal
    of = torch.searchsorted(ends, torch.arange(36), right=True)
    seen = (of[:, None] == of) & (torch.ones(36, 36).tril().bool() if causal else True)
    found = call.form.mask & torch.ones(36, 36).tril().bool() if causal else call.form.mask
    assert torch.equal(found[0, 0], seen)
    assert_exact(call)
    assert diagnose(call).findings == ()


def test_slopes_that_are_not_of_the_heads_are_refused_by_their_shape(tmp_path: Path) -> None:
    model = flash_with(alibi_slopes=torch.tensor([0.5]), causal=True)
    run = loop(tmp_path, model, captured, steps=1, functions=[f"{__name__}:flash@bthd"])
    (reason,) = run.manifest.not_recorded
    assert "alibi_slopes [1], where [H] is [4]" in reason


def flexible(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: BlockMask | None = None
) -> Tensor:
    """Stands in for PyTorch's flex_attention, which has no backward pass on a CPU."""
    scores = query @ key.mT * SIZE**-0.5
    at = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *at)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(*at), -torch.inf)
    return scores.softmax(-1) @ value


def in_documents(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & ((i < 5 + b) == (j < 5 + b))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"block_mask": create_block_mask(in_documents, BATCH, None, LENGTH, LENGTH, "cpu")}, {"mask": BATCH}),
        ({"score_mod": lambda s, _b, h, i, j: torch.where(i >= j, s - (i - j) / (2 + h), -torch.inf)}, {"bias": 1}),
        ({"score_mod": lambda s, _b, _h, i, j: torch.where(i >= j, 3 * torch.tanh(s / 3), -torch.inf)}, {}),
    ],
    ids=["block mask", "bias", "cap"],
)
def test_functions_of_flex_attention_are_evaluated(
    tmp_path: Path, options: dict[str, Any], shapes: dict[str, int]
) -> None:
    model = Model(lambda q, k, v: flexible(q, k, v, **options))
    call = call_of(tmp_path, model, functions=[f"{__name__}:flexible"])
    assert call.form.is_causal
    assert {name: len(x) for name, x in call.form.tensors.items()} == shapes
    assert_exact(call)
