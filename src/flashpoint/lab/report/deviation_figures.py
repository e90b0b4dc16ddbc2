"""Figures of the deviation between attentions, and from FP64: Golden et al.'s (arXiv 2405.02803) figures 3 to 6."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashpoint.lab.analysis.intervals import mean_interval
from flashpoint.lab.deviation.pairs import GOLDEN
from flashpoint.lab.deviation.statistics import QUANTILES
from flashpoint.lab.deviation.sweep import Measured
from flashpoint.lab.evidence.arrow import write_data
from flashpoint.lab.report.axes import draw_open_frame, save, set_log_scale
from flashpoint.lab.report.colours import colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZES: dict[str, Callable[[Measured], float]] = {
    "largest": lambda one: one.size.largest,
    "mean": lambda one: one.size.mean,
    "standard deviation": lambda one: one.size.deviation,
}
"""What a column of panels shows of |difference|, as the paper's figure 5."""
_UNITS = {"absolute": "|difference|", "relative": "|difference| / RMS of golden", "ulps": "|difference|, ulps"}
_MARKERS = {"fp32": "o", "within": "s", "same": "^"}


@dataclass(frozen=True)
class _Axis:
    """What may be swept."""

    key: str
    label: str
    place: Callable[[Measured], Any]
    """Where a measurement stands on it; None is everywhere."""
    text: Callable[[Any], str]
    """A place in words."""
    is_log: bool = False
    """A number on a logarithmic axis; otherwise places stand side by side."""
    is_ordered: bool = True
    """Whether a line from one place to the next says anything."""


_AXES = (
    _Axis(
        "precision",
        "format, explicit bits of its mantissa",
        lambda one: (one.precision.mantissa, one.precision.exponent, one.precision.name),
        lambda place: f"{place[2]}\n{place[0]}",
    ),
    _Axis("length", "tokens T", lambda one: one.length, str, is_log=True),
    _Axis("head_size", "features of a head d", lambda one: one.head_size, str, is_log=True),
    _Axis(
        "block",
        "tile of flash, B_r × B_c",
        lambda one: one.block and (one.block.keys, one.block.rows),
        lambda place: f"{place[1]}\n× {place[0]}",
    ),
    _Axis("inputs", "inputs", lambda one: one.inputs, str, is_ordered=False),
)
_ENGINE = _Axis("engine", "attention", lambda one: one.engine, str, is_ordered=False)


def write_figures(parts: Mapping[str, Sequence[Measured]], note: str, folder: Path) -> list[Path]:
    """Write a figure of each thing that is swept, and ``deviation.csv`` and ``deviation.parquet``.

    Args:
        parts: measurements by the name of their figure; an empty name is that of the axis. Formats have two figures:
            between attentions, and ``NAME_golden`` against FP64.
        note: where they were made.
        folder: made if it is not there.

    Returns:
        The figures' paths.

    Raises:
        OSError: the folder cannot be written.
    """
    write_data(folder, "deviation", _columns(parts))
    written = []
    for name, found in parts.items():
        for key, figure in draw_deviation(found, note).items():
            file = f"{name}_golden" if name and key.endswith("_golden") else name or key
            written.append(folder / f"{file}.png")
            save(figure, written[-1])
    return written


def draw_deviation(found: Sequence[Measured], note: str) -> dict[str, Figure]:
    """Draw a figure for each axis along which the measurements differ, by its key: a row of panels for each quantity.

    Of several units the first is drawn. Where nothing was swept the engines stand side by side.
    """
    found = [one for one in found if one.unit == found[0].unit]
    varied = [axis for axis in _AXES if len(_places(found, axis)) > 1] or [_ENGINE]
    swept = [axis for axis in varied if _is_swept(found, axis)] or varied[:1]
    figures: dict[str, Figure] = {}
    for axis in swept:
        others = [other for other in swept if other is not axis]
        sides = {axis.key: found}
        if axis.key == "precision":
            golden = [one for one in found if one.other == GOLDEN]
            between = [one for one in found if one.other != GOLDEN]
            sides = {axis.key: between, f"{axis.key}_golden": golden}
        figures |= {key: _figure(side, axis, others, note) for key, side in sides.items() if side}
    return figures


def _is_swept(found: Sequence[Measured], axis: _Axis) -> bool:
    """Whether measurements differ along it and along no other axis: a tile may follow from length or format."""
    alike: dict[tuple[Any, ...], set[Any]] = {}
    for one in found:
        key = one.engine, one.other, one.quantity, *(other.place(one) for other in _AXES if other is not axis)
        alike.setdefault(key, set()).add(axis.place(one))
    return any(len(places) > 1 for places in alike.values())


def _places(found: Sequence[Measured], axis: _Axis) -> list[Any]:
    return sorted({place for one in found if (place := axis.place(one)) is not None})


