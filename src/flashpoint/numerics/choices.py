"""Choices of a variant that have parts of their own: how a value is rounded, what O lacks, an error put into δ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flashpoint.typed import check_literals
from flashpoint_kernels.codes import BF16_BITS

Mode = Literal["none", "nearest", "stochastic"]
Shift = Literal["none", "sequence", "sequence_detached", "batch_detached"]
"""Of what the vector c of a head, which a stabiliser takes from K or V, is the mean: a sequence, with its gradient or
without, or batch and tokens."""


@dataclass(frozen=True)
class Rounding:
    """How FP32 values are rounded at one rounding point.

    The format has ``bits`` explicit mantissa bits, and the 8 bits of exponent that BF16 and FP32 have: 7 is BF16, 10 is
    TF32. Each bit less doubles the ulp, 2^(⌊log2 |x|⌋ − bits).

    Raises:
        ValueError: a field has a value outside its range.
    """

    mode: Mode = "none"
    """``none`` keeps FP32; ``nearest`` is to nearest even; ``stochastic`` adds a counter-based random offset."""
    bits: int = BF16_BITS
    """1 to 10. A value with more than BF16's 7 is held and multiplied in FP32. With ``none`` they say nothing."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode={self.mode}: choose one of {', '.join(get_args(Mode))}")
        if not 1 <= self.bits <= 10:
            raise ValueError(f"bits={self.bits}: give 1 to 10 mantissa bits; {BF16_BITS} are BF16's")

    @property
    def fits_bf16(self) -> bool:
        """Whether every rounded value is a BF16 number."""
        return self.mode != "none" and self.bits <= BF16_BITS


UNROUNDED, NEAREST, STOCHASTIC = Rounding("none"), Rounding("nearest"), Rounding("stochastic")
"""Each mode, with BF16's bits."""


@dataclass(frozen=True)
class ResidualFormat:
    """What O as returned lacks of the unrounded O, as whole numbers of a unit that goes with O's exponent.

    Where O as returned has the exponent e, the unit is 2^(e − mantissa), but at least 2^-126.
    """

    mantissa: int
    """Mantissa bits of the two parts together."""
    largest: int
    """Of the whole numbers, with either sign. Only where O as returned overflows would one exceed it; the
    sum of the two parts is that O, whatever the residual."""

    @classmethod
    def of(cls, out_unnormalized: Rounding, out: Rounding, bits: int) -> ResidualFormat:
        """Return the format that refines the coarser of the roundings of Ō and O by ``bits``, and holds every residual.

        A rounding of O to nearest with c mantissa bits moves it by at most half an ulp, 2^(e − c − 1). One of Ō with b
        bits moves Ō by at most 2^(−b − 1) of it, and so Ō/ℓ, which is below 2^(e + 1), by less than 2^(e − b).
        Stochastic roundings move twice as far.
        """
        parts = [(point, reach) for point, reach in ((out, 0.5), (out_unnormalized, 1.0)) if point.mode != "none"]
        coarsest = min(point.bits for point, _ in parts)
        ulps = sum(
            reach * (2 if point.mode == "stochastic" else 1) * 2.0 ** (coarsest - point.bits) for point, reach in parts
        )
        return cls(coarsest + bits, math.ceil(ulps * 2**bits))

    @property
    def n_bytes(self) -> int:
        """Bytes an element."""
        return 1 if self.largest <= 127 else 2


def take_rounding(fields: dict[str, Any], point: str, default: Rounding) -> Rounding:
    """Take a rounding point out of stored fields. A part that the fields leave out is that of ``default``.

    A mode alone, as text, is a rounding of that mode.

    Raises:
        ValueError: naming the point and the part that has a value outside its range.
    """
    given = fields.pop(point, {})
    parts = {"mode": given} if isinstance(given, str) else dict(given)
    try:
        return dataclasses.replace(default, **parts)
    except ValueError as error:
        raise ValueError(f"attn.{point}.{error}") from None


