"""The figure at the end of a run: loss, gradient norm and W_Q spectral norm over steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashpoint.lab.report.axes import draw_open_frame, drawable, literal, save, set_log_scale
from flashpoint.lab.report.colours import layer_look
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metric_table import GRAD_NORM, LOSS, VALIDATION_LOSS, W_Q_NORM
from flashpoint.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLACES = {"left": 0.085, "right": 0.985, "bottom": 0.055, "top": 0.93, "hspace": 0.07}
"""Of the panels. Matplotlib's layout would find them by drawing every label twice more."""


def draw_curves(folder: RunFolder) -> Path:
    """Write ``curves.png`` of a run that has ended.

    Returns:
        Its path.

    Raises:
        UserError: configuration, metrics or outcome are missing or damaged.
    """
    from matplotlib.figure import Figure  # matplotlib takes half a second to import

    run = Run.of_folder(folder)
    figure = Figure(figsize=(10, 9), dpi=120)
    axes = figure.subplots(3, 1, sharex=True, gridspec_kw=_PLACES)
    if run.onset is not None:  # before the curves: the first panel's legend names it
        for panel, label in zip(axes, ("onset of the explosion", None, None), strict=True):
            panel.axvline(run.onset, color="black", linestyle="--", linewidth=1, label=label)
    _draw_loss(axes[0], run)
    _draw_grad_norm(axes[1], run)
    _draw_norms(axes[2], run)
    axes[2].set_xlabel("optimiser step")
    for panel in axes:
        draw_open_frame(panel)
    figure.suptitle(_title(run), fontsize=11)
    save(figure, folder.figure)
    return folder.figure


def _draw_loss(panel: Axes, run: Run) -> None:
    if LOSS.name in run.columns:
        panel.plot(*drawable(run.columns[LOSS.name]), color="0.75", linewidth=0.8, label="training")
    if smoothed := run.smoothed(LOSS.name):
        panel.plot(*drawable(smoothed.series), color="C0", label=f"training, mean over {smoothed.steps} steps")
    if VALIDATION_LOSS.name in run.columns:
        panel.plot(*drawable(run.columns[VALIDATION_LOSS.name]), "o", color="C1", markersize=4, label="validation")
    panel.set_ylabel(LOSS.axis)
    if panel.has_data():
        panel.legend(frameon=False)


def _draw_grad_norm(panel: Axes, run: Run) -> None:
    if GRAD_NORM.name in run.columns:
        panel.plot(*drawable(run.columns[GRAD_NORM.name]), color="C0", linewidth=0.8)
        set_log_scale(panel)
    panel.set_ylabel(GRAD_NORM.axis)


def _draw_norms(panel: Axes, run: Run) -> None:
    if series := run.by_head(W_Q_NORM.name):
        steps, norms = series
        for layer, largest in enumerate(norms.max(1), 1):
            look = layer_look(layer, len(norms), hottest=layer == run.hottest_layer)
            panel.plot(*drawable((steps, largest)), label=f"layer {layer}", **look)
        panel.legend(frameon=False, ncols=4)
    panel.set_ylabel(f"{W_Q_NORM.axis},\nlargest head")


def _title(run: Run) -> str:
    model = run.shape
    return (
        f"{literal(run.title)}: {run.verdict}\n"
        f"{model.n_layer} layers × {model.d_model}, {model.n_head} heads, T {model.context}, "
        f"seed {run.seed}, {run.manifest.hardware}"
    )
