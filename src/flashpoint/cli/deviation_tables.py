"""Tables of the deviation of attentions from each other and from the golden value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.cli.cells import interval, mean, mean_and_interval, number
from flashpoint.cli.table import Table
from flashpoint.deviation.emulated import Block
from flashpoint.deviation.pairs import GOLDEN, Pair
from flashpoint.deviation.statistics import QUANTILES, Unit, deviation, largest_and_rms

_WHERE = ("of", "precision", "T", "B_r × B_c")
_RESCALINGS = "rescalings a row"


def tables(pairs: Iterable[Pair], units: Sequence[Unit], reference: str) -> list[Table]:
    """Return the differences, and where there are several engines their distances from golden over the reference's."""
    rows: list[list[Any]] = []
    distances: list[_Distance] = []
    for pair in pairs:
        rows += [_row(pair, unit) for unit in units]
        if pair.other == GOLDEN:
            distances.append(_Distance.of(pair))
    quantiles = [f"{100 * level:g} %" for level in QUANTILES]
    columns = ("difference", *_WHERE, "unit", "n", "largest", "mean", "std", "RMS", *quantiles, "signed mean")
    columns += ("95 % interval", _RESCALINGS, "not finite")
    note = "largest to 99.9 %: of the difference without its sign, over all elements; signed mean: over n inputs."
    found = [Table(columns, rows, note)]
    if ratios := _ratios(distances, reference):
        names = (f"distance from golden, over that of {reference}", *_WHERE, "n", "largest, ratio", "RMS, ratio")
        note = "Ratios: the mean over n inputs, with its 95 % interval."
        found.append(Table((*names, _RESCALINGS), ratios, note))
    return found


def _row(pair: Pair, unit: Unit) -> list[Any]:
    told = deviation(pair.difference, pair.golden, pair.precision, unit)
    form = ".3g" if unit == "ulps" else ".2e"
    sizes = (told.largest, told.mean, told.deviation, told.rms, *told.quantiles)
    return [
        f"{pair.engine} − {pair.other}",
        pair.quantity,
        pair.precision.name,
        pair.length,
        _tile(pair.block),
        unit,
        len(told.signed_means),
        *(number(size, form) for size in sizes),
        mean(told.signed_means, f"+{form}"),
        interval(told.signed_means, f"+{form}"),
        number(pair.rescalings, ".2f"),
        told.not_finite,
    ]


def _tile(block: Block | None) -> str | None:
    return f"{block.rows} × {block.keys}" if block else None


@dataclass(frozen=True)
class _Distance:
    """How far an engine's quantity is from the golden value. The tensors of a long sweep are not kept."""

    engine: str
    block: Block | None
    where: tuple[Any, ...]
    """Quantity, precision, length."""
    sizes: tuple[NDArray[np.float64], NDArray[np.float64]]
    """Largest, and root mean square, of each input."""
    rescalings: float | None

    @classmethod
    def of(cls, pair: Pair) -> _Distance:
        where = (pair.quantity, pair.precision.name, pair.length)
        return cls(pair.engine, pair.block, where, largest_and_rms(pair.difference), pair.rescalings)


def _ratios(distances: Sequence[_Distance], reference: str) -> list[list[Any]]:
    """Return a row for each engine but the reference, of the same block where both have one."""
    rows = []
    for one, other in product(distances, repeat=2):
        blocks = {distance.block for distance in (one, other)} - {None}
        if one.engine == reference or other.engine != reference or one.where != other.where or len(blocks) > 1:
            continue
        tiled = one if one.block else other
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = [_ratio(values / against) for values, against in zip(one.sizes, other.sizes, strict=True)]
        n, rescalings = len(one.sizes[0]), number(tiled.rescalings, ".2f")
        rows.append([one.engine, *one.where, _tile(tiled.block), n, *ratios, rescalings])
    return rows


def _ratio(values: NDArray[np.float64]) -> Any:
    if not np.isfinite(values).all():  # nothing to divide by, as in FP64
        return None
    return mean_and_interval(values, ".2f") if len(values) > 1 else mean(values, ".2f")
