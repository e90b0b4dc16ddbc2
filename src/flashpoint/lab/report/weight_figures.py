"""Figures of how far weights come apart over a training: Golden et al.'s (arXiv 2405.02803) figures 7 and 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashpoint.lab.analysis.weight_distances import Apart
from flashpoint.lab.evidence.arrow import write_data
from flashpoint.lab.report.axes import draw_open_frame, save, set_log_scale
from flashpoint.lab.report.colours import colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "initial weights": "#000000",
    "batch order": "#7f7f7f",
    "precision fp16": "#3182bd",
    "precision fp32": "#9ecae1",
    "precision tf32": "#6baed6",
    "precision bf16": "#08519c",
}
_TITLES = {"largest": "largest difference of a weight", "wasserstein": "W₁ of all weights"}


def write_figures(groups: Mapping[str, Sequence[Apart]], note: str, folder: Path) -> list[Path]:
    """Write ``absolute.png`` and ``relative.png``, and ``weights.csv`` and ``weights.parquet``.

    Args:
        groups: runs by what they differ in from their twins.
        note: where they were made.
        folder: made if it is not there.

    Returns:
        The figures' paths.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = [row for kind, members in groups.items() for one in members for row in _rows(kind, one)]
    write_data(folder, "weights", {key: [row[key] for row in rows] for key in rows[0]})
    written = []
    for name in ("absolute", "relative"):
        written.append(folder / f"{name}.png")
        save(draw_weights(groups, note, relative=name == "relative"), written[-1])
    return written


def draw_weights(groups: Mapping[str, Sequence[Apart]], note: str, *, relative: bool) -> Figure:
    """Draw largest difference and W₁ over steps: of each group the mean over seeds, and the range from least to most.

    Args:
        relative: over the standard deviation of the twin's weights.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=80, layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, (name, title) in zip(panels, _TITLES.items(), strict=True):
        for kind, members in groups.items():
            steps = sorted(set(members[0].steps.tolist()).intersection(*(one.steps.tolist() for one in members)))
            found = [[one.at(step) for one in members] for step in steps]
            values = np.array(
                [
                    [getattr(at, name) / ((at.spread or np.nan) if relative else 1.0) for at in of_step]
                    for of_step in found
                ]
            ).reshape(len(steps), len(members))
            values = np.where(np.isfinite(values) & (values > 0), values, np.nan)
            line, dashes = _style(kind)
            label = f"{kind}, n = {len(members)}"
            panel.fill_between(steps, values.min(1), values.max(1), color=line, alpha=0.1, linewidth=0)
            panel.plot(steps, values.mean(1), color=line, linestyle=dashes, linewidth=2, label=label)
        set_log_scale(panel)
        panel.set_xlabel("optimiser steps done")
        panel.set_ylabel(f"{title}{' / spread' if relative else ''}")
        draw_open_frame(panel)
    handles, labels = panels[0].get_legend_handles_labels()
    spread = "; spread: standard deviation of the twin's weights" if relative else ""
    title = f"What the two runs differ in: mean and range over n seeds{spread}\n{note}"
    figure.legend(handles, labels, frameon=False, title=title, title_fontsize=9, loc="outside lower center", ncols=2)
    return figure


def _style(kind: str) -> tuple[str, str]:
    """Return colour and line style. An attention has the colour of its variant; one weight, the floor, is dotted."""
    first, *rest = kind.split()
    if first == "attention":
        return colour(rest[0].rstrip(",")), "-"
    return next(((line, "-") for start, line in _COLOURS.items() if kind.startswith(start)), ("#000000", ":"))


def _rows(kind: str, one: Apart) -> list[dict[str, Any]]:
    return [
        {
            "differs_in": kind,
            "seed": one.seed,
            "step": int(step),
            "largest": float(largest),
            "wasserstein": float(wasserstein),
            "spread": float(spread),
        }
        for step, largest, wasserstein, spread in zip(one.steps, one.largest, one.wasserstein, one.spread, strict=True)
    ]
