"""Pairs of queries and keys that masks, windows, documents and functions close, and what is added to their scores.

Shapes: B sequences of which the first N are kept, H heads, T_q queries, T_k keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashpoint.diagnosis.form import CLOSED
from flashpoint.watching.functions import SeenCall
from flashpoint.watching.left_out import LeftOut

_LARGEST = 2**28
"""Bytes of a form's largest tensor: a mask of 16 sequences of 4,096 tokens."""


@dataclass(frozen=True)
class Pairs:
    """What is done to scores, pair by pair.

    Attributes:
        seen: [N, H, T_q, T_k] bool, each but the last may be 1; None is all.
        bias: is added, of such a shape; None is nothing.
        is_causal: whether what lies above the diagonal is closed beside that.
    """

    seen: Tensor | None = None
    bias: Tensor | None = None
    is_causal: bool = False

    def __and__(self, other: Pairs) -> Pairs:
        seen = other.seen if self.seen is None else self.seen if other.seen is None else self.seen & other.seen
        bias = other.bias if self.bias is None else self.bias
        if self.bias is not None and other.bias is not None:
            # Not in 16 bits: the attention may add one after the other.
            exact = torch.promote_types(torch.promote_types(self.bias.dtype, other.bias.dtype), torch.float32)
            bias = self.bias.to(exact) + other.bias.to(exact)
        return Pairs(seen, bias, self.is_causal or other.is_causal)


ALL, LOWER = Pairs(), Pairs(is_causal=True)


def check_size(name: str, shape: Sequence[int], item: int) -> None:
    """Refuse a tensor of a form that is too large, of so many bytes an item.

    Raises:
        LeftOut: it is.
    """
    if (size := math.prod(shape) * item) > _LARGEST:
        told = f"{list(shape)} is {size // 2**20:,} MiB, where at most {_LARGEST // 2**20} are held"
        raise LeftOut(f"{name} {told}; train on shorter sequences, or give a smaller sequences=")


def joined(each: Sequence[Pairs]) -> Pairs:
    """Return what some pairs do one after the other."""
    found = ALL
    for one in each:
        found &= one
    return found


def masked(mask: Tensor, shape: Sequence[int]) -> Pairs:
    """Return what a mask does that PyTorch's attention takes, of a shape that can be expanded to this one.

    It is bool, True where a query sees a key, or floating point, which is added to the scores.
    """
    few, seen, bias = _fitted(mask, shape), None, None
    if few.dtype == torch.bool:
        seen = few
    elif not few.is_floating_point():
        seen = few != 0
    else:
        closed = few <= CLOSED
        seen = ~closed
        bias = few.masked_fill(closed, 0.0)
        bias = bias if bool((bias != 0).any()) else None
    return Pairs(None if bool(seen.all()) else seen, bias)


def _fitted(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a mask of the kept sequences in four dimensions, of which those are 1 along which it does not change."""
    few = mask.detach()[(None,) * (4 - mask.dim())][..., : shape[3]]
    few = few[: shape[0]]
    if few.dim() != 4 or any(have not in (1, want) for have, want in zip(few.shape, shape, strict=True)):
        raise LeftOut(f"a mask {list(mask.shape)}, where [B, H, T_q, T_k] is {list(shape)}")
    for at in (0, 1):
        first = few.narrow(at, 0, 1)
        if few.shape[at] > 1 and (few.stride(at) == 0 or bool((few == first).all())):
            few = first
    return few.expand(-1, -1, -1, shape[3])


def least(seen: Tensor, shape: Sequence[int]) -> tuple[bool, Tensor | None]:
    """Return whether a mask closes all that a causal one does, and a copy of it unless that or nothing is all."""
    if bool(seen.all()):
        return False, None
    if seen.shape[2:] == tuple(shape[2:]):
        lower = torch.ones(shape[2:], dtype=torch.bool, device=seen.device).tril()
        if not bool((seen & ~lower).any()):
            return True, None if bool((seen == lower).all()) else seen.clone(memory_format=torch.contiguous_format)
    return False, seen.clone(memory_format=torch.contiguous_format)


def window(call: SeenCall, left: int | None, right: int | None) -> Pairs:
    """Return a window about the key that is as far from the last one as the query is from the last query."""
    return call.once(_windowed, left, right, *call.shape[2:], call.q.device)


def _windowed(left: int | None, right: int | None, queries: int, keys: int, device: torch.device) -> Pairs:
    ahead = _ahead(queries, keys, device)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return ALL if bool(seen.all()) else Pairs(seen[None, None])


def _ahead(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return by how many tokens a key is ahead of a query [T_q, T_k], where the last ones stand at one place."""
    return torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None] - (keys - queries)


