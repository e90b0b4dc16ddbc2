"""Rounding FP32 values to fewer mantissa bits: to nearest even, or stochastically with counter-based random bits.

The exponent keeps its 8 bits, so 7 bits of mantissa are BF16 and 10 are TF32. A rounded value stays in FP32, so that
whatever follows is computed in FP32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.numerics.choices import Rounding
from flashpoint_kernels.codes import BF16_BITS, BLOCK_UNIT, STREAM_UNIT, Stream

_FP32_BITS = 23
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class NoiseKey:
    """The source of a head's random bits: the same key gives the same bits on every launch.

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
        """Return the uniform 32-bit words.

        Args:
            stream: what they are for.
            rows: [R, 1] int64, positions of the queries.
            columns: [1, C] int64, positions of the keys, or features.
            block: number of the key block, for a value that is rounded once per block.

        Returns:
            [B, H, R, C] int64 in [0, 2³²).
        """
        last = torch.full_like(rows, self.layer | stream * STREAM_UNIT | block * BLOCK_UNIT)
        sequences = torch.arange(self.n_sequences, device=rows.device)[:, None, None, None]
        head_numbers = sequences * self.n_head + self.heads[:, None, None]  # [B, H, 1, 1]
        counter = torch.broadcast_tensors(rows, columns, head_numbers, last)
        seed, step = self.seed_and_step.unbind()
        return philox4x32(counter, (seed & _WORD, step & _WORD))[0]


def round_mantissa(x: Tensor, rounding: Rounding, noise: Tensor | None = None) -> Tensor:
    """Round FP32 to values with the explicit mantissa bits of ``rounding`` and FP32's exponents, kept in FP32.

    Args:
        x: any shape, float32.
        rounding: ``none`` returns ``x``; ``nearest`` is IEEE 754 round-half-to-even; ``stochastic`` moves
            away from zero with a probability equal to the discarded share of an ulp.
        noise: for ``stochastic``, uniform 32-bit words, int64, of the shape of ``x``. As many of their upper bits
            are added below the last kept bit as are discarded.

    Infinities and NaN stay what they are.
    """
    if rounding.mode == "none":
        return x
    if rounding.mode == "nearest" and rounding.bits == BF16_BITS:
        return x.to(torch.bfloat16).to(torch.float32)
    discarded = _FP32_BITS - rounding.bits
    pattern = x.contiguous().view(torch.int32)
    if rounding.mode == "nearest":
        # Just under half an ulp, and the rest of it where the last kept bit is odd.
        offset = (pattern >> discarded).bitwise_and_(1).add_((1 << discarded - 1) - 1)
    else:
        assert noise is not None, "stochastic rounding needs random bits"
        offset = (noise >> 32 - discarded).to(torch.int32)
    rounded = offset.add_(pattern).bitwise_and_(-(1 << discarded)).view(torch.float32)  # an infinity stays one
    return torch.where(x.isnan(), x, rounded)


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Compute Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011); Triton's ``tl.philox``.

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
