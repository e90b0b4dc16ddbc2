"""The operations of an attention in a chosen precision, every result rounded.

Numbers are FP64 tensors that hold values of a format (:mod:`flashpoint.lab.deviation.formats`). Three formats matter:

- the precision, of operands and of results: S, differences, exponentials, P, O, dP, dS, dQ, dK, dV, rescaling factors;
- that of sums within one operation: a matrix product adds one term at a time, in the order of the index;
- that of what lasts over an attention's blocks or rows: m, ℓ, L, δ, Ō, and dQ, dK and dV between blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.errors import UserError
from flashpoint.lab.deviation.formats import FP32, FP64, Format, format_named

_EXACT_IN_FP32 = 11
"""The product of two numbers with so many mantissa bits is an FP32 number."""


@dataclass(frozen=True)
class Arithmetic:
    """Three formats, and the operations in them. A product is exact before it is added: a fused multiply-add."""

    precision: Format
    sums: Format
    """Of sums within one operation."""
    lasting: Format
    """Of m, ℓ, L, δ, Ō, and of gradients between blocks."""

    def round(self, x: Tensor) -> Tensor:
        """Round the result of an operation to the precision."""
        return self.precision.round(x)

    def keep(self, x: Tensor) -> Tensor:
        """Round what lasts over blocks or rows."""
        return self.lasting.round(x)

    def exp(self, x: Tensor) -> Tensor:
        """Return exp(x) of a difference x, each rounded to the precision; in the default, P̄ or a rescaling factor."""
        return self.round(self.round(x).exp())

    def sum_of_products(self, a: Tensor, b: Tensor) -> Tensor:
        """Return A·B [..., R, C] of A [..., R, K] and B [..., K, C], in the format of sums."""
        if self.sums.is_fp64:
            return a @ b
        in_fp32 = self.sums == FP32 and self.precision.mantissa <= _EXACT_IN_FP32
        if in_fp32:
            a, b = a.float(), b.float()
        total = a.new_zeros((*a.shape[:-1], b.shape[-1]))
        scratch = torch.empty_like(total)
        for k in range(a.shape[-1]):
            total.addcmul_(a[..., k : k + 1], b[..., k : k + 1, :])
            if not in_fp32:
                self.sums.round_(total, scratch)
        return total.double()

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return A·B as an operation whose result is rounded to the precision."""
        return self.round(self.sum_of_products(a, b))

    def row_sum(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        """Return the sum over the last dimension of A∘B [..., R, K], or of A, as something that lasts: [..., R]."""
        b = torch.ones_like(a[..., :1, :]) if b is None else b
        return self.keep(self.sum_of_products(a[..., None, :], b[..., :, None])[..., 0, 0])


EXACT = Arithmetic(FP64, FP64, FP64)
"""Every operation in FP64, with PyTorch's own matrix products: that of the golden value."""


def arithmetic(precision: Format, accumulate: str) -> Arithmetic:
    """Return the arithmetic of a precision.

    Args:
        accumulate: a format for sums and for what lasts, as on GPUs with ``fp32``; the precision where that is finer.
            ``same`` is the precision. ``within`` is FP32 within an operation, and the precision for what lasts: what
            PyTorch's own operations do with tensors of the precision.

    Raises:
        UserError: ``accumulate`` is none of these.
    """
    if accumulate == "same":
        return Arithmetic(precision, precision, precision)
    try:
        sums = FP32 if accumulate == "within" else format_named(accumulate)
    except UserError as error:
        raise UserError(f"--accumulate {error}, same, or within") from error
    sums = max(precision, sums, key=lambda one: (one.mantissa, one.exponent))
    return Arithmetic(precision, sums, precision if accumulate == "within" else sums)
