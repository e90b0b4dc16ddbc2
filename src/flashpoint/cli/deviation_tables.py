"""Tables of the deviation of attentions from each other and from the golden value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.cli.cells import interval, mean, mean_and_interval, number
from flashpoint.cli.table import Table
from flashpoint.deviation.pairs import GOLDEN, Pair
from flashpoint.deviation.statistics import QUANTILES, Unit, deviation, largest_and_rms

_WHERE = ("of", "precision", "T", "B_r × B_c")


def tables(pairs: Iterable[Pair], units: Sequence[Unit], reference: str) -> list[Table]:
    """Return the differences, and where there are several engines their distances from golden over the reference's."""
    rows: list[list[Any]] = []
    from_golden: dict[tuple[Any, ...], Pair] = {}
    for pair in pairs:
        rows += [_row(pair, unit) for unit in units]
        if pair.other == GOLDEN:
            from_golden[pair.engine, pair.quantity, pair.precision, pair.length, pair.block] = pair
    quantiles = [f"{100 * level:g} %" for level in QUANTILES]
    columns = ("difference", *_WHERE, "unit", "n", "largest", "mean", "std", "RMS", *quantiles, "signed mean")
    columns += ("95 % interval", "rescalings a row", "not finite")
    note = "largest to 99.9 %: of |difference|, over all elements; signed mean: with its interval over n inputs."
    found = [Table(columns, rows, note)]
    if ratios := _ratios(from_golden, reference):
        names = (f"distance from golden, over that of {reference}", *_WHERE, "n", "largest, ratio", "RMS, ratio")
        found.append(Table(names, ratios, "Ratios: the mean over n inputs, with its 95 % interval."))
    return found


def _row(pair: Pair, unit: Unit) -> list[Any]:
    told = deviation(pair.difference, pair.golden, pair.precision, unit)
    form = ".3g" if unit == "ulps" else ".2e"
    sizes = (told.largest, told.mean, told.deviation, told.rms, *told.quantiles)
    return [
        f"{pair.engine} − {pair.other}",
        *_where(pair),
        unit,
        len(told.signed_means),
        *(number(size, form) for size in sizes),
        mean(told.signed_means, f"+{form}"),
        interval(told.signed_means, f"+{form}"),
        number(pair.rescalings, ".2f"),
        told.not_finite,
    ]


def _where(pair: Pair) -> list[Any]:
    block = pair.block and f"{pair.block.rows} × {pair.block.keys}"
    return [pair.quantity, pair.precision.name, pair.length, block]


def _ratios(from_golden: dict[tuple[Any, ...], Pair], reference: str) -> list[list[Any]]:
    rows = []
    for (engine, *where, block), pair in from_golden.items():
        other = from_golden.get((reference, *where, block)) or from_golden.get((reference, *where, None))
        if engine == reference or other is None:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = [
                one / two
                for one, two in zip(largest_and_rms(pair.difference), largest_and_rms(other.difference), strict=True)
            ]
        rows.append([engine, *_where(pair), len(ratios[0]), *(_ratio(values) for values in ratios)])
    return rows


def _ratio(values: NDArray[np.float64]) -> Any:
    if not np.isfinite(values).all():  # nothing to divide by, as in FP64
        return None
    return mean_and_interval(values, ".2f") if len(values) > 1 else mean(values, ".2f")
