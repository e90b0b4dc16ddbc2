"""Tables of the deviation of attentions from each other and from the golden value."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.cli.table import Cell, Table, cell_text, number
from flashpoint.lab.cli.interval_cells import interval, mean, ratio
from flashpoint.lab.deviation.emulated import Block
from flashpoint.lab.deviation.pairs import GOLDEN
from flashpoint.lab.deviation.statistics import QUANTILES
from flashpoint.lab.deviation.sweep import Measured

_WHERE = ("of", "inputs", "precision", "sums", "T", "d", "B_r × B_c")
_RESCALINGS, _NOT_FINITE = "rescalings a row", "not finite"
_CIRCUMSTANCES = (*_WHERE[1:], "unit", "n", _RESCALINGS, _NOT_FINITE)
"""Columns that are of interest where their rows differ."""


def tables(found: Sequence[Measured]) -> list[Table]:
    """Return the differences, and where there are several engines their distances from golden over the last one's."""
    quantiles = [f"{100 * level:g} %" for level in QUANTILES]
    columns = ("difference", *_WHERE, "unit", "n", "largest", "mean", "std", "RMS", *quantiles, "signed mean")
    columns += ("95 % interval", _RESCALINGS, _NOT_FINITE)
    note = "largest to RMS, and quantiles: of |difference|, over all elements of all inputs."
    further = (*quantiles, "signed mean", "95 % interval")
    told = [_table(columns, [_row(one) for one in found], note, further)]
    reference = next((one.other for one in found if one.other != GOLDEN), None)
    if reference is None:
        return told
    if ratios := _ratios(found, reference):
        names = (f"distance from golden over that of {reference}", *_WHERE, "n", "largest ratio", "RMS ratio")
        note = "Ratios: the geometric mean over n inputs, with its 95 % interval."
        told.append(_table((*names, _RESCALINGS), ratios, note, ()))
    return told


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str, further: Sequence[str]) -> Table:
    """Return a table whose note tells those circumstances that all rows have in common; they are further columns."""
    alike: dict[str, str] = {}
    for at, column in enumerate(columns):
        texts = list(dict.fromkeys(filter(None, (cell_text(row[at]) for row in rows))))
        if column in _CIRCUMSTANCES and len(texts) < 2:
            alike[column] = " ".join([column, *texts])
    told = ", ".join(text for column, text in alike.items() if text != column)
    return Table(columns, rows, f"{note} In all rows: {told}.", (*alike, *further))


def _row(one: Measured) -> list[Any]:
    size, form = one.size, ".3g" if one.unit == "ulps" else ".2e"
    return [
        one.difference,
        *_where(one, one.block, one.format_of_sums),
        one.unit,
        len(size.signed_means),
        *(number(value, form) for value in (size.largest, size.mean, size.deviation, size.rms, *size.quantiles)),
        mean(size.signed_means, f"+{form}"),
        interval(size.signed_means, f"+{form}"),
        number(one.rescalings, ".2f"),
        size.not_finite,
    ]


def _where(one: Measured, block: Block | None, sums: str | None) -> list[Any]:
    return [one.quantity, one.inputs, one.precision.name, sums, one.length, one.head_size, tile(block)]


def tile(block: Block | None) -> str | None:
    """Return ``B_r × B_c``."""
    return f"{block.rows} × {block.keys}" if block else None


def _ratios(found: Sequence[Measured], reference: str) -> list[list[Any]]:
    """Return a row for each engine but the reference, of the same tile and sums where both have them."""
    distances = [one for one in found if one.distances and one.unit == found[0].unit]
    rows = []
    for one, other in product(distances, repeat=2):
        blocks, sums = ({getattr(each, name) for each in (one, other)} - {None} for name in ("block", "sums"))
        same = _where(one, None, None) == _where(other, None, None) and len(blocks) < 2 and len(sums) < 2
        if one.engine == reference or other.engine != reference or not same:
            continue
        assert one.distances is not None
        assert other.distances is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = [_ratio(mine / its) for mine, its in zip(one.distances, other.distances, strict=True)]
        tiled = one if one.block else other
        where = _where(one, tiled.block, one.format_of_sums or other.format_of_sums)
        rows.append([one.engine, *where, len(one.distances[0]), *ratios, number(tiled.rescalings, ".2f")])
    return rows


def _ratio(values: NDArray[np.float64]) -> Cell | None:
    positive = np.isfinite(values) & (values > 0)  # not where one of the two equals golden, as in FP64
    return ratio(values, ".2f") if positive.all() else None
