"""Figures of how long runs last: Kaplan–Meier curves, and the median onset against a setting."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashpoint.lab.analysis.lifetimes import Lifetimes
from flashpoint.lab.analysis.response import Dose, is_quantity
from flashpoint.lab.report.axes import draw_open_frame, literal, set_log_scale
from flashpoint.lab.report.colours import colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_survival(groups: Sequence[Lifetimes]) -> Figure:
    """Draw the share of runs still stable over steps, with intervals; a tick is a run that ended there without an
    explosion."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=110, layout="constrained")
    panel = figure.subplots()
    shared = Counter(group.variant for group in groups)
    for number, group in enumerate(groups):
        steps, share, low, high = group.curve()
        line = colour(group.variant) if shared[group.variant] == 1 else f"C{number % 10}"
        label = f"{' '.join([group.label, group.setting]).strip()}: {len(group.onsets)} of {group.count}"
        panel.step(steps, share, where="post", color=line, label=_wrapped(label, 45))
        panel.fill_between(steps, low, high, step="post", color=line, alpha=0.12, linewidth=0)
        at = np.clip(np.searchsorted(steps, group.censored, side="right") - 1, 0, None)
        panel.plot(group.censored, share[at], "|", color=line, markersize=9)
    panel.set_ylim(-0.02, 1.02)
    panel.set_xlabel("optimiser step")
    panel.set_ylabel("share of runs still stable (Kaplan–Meier, 95 %)")
    draw_open_frame(panel)
    figure.legend(frameon=False, title="exploded", loc="outside right center")
    return figure


def draw_responses(found: dict[str, list[Dose]], key: str) -> Figure:
    """Draw the median onset with its 95 % interval, if it has one, over the setting; an arrow where most runs were
    stable to the end."""
    from matplotlib.figure import Figure

    labels = [_wrapped(label, 84) for label in found]
    more_lines = sum(label.count("\n") for label in labels)
    figure = Figure(figsize=(7, 5.5 + 0.17 * more_lines), dpi=110, layout="constrained")
    panel = figure.subplots()
    shared = Counter(doses[0].lifetimes.variant for doses in found.values())
    for number, (label, doses) in enumerate(zip(labels, found.values(), strict=True)):
        variant = doses[0].lifetimes.variant
        line = colour(variant) if shared[variant] == 1 else f"C{number}"
        for dose in doses:
            if (median := dose.lifetimes.median_onset) is not None:
                low, high = dose.lifetimes.median_interval()
                reach = [[median - low], [(high or _longest(dose.lifetimes)) - median]] if low is not None else None
                panel.errorbar(dose.value, median, yerr=reach, color=line, marker="o", capsize=3)
        reached = [
            (dose.value, dose.lifetimes.median_onset) for dose in doses if dose.lifetimes.median_onset is not None
        ]
        values, medians = [value for value, _ in reached], [median for _, median in reached]
        panel.plot(values, medians, color=line, label=label)
        held = [dose for dose in doses if dose.lifetimes.median_onset is None]
        panel.plot(
            [dose.value for dose in held],
            [_longest(dose.lifetimes) for dose in held],
            "^",
            color=line,
            fillstyle="none",
        )
    set_log_scale(panel)
    if all(is_quantity(doses, key) for doses in found.values()):
        panel.set_xscale("log")
    panel.set_xlabel(key)
    panel.set_ylabel("median onset, step (95 %); △ stable to there")
    draw_open_frame(panel)
    figure.legend(loc="outside lower center", frameon=False)
    return figure


def _wrapped(label: str, width: int) -> str:
    """Break a label between its settings, so that the legend stays within the figure."""
    return textwrap.fill(literal(label), width, break_long_words=False, break_on_hyphens=False)


def _longest(runs: Lifetimes) -> float:
    return float(max([*runs.onsets, *runs.censored]))
