"""The figure at the end of a run: loss, gradient norm and W_Q spectral norm over steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashpoint.run_folder import RunFolder, read_json
from flashpoint.tracking import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Columns = dict[str, tuple[np.ndarray, np.ndarray]]
_NORM = re.compile(r"layer/(\d+)/head/\d+/w_q_spectral_norm")
_SMOOTHING_STEPS = 100


def draw_curves(run: RunFolder) -> Path:
    """Write ``curves.png`` of a run that has ended.

    Returns:
        Its path.

    Raises:
        UserError: configuration, metrics or outcome are missing or damaged.
    """
    from matplotlib.figure import Figure  # matplotlib takes half a second to import

    columns = read_metrics(run.metrics)
    outcome = read_json(run.outcome)
    figure = Figure(figsize=(10, 9), dpi=120, layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    _draw_loss(axes[0], columns)
    _draw_grad_norm(axes[1], columns)
    _draw_norms(axes[2], columns)
    axes[2].set_xlabel("optimiser step")
    for panel in axes:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if outcome["onset_step"] is not None:
            panel.axvline(outcome["onset_step"], color="black", linestyle="--", linewidth=1)
    figure.suptitle(_title(run, outcome), fontsize=11)
    partial = run.figure.with_name(f".{run.figure.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(run.figure)
    return run.figure


def _draw_loss(panel: Axes, columns: Columns) -> None:
    if "loss" in columns:
        steps, losses = columns["loss"]
        panel.plot(steps, losses, color="0.75", linewidth=0.8, label="training")
        spacing = max(1, int(np.median(np.diff(steps)))) if len(steps) > 1 else 1  # a thinned run has not every step
        window = max(1, min(_SMOOTHING_STEPS // spacing, len(losses) // 10))
        smoothed = np.convolve(losses, np.ones(window) / window, mode="valid")
        panel.plot(steps[window - 1 :], smoothed, color="C0", label=f"training, mean over {window * spacing} steps")
    if "val_loss" in columns:
        panel.plot(*columns["val_loss"], "o", color="C1", markersize=4, label="validation")
    panel.set_ylabel("loss (nats per token)")
    if panel.has_data():
        panel.legend(frameon=False)


def _draw_grad_norm(panel: Axes, columns: Columns) -> None:
    if "grad_norm" in columns:
        steps, norms = columns["grad_norm"]
        panel.plot(steps, norms, color="C0", linewidth=0.8)
        if (np.isfinite(norms) & (norms > 0)).any():
            panel.set_yscale("log")
    panel.set_ylabel("gradient norm")


def _draw_norms(panel: Axes, columns: Columns) -> None:
    layers: dict[int, list[str]] = {}
    for name in columns:
        if match := _NORM.fullmatch(name):
            layers.setdefault(int(match[1]), []).append(name)
    for position, layer in enumerate(sorted(layers)):
        steps = columns[layers[layer][0]][0]
        largest = np.max([columns[name][1] for name in layers[layer]], axis=0)
        # The second layer is where the paper's failure starts.
        emphasis: dict[str, Any] = {"color": "C3", "linewidth": 2, "zorder": 3} if layer == 2 else {}
        shade = str(0.25 + 0.5 * position / max(1, len(layers) - 1))
        panel.plot(steps, largest, **{"color": shade, "linewidth": 1, "label": f"layer {layer}", **emphasis})
    panel.set_ylabel("W_Q spectral norm\n(largest head)")
    if layers:
        panel.legend(frameon=False, ncols=4)


def _title(run: RunFolder, outcome: dict[str, Any]) -> str:
    config, manifest = read_json(run.config), read_json(run.manifest)
    model = config["model"]
    onset = "" if outcome["onset_step"] is None else f" at step {outcome['onset_step']:,}"
    return (
        f"{config['attn']['name']}: {outcome['outcome']}{onset}\n"
        f"{model['n_layer']} layers × {model['d_model']}, {model['n_head']} heads, T {model['context']}, "
        f"seed {config['seed']}, {manifest['hardware']}"
    )
