"""The PyTorch attention by blocks of keys: positions, rounding points, scores and probabilities of both passes.

Dimensions as in :mod:`flashpoint.numerics.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.numerics.choices import Rounding
from flashpoint.numerics.rounding import NoiseKey, round_mantissa
from flashpoint.numerics.variant import AttentionVariant, RoundingPoint
from flashpoint_kernels.codes import Stream

LOG2E = math.log2(math.e)
_CHUNK_WIDTH = 128
"""A chunk of query rows has at most this many scores for each token of the sequence."""


def exponential(scores: Tensor, shift: Tensor) -> Tensor:
    """Return exp(scores − shift) in FP32: [..., C] and [..., 1] to [..., C].

    The difference comes first, so that equal maxima give exactly 1.
    """
    return (scores - shift).mul_(LOG2E).exp2_()


@dataclass(frozen=True)
class KeyBlock:
    """A block of keys, and the query rows that see part of it, as slices of T."""

    rows: slice
    keys: slice
    number: int

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of its queries [R, 1] and of its keys [1, C], int64."""
        rows = torch.arange(self.rows.start, self.rows.stop, device=device)
        keys = torch.arange(self.keys.start, self.keys.stop, device=device)
        return rows[:, None], keys[None, :]


@dataclass(frozen=True)
class Inputs:
    """q, k, v [B, H, T, d] in FP32, and what both passes share; K comes centred where the variant centres it."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float  # α
    causal: bool
    variant: AttentionVariant
    noise: NoiseKey

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        variant: AttentionVariant,
        noise: NoiseKey,
        causal: bool = True,
        scale: float | None = None,
    ) -> Inputs:
        """Return the inputs of q, k, v [B, H, T, d] in any float dtype; a ``scale`` that is None is 1/√d."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return cls(_operand(q), _operand(k), _operand(v), scale, causal, variant, noise)

    def row_chunks(self) -> Iterator[slice]:
        """Return the chunks of queries that are computed at once, each with at most 128·T scores a head and block."""
        length = self.q.shape[-2]
        block = min(self.variant.block_k or length, length)
        step = length if block <= _CHUNK_WIDTH else max(1, _CHUNK_WIDTH * length // block)
        for start in range(0, length, step):
            yield slice(start, min(start + step, length))

    def row_blocks(self) -> Iterator[slice]:
        """Return the blocks of as many queries as a block has keys."""
        length, block = self.q.shape[-2], self.variant.block_k or self.q.shape[-2]
        for start in range(0, length, block):
            yield slice(start, min(start + block, length))

    def key_blocks(self, rows: slice) -> Iterator[KeyBlock]:
        """Return the key blocks that some row attends to, each with the rows that do: the causal ones from its first
        key on."""
        length = self.q.shape[-2]
        block, end = self.variant.block_k or length, rows.stop if self.causal else length
        for number, start in enumerate(range(0, end, block)):
            live = slice(max(rows.start, start), rows.stop) if self.causal else rows
            yield KeyBlock(live, slice(start, min(start + block, end)), number)

    def round(
        self, point: RoundingPoint, x: Tensor, block: KeyBlock, *, features: bool = False, stream: Stream | None = None
    ) -> Tensor:
        """Round values [B, H, R, C], or with ``features`` a [B, H, R, d], at a rounding point.

        ``stream`` is where stochastic rounding takes its random bits from, if not from the rounding point's own.
        """
        rounding: Rounding = getattr(self.variant, point)
        if rounding.mode != "stochastic":
            return round_mantissa(x, rounding)
        rows, columns = block.positions(x.device)
        if features:
            columns = torch.arange(x.shape[-1], device=x.device)[None, :]
        stream = Stream[point.upper()] if stream is None else stream
        noise = self.noise.words(stream, rows, columns, block.number if features else 0)
        return round_mantissa(x, rounding, noise)

    def scores(self, block: KeyBlock) -> Tensor:
        """Return S [B, H, R, C], rounded, then −inf where a causal query does not see the key."""
        s = (self.q[..., block.rows, :] @ self.k[..., block.keys, :].mT).mul_(self.scale)
        s = self.round("scores", s, block)
        return _hide_later_keys(s, block) if self.causal else s

    def probs(self, block: KeyBlock, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
        """Return P = exp(S − L) [B, H, R, C] as the operand of dV, and in FP32."""
        p = exponential(self.scores(block), logsumexp[..., block.rows, None])
        return self.round("probs", p, block, stream=Stream.PROBS_BACKWARD), p

    def grad_probs(self, block: KeyBlock, grad_out: Tensor) -> Tensor:
        """Return dP = dO·Vᵀ [B, H, R, C] of dO [B, H, T, d], rounded."""
        return self.round("grad_probs", grad_out[..., block.rows, :] @ self.v[..., block.keys, :].mT, block)


def _operand(x: Tensor) -> Tensor:
    """Return x in FP32 and contiguous, in one copy: each batched product of another layout would copy it again."""
    return x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def _hide_later_keys(s: Tensor, block: KeyBlock) -> Tensor:
    """Set the scores [B, H, R, C] of keys that come after their query to −inf, in place.

    They become 0, then −inf is added, so that a NaN among them goes too: ``masked_fill_`` takes six times as long on a
    CPU.
    """
    last_seen = block.rows.start - block.keys.start
    later = torch.full(s.shape[-2:], -math.inf, device=s.device).triu_(last_seen + 1)
    return s.tril_(last_seen).add_(later)
