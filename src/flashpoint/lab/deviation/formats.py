"""Binary floating-point formats, emulated in FP64: rounding to nearest even, and the ulp.

A number of a format is held as the FP64 number of the same value. FP8 is that of the OCP (OFP8, revision 1.0). E4M3 has
no infinity: what exceeds 448 after rounding becomes NaN, the OCP's non-saturating mode, as ml_dtypes does.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.errors import UserError

_FP64_EXPONENT = 0x7FF0000000000000
_FP64_LARGEST_BINADE = 1023


@dataclass(frozen=True)
class Format:
    """A format with a sign, ``exponent`` bits with IEEE 754's bias, and ``mantissa`` explicit bits."""

    name: str
    mantissa: int
    """1 to 52."""
    exponent: int
    """2 to 11."""
    has_infinity: bool = True
    """False is E4M3: the largest exponent has numbers, only the last of them is NaN, and overflow is NaN."""

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with the full mantissa."""
        return math.ldexp(1.0, 2 - (1 << self.exponent - 1))

    @property
    def largest(self) -> float:
        """The largest finite number."""
        top = (1 << self.exponent - 1) - 1
        if self.has_infinity:
            return math.ldexp(2 - math.ldexp(1.0, -self.mantissa), top)
        return math.ldexp(2 - math.ldexp(1.0, 1 - self.mantissa), top + 1)

    @property
    def is_fp64(self) -> bool:
        """Whether every FP64 number is one of this format."""
        return (self.mantissa, self.exponent) == (52, 11)

    @property
    def _largest_binade(self) -> int:
        """Exponent of the largest finite number."""
        return math.frexp(self.largest)[1] - 1

    def ulp(self, x: Tensor) -> Tensor:
        """Return the distance of neighbouring numbers at ``x``: float64 to float64 of any shape. Subnormals share one
        ulp."""
        return self._ulp(x, torch.empty_like(x))

    def _ulp(self, x: Tensor, out: Tensor) -> Tensor:
        torch.bitwise_and(x.view(torch.int64), _FP64_EXPONENT, out=out.view(torch.int64))  # 2^⌊log2 |x|⌋
        out.clamp_(self.smallest_normal, math.ldexp(1.0, self._largest_binade))
        return out.mul_(math.ldexp(1.0, -self.mantissa))

    def round(self, x: Tensor) -> Tensor:
        """Round float64 of any shape to nearest, ties to even. Subnormals are kept; overflow is ∞, of E4M3 NaN."""
        return x if self.is_fp64 else self.round_(x.clone(memory_format=torch.contiguous_format))

    def round_(self, x: Tensor, scratch: Tensor | None = None) -> Tensor:
        """Round a contiguous tensor in place, and return it.

        Args:
            scratch: as ``x``; it is overwritten. None takes new memory.
        """
        if self.is_fp64:
            return x
        if (self.mantissa, self.exponent) == (23, 8):
            return x.copy_(x.to(torch.float32))
        ulp = self._ulp(x, torch.empty_like(x) if scratch is None else scratch)
        # Dividing by a power of two is exact, and so is the integer, which has at most 53 bits.
        x.div_(ulp).round_()
        if not self.has_infinity:
            x.mul_(ulp)
            return x.masked_fill_(x.abs() > self.largest, math.nan)
        # Times 2^room, what is beyond the largest number is beyond FP64's, too, and so ∞.
        room = _FP64_LARGEST_BINADE - self._largest_binade
        return x.mul_(ulp.mul_(math.ldexp(1.0, room))).mul_(math.ldexp(1.0, -room))


FP64, FP32, TF32 = Format("fp64", 52, 11), Format("fp32", 23, 8), Format("tf32", 10, 8)
FP16, BF16 = Format("fp16", 10, 5), Format("bf16", 7, 8)
E4M3, E5M2 = Format("e4m3", 3, 4, has_infinity=False), Format("e5m2", 2, 5)
FORMATS = {one.name: one for one in (FP64, FP32, TF32, FP16, BF16, E4M3, E5M2)}


def format_named(name: str) -> Format:
    """Return a format of :data:`FORMATS`; ``mN`` has N mantissa bits, 1 to 52, and the 8 exponent bits of FP32.

    Raises:
        UserError: the name is neither.
    """
    if name in FORMATS:
        return FORMATS[name]
    bits = re.fullmatch(r"m(\d{1,2})", name)
    if bits and 1 <= int(bits[1]) <= 52:
        return Format(name, int(bits[1]), 8)
    raise UserError(f"{name}: no such format; give one of {', '.join(FORMATS)}, or m1 to m52 for so many mantissa bits")
