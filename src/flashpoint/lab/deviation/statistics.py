"""The size of a difference between two computations of one quantity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashpoint.lab.deviation.formats import Format

Unit = Literal["absolute", "relative", "ulps"]
UNITS: tuple[Unit, ...] = get_args(Unit)
QUANTILES = (0.5, 0.99, 0.999)


@dataclass(frozen=True)
class Deviation:
    """A difference over the elements of all independent inputs. Elements that are not finite are counted apart."""

    largest: float
    """Of |difference|, as what follows, too."""
    mean: float
    deviation: float
    """Standard deviation."""
    rms: float
    quantiles: tuple[float, ...]
    """At :data:`QUANTILES`."""
    signed_means: NDArray[np.float64]
    """Mean of the difference, one number for each input."""
    not_finite: int
    """Elements that are NaN or infinite in one of the two, or that differ from a golden value that is 0 throughout, to
    which nothing is relative."""


def deviation(difference: Tensor, golden: Tensor, precision: Format, unit: Unit) -> Deviation:
    """Describe a difference [B, …] float64 of B independent inputs.

    Args:
        golden: the golden value, of the same shape.
        precision: the format whose ulps count.
        unit: ``absolute``; ``relative`` to the root mean square of the input's golden value; or ``ulps`` of the
            precision at each golden element. If the element is smaller than that root mean square, they are those at
            the latter. An element near 0 has an ulp that says nothing about the sum it came from.
    """
    in_unit = (difference / _scale(golden, precision, unit)).where(difference != 0, 0.0)  # nothing over 0 is nothing
    per_input = in_unit.flatten(1).cpu().numpy()
    finite = np.isfinite(per_input)
    values = per_input[finite]
    sizes = np.abs(values)
    if not len(values):
        nan = float("nan")
        return Deviation(nan, nan, nan, nan, (nan,) * len(QUANTILES), np.full(len(per_input), nan), per_input.size)
    means = [
        float(row[of_row].mean()) if of_row.any() else np.nan for row, of_row in zip(per_input, finite, strict=True)
    ]
    return Deviation(
        largest=float(sizes.max()),
        mean=float(sizes.mean()),
        deviation=float(sizes.std()),
        rms=float(np.sqrt(np.square(sizes).mean())),
        quantiles=tuple(map(float, np.quantile(sizes, QUANTILES))),
        signed_means=np.array(means),
        not_finite=int((~finite).sum()),
    )


def largest_and_rms(difference: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the largest |difference| and root mean square of each input [B] of a difference [B, …]."""
    per_input = difference.flatten(1).cpu().numpy()
    return np.abs(per_input).max(1), np.sqrt(np.square(per_input).mean(1))


def _scale(golden: Tensor, precision: Format, unit: Unit) -> Tensor:
    if unit == "absolute":
        return torch.ones_like(golden)
    root = golden.flatten(1).square().mean(1).sqrt().reshape(-1, *[1] * (golden.ndim - 1))
    return root if unit == "relative" else precision.ulp(torch.maximum(golden.abs(), root))