def _figure(found: Sequence[Measured], axis: _Axis, others: Sequence[_Axis], note: str) -> Figure:
    from matplotlib.figure import Figure

    quantities = list(dict.fromkeys(one.quantity for one in found))
    figure = Figure(figsize=(11, 1.6 + 2.6 * len(quantities)), dpi=80, layout="constrained")
    panels = figure.subplots(len(quantities), len(_SIZES), squeeze=False, sharex=True)
    places = list(dict.fromkeys(axis.place(one) for one in found)) if not axis.is_ordered else _places(found, axis)
    for row, quantity in zip(panels, quantities, strict=True):
        lines: dict[tuple[Any, ...], list[Measured]] = {}
        for one in found:
            if one.quantity == quantity:
                key = one.engine, one.other, one.sums, *(other.place(one) for other in others)
                lines.setdefault(key, []).append(one)
        for panel, (title, size) in zip(row, _SIZES.items(), strict=True):
            for line in lines.values():
                _draw_line(panel, line, axis, others, places, size)
            set_log_scale(panel)
            panel.set_title(f"{quantity}: {title} of |difference|", fontsize=10)
            draw_open_frame(panel)
            _set_places(panel, axis, places)
        row[0].set_ylabel(_UNITS[found[0].unit])
    for panel in panels[-1]:
        panel.set_xlabel(axis.label)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True))
    place: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "title": note, "title_fontsize": 8}
    figure.legend(known.values(), known.keys(), ncols=3, fontsize=9, **place)
    return figure


def _draw_line(
    panel: Axes,
    line: Sequence[Measured],
    axis: _Axis,
    others: Sequence[_Axis],
    places: Sequence[Any],
    size: Callable[[Measured], float],
) -> None:
    first = line[0]
    difference = first.difference if axis is not _ENGINE else f"difference from {first.other}"
    told = [difference, f"sums {first.sums}" if first.sums and axis is not _ENGINE else ""]
    told += [other.text(other.place(first)).replace("\n", " ") for other in others if other.place(first) is not None]
    style: dict[str, Any] = {
        "color": colour(first.engine),
        "linestyle": ("-" if first.other == GOLDEN else "--") if axis.is_ordered else "",
        "fillstyle": "full" if first.other == GOLDEN else "none",
        "label": ", ".join(filter(None, told)),
    }
    at = [axis.place(one) for one in line]
    values = np.array([size(one) for one in line])
    values = np.where(np.isfinite(values) & (values > 0), values, np.nan)
    if at == [None]:  # nothing of the sweep changes it
        del style["fillstyle"]
        panel.axhline(values[0], linewidth=1, **style)
        return
    x = at if axis.is_log else [places.index(place) for place in at]
    order = np.argsort(x)
    marker = _MARKERS.get(first.sums or "", "D")
    panel.plot(np.array(x)[order], values[order], marker=marker, markersize=4, linewidth=1.2, **style)


def _set_places(panel: Axes, axis: _Axis, places: Sequence[Any]) -> None:
    texts = [axis.text(place) for place in places]
    if axis.is_log:
        panel.set_xscale("log", base=2)
        panel.set_xticks(places, texts)
        panel.minorticks_off()
    else:
        slanted: dict[str, Any] = {} if axis.is_ordered else {"rotation": 30, "ha": "right"}
        panel.set_xticks(range(len(places)), texts, fontsize=8, **slanted)


def _columns(parts: Mapping[str, Sequence[Measured]]) -> dict[str, list[Any]]:
    """Return the measurements as columns of strings, numbers and None."""
    rows = [_row(name, one) for name, found in parts.items() for one in found]
    return {key: [row[key] for row in rows] for key in rows[0]}


def _row(part: str, one: Measured) -> dict[str, Any]:
    size = one.size
    middle, half = mean_interval(size.signed_means)
    return {
        "part": part,
        "engine": one.engine,
        "other": one.other,
        "of": one.quantity,
        "inputs": one.inputs,
        "precision": one.precision.name,
        "mantissa_bits": one.precision.mantissa,
        "sums": one.format_of_sums,
        "T": one.length,
        "d": one.head_size,
        "B_r": one.block.rows if one.block else None,
        "B_c": one.block.keys if one.block else None,
        "unit": one.unit,
        "n": len(size.signed_means),
        "largest": size.largest,
        "mean": size.mean,
        "std": size.deviation,
        "rms": size.rms,
        **{f"quantile_{level:g}": value for level, value in zip(QUANTILES, size.quantiles, strict=True)},
        "signed_mean": middle,
        "signed_low": None if half is None else middle - half,
        "signed_high": None if half is None else middle + half,
        "rescalings": one.rescalings,
        "not_finite": size.not_finite,
    }
