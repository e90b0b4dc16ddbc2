"""Rounding FP32 values to fewer mantissa bits: to nearest even, or stochastically with counter-based random bits.

The exponent keeps its 8 bits, so 7 bits of mantissa are BF16 and 10 are TF32. A rounded value stays in FP32, so that
whatever follows is computed in FP32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flashpoint.attention.variant import BF16_BITS, Rounding

_FP32_BITS = 23
Stream = Literal[
    "scores",
    "probs",
    "out_unnormalized",
    "out",
    "grad_scores",
    "probs_backward",
    "out_unnormalized_for_delta",
    "out_for_delta",
    "delta_error",
    "targets",
]
_STREAM: dict[Stream, int] = {
    "scores": 0,
    "probs": 1,
    "out_unnormalized": 2,
    "out": 3,
    "grad_scores": 4,
    "probs_backward": 5,
    "out_unnormalized_for_delta": 6,
    "out_for_delta": 7,
    "delta_error": 8,
    "targets": 9,
}
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class NoiseKey:
    """Where a head's random bits come from: the same key gives the same bits on every launch.

    Attributes:
        seed_and_step: [2] int64: the run's seed and the count of forward passes so far.
        layer: layer, from 1; 0 is none of them.
        heads: [H] int64: numbers, from 0, of the heads at hand among the layer's.
        n_head: heads of the whole layer.
        n_sequences: B.
    """

    seed_and_step: Tensor
    layer: int
    heads: Tensor
    n_head: int
    n_sequences: int

    def words(self, stream: Stream, rows: Tensor, columns: Tensor, block: int = 0) -> Tensor:
        """Uniform 32-bit words.

        Args:
            stream: what they are for; each is independent of the others.
            rows: [R, 1] int64, positions of the queries.
            columns: [1, C] int64, positions of the keys, or features.
            block: number of the key block, for a value that is rounded once per block.

        Returns:
            [B, H, R, C] int64 in [0, 2³²).
        """
        last = torch.full_like(rows, self.layer | _STREAM[stream] << 12 | block << 16)
        sequences = torch.arange(self.n_sequences, device=rows.device)[:, None, None, None]
        head_numbers = sequences * self.n_head + self.heads[:, None, None]  # [B, H, 1, 1]
        counter = torch.broadcast_tensors(rows, columns, head_numbers, last)
        seed, step = self.seed_and_step.unbind()
        return philox4x32(counter, (seed & _WORD, step & _WORD))[0]


def round_mantissa(x: Tensor, rounding: Rounding, bits: int = BF16_BITS, noise: Tensor | None = None) -> Tensor:
    """Round FP32 to values with ``bits`` explicit mantissa bits and FP32's exponents, kept in FP32.

    Args:
        x: any shape, float32.
        rounding: ``none`` returns ``x``; ``nearest`` is IEEE 754 round-half-to-even; ``stochastic`` moves
            away from zero with a probability equal to the discarded share of an ulp.
        bits: 1 to 10; 7 gives BF16 values.
        noise: for ``stochastic``, uniform 32-bit words, int64, of the shape of ``x``. As many of their upper bits
            are added below the last kept bit as are discarded.

    Infinities and NaN stay what they are.
    """
    if rounding == "none":
        return x
    if rounding == "nearest" and bits == BF16_BITS:
        return x.to(torch.bfloat16).to(torch.float32)
    discarded = _FP32_BITS - bits
    pattern = x.contiguous().view(torch.int32)
    if rounding == "nearest":
        # Just under half an ulp, and the rest of it where the last kept bit is odd.
        offset = (1 << discarded - 1) - 1 + (pattern >> discarded & 1)
    else:
        assert noise is not None, "stochastic rounding needs random bits"
        offset = (noise >> 32 - discarded).to(torch.int32)
    rounded = (pattern + offset) & -(1 << discarded)
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


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
