"""Rounding FP32 values to BF16: to nearest even, or stochastically with counter-based random bits.

A rounded value stays in FP32 and holds a BF16 number, so that whatever follows is computed in FP32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flashpoint.attention.variant import Rounding

RoundingPoint = Literal["scores", "probs", "out_unnormalized", "out", "grad_scores", "probs_backward"]
_STREAM: dict[RoundingPoint, int] = {
    "scores": 0,
    "probs": 1,
    "out_unnormalized": 2,
    "out": 3,
    "grad_scores": 4,
    "probs_backward": 5,
}
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class NoiseKey:
    """Where a head's random bits come from: the same key gives the same bits on every launch.

    Attributes:
        seed_and_step: [2] int64: the run's seed and the count of forward passes so far.
        layer: layer, from 1.
        heads: [H] int64: numbers, from 0, of the heads at hand among the layer's.
        n_head: heads of the whole layer.
        n_sequences: B.
    """

    seed_and_step: Tensor
    layer: int
    heads: Tensor
    n_head: int
    n_sequences: int

    def bits(self, point: RoundingPoint, rows: Tensor, columns: Tensor, block: int = 0) -> Tensor:
        """Uniform 16-bit integers.

        Args:
            point: the rounding point, each a stream of its own.
            rows: [R, 1] int64, positions of the queries.
            columns: [1, C] int64, positions of the keys, or features.
            block: number of the key block, for a value that is rounded once per block.

        Returns:
            [B, H, R, C] int64 in [0, 2¹⁶).
        """
        stream = torch.full_like(rows, self.layer | _STREAM[point] << 12 | block << 16)
        sequences = torch.arange(self.n_sequences, device=rows.device)[:, None, None, None]
        head_numbers = sequences * self.n_head + self.heads[:, None, None]  # [B, H, 1, 1]
        counter = torch.broadcast_tensors(rows, columns, head_numbers, stream)
        seed, step = self.seed_and_step.unbind()
        return philox4x32(counter, (seed & _WORD, step & _WORD))[0] >> 16


def round_bf16(x: Tensor, rounding: Rounding, bits: Tensor | None = None) -> Tensor:
    """Round FP32 to BF16 values, kept in FP32.

    Args:
        x: any shape, float32.
        rounding: ``none`` returns ``x``; ``nearest`` is IEEE 754 round-half-to-even; ``stochastic`` moves
            away from zero with a probability equal to the discarded share of a BF16 ulp.
        bits: for ``stochastic``, int64 in [0, 2¹⁶) of the shape of ``x``.

    Infinities and NaN stay what they are.
    """
    if rounding == "none":
        return x
    if rounding == "nearest":
        return x.to(torch.bfloat16).to(torch.float32)
    assert bits is not None, "stochastic rounding needs random bits"
    pattern = x.contiguous().view(torch.int32).to(torch.int64) & _WORD
    rounded = (pattern + bits) & 0xFFFF0000
    # Above 2³¹ the pattern is that of a negative float: bring it back into int32's range.
    signed = torch.where(rounded > 0x7FFFFFFF, rounded - (1 << 32), rounded).to(torch.int32)
    return torch.where(x.isfinite(), signed.view(torch.float32), x)


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011); Triton's ``tl.philox``.

    Args:
        counter: four int64 tensors of one shape, each in [0, 2³²).
        key: two int64 scalars in [0, 2³²).

    Returns:
        Four int64 tensors in [0, 2³²).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 wraps, and the bits of a wrapped product are those of the unsigned one.
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high2 = (product0 >> 32) & _WORD, (product2 >> 32) & _WORD
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, product2 & _WORD, high0 ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