def padded(mask: Any, call: SeenCall) -> Pairs:
    """Return a mask of padding [B, T_k] as flash-attn in Transformers has it: what is padded neither sees nor is
    seen."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != call.shape[3]:
        raise LeftOut(f"a mask that is a {type(mask).__name__} {list(getattr(mask, 'shape', ''))}")
    there = mask.detach()[: call.shape[0]] != 0
    seen = (there[:, None, -call.shape[2] :, None] & there[:, None, None]).contiguous()
    return Pairs(None if bool(seen.all()) else seen)


def packed(given: Mapping[str, Any], call: SeenCall) -> Pairs:
    """Return the pairs of one document, where a call without a mask has several of them in a row, as FlashAttention
    takes them. Then positions begin anew, or more than the beginning and the end of one are told."""
    ends, positions = given.get("cu_seq_lens_q"), given.get("position_ids")
    if isinstance(ends, Tensor) and ends.numel() > 2:
        return call.once(documents, ends, ends, *call.shape[2:])
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] == call.shape[3]:
        return call.once(_documents_by_positions, positions, call.shape[0])
    return ALL


def documents(of_queries: Tensor, of_keys: Tensor, queries: int, keys: int) -> Pairs:
    """Return the pairs of one document, by where documents end among the queries and among the keys, from 0."""
    check_size("a mask of the sequences in a row", (queries, keys), 1)
    places = ((of_queries, queries), (of_keys, keys))
    of_query, of_key = (
        torch.searchsorted(ends.detach().long(), torch.arange(tokens, device=ends.device), right=True)
        for ends, tokens in places
    )
    return Pairs((of_query[:, None] == of_key)[None, None])


def _documents_by_positions(positions: Tensor, sequences: int) -> Pairs:
    begins = positions.detach()[:sequences].diff(dim=-1) < 1
    if not bool(begins.any()):
        return ALL
    document = nn.functional.pad(begins.cumsum(-1), (1, 0))
    together, tokens = document[:, None, :, None] == document[:, None, None], document.shape[1]
    return Pairs(_fitted(together, (len(document), 1, tokens, tokens)))


def by_distance(slopes: Tensor, call: SeenCall) -> Pairs:
    """Return the bias of ALiBi: a slope of a head, [H] or [B, H], perhaps with dimensions of 1 more, times the distance
    of key and query."""
    heads, told = call.shape[1], slopes.detach().float()
    if told.numel() not in (heads, call.batch * heads):
        raise LeftOut(f"alibi_slopes {list(slopes.shape)}, where [H] is {[heads]} and [B, H] {[call.batch, heads]}")
    each = told.reshape(-1, heads, 1, 1)[: call.shape[0]]
    return Pairs(bias=-each * _ahead(*call.shape[2:], call.q.device).abs())


# Functions of flex_attention.


def of_block_mask(mask: Any, call: SeenCall) -> Pairs:
    """Return the pairs that a block mask of flex_attention closes."""
    from torch.nn.attention.flex_attention import create_mask

    sequences, heads = (1 if size == 1 else want for size, want in zip(mask.shape[:2], call.shape[:2], strict=True))
    seen = call.once(create_mask, mask.mask_mod, sequences, heads, *call.shape[2:], call.q.device.type)
    return call.once(masked, seen, call.shape)


def of_score_mod(score_mod: Callable[..., Tensor], call: SeenCall) -> tuple[float, Pairs]:
    """Return the soft cap of a function of scores and places, 0 without one, and what it adds, which is taken to be the
    same in all sequences.

    Raises:
        LeftOut: it does something else.
    """
    shape = (1, *call.shape[1:])
    check_size("the bias by score_mod", shape, 8)
    of_pairs = score_mod
    for place in (4, 3, 2, 1):
        of_pairs = torch.vmap(of_pairs, (0, *(0 if axis == place else None for axis in range(1, 5))))
    places = [torch.arange(size, device=call.q.device) for size in shape]

    def moved(by: float) -> Tensor:
        return of_pairs(torch.full(shape, by, dtype=torch.float64, device=call.q.device), *places)

    bias = moved(0.0)
    most = (moved(1e9) - bias).nan_to_num(0.0).amax()  # what is closed stays at −∞
    cap = 0.0 if most > 1e8 else float(most)
    for by in (1.0, -40.0):
        to = bias + (cap * math.tanh(by / cap) if cap else by)
        if not bool(torch.isclose(moved(by), to, atol=1e-4).all()):
            raise LeftOut("score_mod, which does more than cap the scores and add a bias")
    return cap, masked(bias, shape)