@dataclass(frozen=True, kw_only=True)
class DeltaError:
    """An error put into δ on purpose, after δ is computed: δ_i ← δ_i + size·|dO_i|₂·|O_i|₂·z.

    Raises:
        ValueError: a field has a value outside its range, or errors are described that ``kind=none`` does not make.
    """

    kind: Literal["none", "bias", "noise"] = "none"
    """z: 1 for ``bias``; for ``noise`` a random sign, one draw a row, of zero mean and unit variance."""
    size: float = 0.0
    """Share of |dO_i|₂·|O_i|₂, the largest |δ_i| that these norms allow; O as the forward pass returned it."""
    trajectory: tuple[Any, ...] | None = None  # of tuples of float, which OmegaConf has no type for
    """Factors of ``size`` by layer, from layer 1, and within a layer by time; the last one of a layer holds on. None is
    1 in every layer and at every time. ``flashpoint delta --by time`` measures such factors."""
    interval: int = 250
    """Steps for which a factor of ``trajectory`` holds; with micro-batches, forward passes."""
    layers: tuple[int, ...] | None = None
    """Layers, from 1, whose δ takes the error; None means all."""
    into: Literal["both", "grad_q", "grad_k"] = "both"
    """Which gradient is made with the δ that has the error: dQ and dK, or one of them, the other with δ as it was."""

    def __post_init__(self) -> None:
        check_literals(self, "attn.delta_error")
        if not math.isfinite(self.size):
            raise ValueError(f"attn.delta_error.size={self.size}: give a finite number")
        described = self.size or self.layers is not None or self.into != "both" or self.trajectory is not None
        if self.kind == "none" and described:
            raise ValueError("attn.delta_error.kind=none injects nothing, of whatever size: set it to bias or noise")
        if self.layers is not None:
            object.__setattr__(self, "layers", distinct("delta_error.layers", self.layers))
        if self.interval < 1:
            raise ValueError(f"attn.delta_error.interval={self.interval}: give at least 1 step")
        if self.trajectory is not None:
            object.__setattr__(self, "trajectory", tuple(tuple(map(float, factors)) for factors in self.trajectory))
            if not self.trajectory or not all(self.trajectory):
                raise ValueError("attn.delta_error.trajectory: give one or more factors for each layer, or null")
            if not all(math.isfinite(factor) for factors in self.trajectory for factor in factors):
                raise ValueError("attn.delta_error.trajectory: give finite numbers")

    def sizes_in(self, layer: int) -> tuple[float, ...]:
        """Return the sizes in a layer, one for each ``interval``, of which the last holds on.

        Args:
            layer: from 1.

        Returns:
            One 0 for a layer that takes no error.
        """
        if self.layers is not None and layer not in self.layers:
            return (0.0,)
        factors = (1.0,) if self.trajectory is None else self.trajectory[layer - 1]
        return tuple(self.size * factor for factor in factors)


def distinct(name: str, numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of layers or heads, checked.

    Raises:
        ValueError: naming ``attn.`` and ``name``: one is there twice, below 1, or there is none.
    """
    if not numbers or min(numbers) < 1 or len(set(numbers)) != len(numbers):
        raise ValueError(f"attn.{name}={list(numbers)}: give distinct numbers counted from 1")
    return tuple(numbers)


Heads = tuple[Any, ...]  # of int, or of tuples of int: OmegaConf has no type for the two
"""Heads of selected layers, from 1: numbers, the same in each layer; or a tuple of numbers for each, in their order."""


def selected_heads(layers: Sequence[int] | None, heads: Sequence[Any]) -> Heads:
    """Return the heads of a variant, checked.

    Raises:
        ValueError: as of :func:`distinct`, or neither numbers nor a sequence of numbers for each of ``layers``.
    """

    def numbers(some: Any) -> bool:
        return isinstance(some, list | tuple) and all(type(one) is int for one in some)

    if numbers(heads):
        return distinct("heads", heads)
    if layers is None or len(heads) != len(layers) or not all(map(numbers, heads)):
        raise ValueError(f"attn.heads={list(heads)}: give numbers, or a list of numbers for each of attn.layers")
    return tuple(distinct("heads", some) for some in heads)


def heads_in(layer: int, layers: Sequence[int] | None, heads: Heads | None) -> tuple[int, ...] | None:
    """Return the heads of one of the selected layers, from 1; None is all."""
    if heads is None or layers is None or isinstance(heads[0], int):
        return heads
    return heads[layers.index(layer)]
