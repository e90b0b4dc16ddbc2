"""Figures of the report: each answers one question, for one run or for several side by side.

What Qiu & Yao (arXiv 2510.04212) claim is measured in the runs themselves. One variant has one colour everywhere.
Layers and heads count from 1.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.report.axes import set_log_scale
from flashpoint.report.colours import colour
from flashpoint.runs.metrics import Series
from flashpoint.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """One figure of the report."""

    key: str
    """Part of the file's name."""
    question: str
    caption: str
    """What Qiu & Yao say of it, in whole sentences."""
    draw: Callable[[Sequence[Run]], Figure | None]
    """Draws the figure; returns None if no run has measured its metric."""


def _heading(run: Run) -> str:
    return textwrap.fill(run.label, 60)  # a longer line leaves the panels no room


def draw_losses(runs: Sequence[Run]) -> Figure | None:
    """Draw training loss and gradient norm of all runs over one another."""
    figure, axes = _panels(2, 1, sharex=True)
    for run in runs:
        if smoothed := run.smoothed("loss"):
            label = f"{_heading(run)}, mean over {smoothed.steps} steps"
            axes[0, 0].plot(*smoothed.series, color=colour(run.variant), label=label)
        if "grad_norm" in run.columns:
            axes[1, 0].plot(*run.columns["grad_norm"], color=colour(run.variant), linewidth=0.7, alpha=0.8)
        for panel in axes[:, 0]:
            _mark_onset(panel, run, colour(run.variant))
    axes[0, 0].set_ylabel("loss (nats per token)")
    axes[1, 0].set_ylabel("gradient norm")
    set_log_scale(axes[1, 0])
    if axes[0, 0].get_legend_handles_labels()[0]:
        axes[0, 0].legend(frameon=False, fontsize=8)
    return _finished(figure, axes)


def draw_layers(runs: Sequence[Run]) -> Figure | None:
    """Draw the largest W_Q spectral norm of each layer."""

    return _by_layer(runs, "w_q_spectral_norm", "W_Q spectral norm, largest head", lambda norms: norms.max(1), log=True)


def draw_bias(runs: Sequence[Run]) -> Figure | None:
    """Draw the bias of δ against the exact row sum by layer, in the unit |dO|·|O| of injected errors, summed over the
    steps."""
    axis = "cumulative bias of δ, mean over heads"
    return _by_layer(runs, "row_sum_relative_bias", axis, lambda biases: biases.mean(1).cumsum(1))


def draw_heads(runs: Sequence[Run]) -> Figure | None:
    """Draw the W_Q spectral norm of each head of the hottest layer."""
    return _heads_of_hottest(runs, "w_q_spectral_norm", "W_Q spectral norm", log=True)


def draw_cumulative(runs: Sequence[Run]) -> Figure | None:
    """Draw Σ (δ_lp − δ_hp), summed over the observed steps."""
    return _heads_of_hottest(runs, "delta_error_cumulative", "cumulative Σ (δ_lp − δ_hp)")


def draw_scores(runs: Sequence[Run]) -> Figure | None:
    """Draw the mean |S| of each head of the hottest layer."""
    return _heads_of_hottest(runs, "score_mean", "mean |S|, nats", log=True)


def draw_heat_map(runs: Sequence[Run]) -> Figure | None:
    """Draw the W_Q spectral norm of every head over steps."""
    from matplotlib.colors import LogNorm

    measured = [(run, series) for run in runs if (series := run.by_head("w_q_spectral_norm"))]
    if not measured:
        return None
    figure, axes = _panels(1, len(measured))
    largest = max(float(norms.max()) for _, (_, norms) in measured)
    for panel, (run, (steps, norms)) in zip(axes[0], measured, strict=True):
        rows = norms.reshape(-1, norms.shape[-1])
        image = panel.pcolormesh(
            steps, np.arange(1, len(rows) + 1), np.maximum(rows, 0.1), norm=LogNorm(0.3, max(1.0, largest)),
            cmap="magma", shading="nearest", rasterized=True,
        )  # fmt: skip
        heads = norms.shape[1]
        panel.set_yticks(np.arange(len(norms)) * heads + (heads + 1) / 2, [f"layer {i + 1}" for i in range(len(norms))])
        panel.invert_yaxis()
        panel.set_title(_heading(run), fontsize=9)
        panel.set_xlabel("optimiser step")
        _mark_onset(panel, run, "white")
    figure.colorbar(image, ax=axes[0].tolist(), label="W_Q spectral norm")
    return figure


def draw_metrics(runs: Sequence[Run], titles: dict[str, str]) -> Figure | None:
    """Draw the hottest layer's heads: a row of panels for each metric, with its title, and a column for each run."""
    measured = [run for run in runs if any(run.by_head(name) for name in titles)]
    if not measured:
        return None
    figure, axes = _panels(len(titles), len(measured), sharex="col", sharey="row")
    for column, run in enumerate(measured):
        for row, (name, title) in enumerate(titles.items()):
            panel = axes[row, column]
            if series := run.by_head(name):
                _draw_heads(panel, series, runs[0].hottest_layer)
                if row == 0:
                    _name_heads(panel, series)
            _mark_onset(panel, run, "black")
            panel.set_title(f"{_heading(run)}\n{title}" if row == 0 else title, fontsize=8)
    return _finished(figure, axes)


_SIMILARITY = {
    "token_similarity": "mean cosine of (PK)[T]ᵀX[T] among the tokens of a step",
    "step_similarity": "the same with the step observed before",
}
_SIGNS = {
    "grad_out_error_sign_agreement": "dO with O_lp − O_hp: mean product of signs",
    "out_error_bias_max": "O_lp − O_hp: |mean| / mean |·|, most biased feature",
    "v_sign_max": "V: share of one sign, most one-sided feature",
}
_TIES = {
    "tied_rows": "share of rows with two or more P̄ = 1",
    "tie_multiplicity": "P̄ = 1 in such a row",
    "ties_on_first_keys": "share of them on the first four keys",
}
_NULL_DIRECTION = {
    "w_q_mean_key_share": "share of ‖W_Q‖² along the mean key",
    "w_q_update_mean_key_share": "share of its last update along it",
    "row_sum_abs_mean": "mean |Σⱼ dSᵢⱼ| / α",
}

PANELS = (
    Panel(
        "loss",
        "Does the loss explode, and when?",
        "The paper shows both: the failure, and a fix that holds.",
        draw_losses,
    ),
    Panel("layers", "Which layer's W_Q takes off?", "In the paper it is the second layer.", draw_layers),
    Panel("heads", "Which of its heads?", "In the paper it is a few of them.", draw_heads),
    Panel(
        "heat_map",
        "When does each head take off?",
        "In the paper it is a few heads of the second layer.",
        draw_heat_map,
    ),
    Panel(
        "ties",
        "How often is P̄ exactly 1 more than once in a row?",
        "The paper: equal row maxima make several P̄ of a row exactly 1.",
        partial(draw_metrics, titles=_TIES),
    ),
    Panel(
        "signs",
        "Where does the sign of δ's error come from?",
        "The paper: P̄V is rounded with a bias, and dO has the sign of that error.",
        partial(draw_metrics, titles=_SIGNS),
    ),
    Panel(
        "cumulative", "Does the error of δ keep its sign?", "The paper: Σ (δ_lp − δ_hp) is positive.", draw_cumulative
    ),
    Panel(
        "bias",
        "In which layer, with P̄'s rounding counted in?",
        "The error is taken from the δ that makes Σⱼ dSᵢⱼ zero. The paper takes δ_hp from the rounded P̄ instead.",
        draw_bias,
    ),
    Panel(
        "similarity",
        "Do all tokens and steps push W_Q the same way?",
        "The paper: (PK)[T]ᵀX[T] is nearly the same rank-1 matrix for all tokens and steps.",
        partial(draw_metrics, titles=_SIMILARITY),
    ),
    Panel(
        "null_direction",
        "Does W_Q grow along what all keys share?",
        "Not in the paper: a hypothesis of this project.",
        partial(draw_metrics, titles=_NULL_DIRECTION),
    ),
    Panel(
        "scores",
        "Do the scores take on an offset that softmax does not see?",
        "Not in the paper: growth along the mean key adds an offset to the scores, and BF16 then resolves them less.",
        draw_scores,
    ),
)


def _panels(rows: int, columns: int, **options: Any) -> tuple[Figure, np.ndarray]:
    from matplotlib.figure import Figure  # matplotlib takes half a second to import

    figure = Figure(figsize=(max(7.0, 4.2 * columns), max(4.0, 2.7 * rows)), dpi=110, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _finished(figure: Figure, axes: np.ndarray) -> Figure:
    for panel in axes.flat:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[-1]:
        panel.set_xlabel("optimiser step")
    return figure


def _mark_onset(panel: Axes, run: Run, line_colour: str) -> None:
    if run.onset is not None:
        panel.axvline(run.onset, color=line_colour, linestyle="--", linewidth=1)


def _side_by_side(
    runs: Sequence[Run],
    name: str,
    axis: str,
    draw: Callable[[Axes, Run, Series], None],
    *,
    log: bool = False,
) -> Figure | None:
    measured = [(run, series) for run in runs if (series := run.by_head(name))]
    if not measured:
        return None
    figure, axes = _panels(1, len(measured), sharey=True)
    for panel, (run, series) in zip(axes[0], measured, strict=True):
        draw(panel, run, series)
        panel.set_title(_heading(run), fontsize=9)
        _mark_onset(panel, run, "black")
        if log:
            set_log_scale(panel)
    axes[0, 0].set_ylabel(axis)
    return _finished(figure, axes)


def _by_layer(
    runs: Sequence[Run],
    name: str,
    axis: str,
    of_layers: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    log: bool = False,
) -> Figure | None:
    """``of_layers`` makes of values [n_layer, n_head, n] one curve a layer, [n_layer, n]."""

    def draw(panel: Axes, run: Run, series: Series) -> None:
        steps, values = series
        for layer, of_layer in enumerate(of_layers(values), 1):
            hot = layer == run.hottest_layer
            shade = "#d62728" if hot else str(0.2 + 0.6 * layer / (len(values) + 1))
            panel.plot(steps, of_layer, color=shade, linewidth=2 if hot else 1, label=f"layer {layer}", zorder=2 + hot)
        panel.legend(frameon=False, fontsize=7, ncols=2)

    return _side_by_side(runs, name, axis, draw, log=log)


def _draw_heads(panel: Axes, series: Series, layer: int) -> None:
    steps, values = series
    for head, of_head in enumerate(values[layer - 1] if layer <= len(values) else (), 1):
        panel.plot(steps, of_head, linewidth=1.2, label=f"layer {layer}, head {head}")


def _name_heads(panel: Axes, series: Series) -> None:
    if series[1].shape[1] <= 8:
        panel.legend(frameon=False, fontsize=7)


def _heads_of_hottest(runs: Sequence[Run], name: str, axis: str, *, log: bool = False) -> Figure | None:
    def draw(panel: Axes, _run: Run, series: Series) -> None:
        _draw_heads(panel, series, runs[0].hottest_layer)
        _name_heads(panel, series)

    return _side_by_side(runs, name, axis, draw, log=log)
