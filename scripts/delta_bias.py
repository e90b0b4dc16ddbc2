"""Does the error of δ keep its sign before the explosion? ``python scripts/delta_bias.py RUN [RUN …]``

For each head of the hottest layer, or of those of ``--layers``: Σ (δ_lp − δ_hp) over all observed steps up to
``--until`` (default: 1,000 steps before the onset, or the end), in units of its own standard error, were the errors of
all tokens independent with mean zero; and the share of observed steps at which the sum over tokens was positive, with
its 95 % Clopper–Pearson interval. Then, where it was measured, the bias and the root mean square of the error in the
unit of ``attn.delta_error.size``, the bias as a mean over the observed steps with its 95 % interval (Student's t).

``--by layer`` prints a row for each run: the same Σ over all heads of a layer in its standard errors, for every layer
or those of ``--layers``, in bold that of the hottest one; and of that one bias, noise, and bias over noise².

``--by attention`` prints a row for each attention: bias and noise in that unit, means over steps, heads and layers
(all, or those of ``--layers``), and the bias over the square of the noise, with 95 % intervals over the runs.

``--since`` leaves out earlier steps, ``--last N`` all but the last N before ``--until``, and ``--of row_sum`` takes the
error against the exact row sum, which that of P̄ is part of; its Σ is not recorded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.report.intervals import mean_interval
from flashpoint.report.series import RecordedRun
from flashpoint.run_folder import RunFolder

BEFORE_ONSET = 1000
"""Steps left out before the onset: there the growth is its own cause."""


@dataclass(frozen=True)
class Window:
    """Observed steps that count: from ``since`` to before ``until``, and of these those ``last`` steps before that."""

    since: int
    until: int | None
    last: int | None

    def of(self, run: RecordedRun, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of a run's observed steps [n] these are.

        Raises:
            UserError: none.
        """
        until = self.until
        if until is None:
            until = int(steps[-1]) + 1 if run.onset is None else run.onset - BEFORE_ONSET
        since = self.since if self.last is None else max(self.since, until - self.last)
        chosen: NDArray[np.bool_] = (steps >= since) & (steps < until)
        if not chosen.any():
            raise UserError(
                f"{run.folder.path}: no observed step from {since} to before step {until}; "
                "give other --since, --last and --until"
            )
        return chosen


def by_head(run: RecordedRun, of: str, layers: Sequence[int] | None, window: Window) -> Iterator[str]:
    """A line for each head of these layers, or of the hottest."""
    summed = of == "delta_error"
    steps, values = run.measured_by_head("delta_error_sum" if summed else "row_sum_relative_bias")
    chosen = window.of(run, steps)
    layers = layers or [run.hottest_layer]
    _check(run, layers, len(values))
    for layer, head in product(layers, range(values.shape[1])):
        told = [_summed(run, layer, head, chosen)] if summed else []
        if relative := _relative(run, of, layer, head, chosen):
            told.append(relative)
        yield f"{run.name:24} L{layer}H{head + 1}  {'; '.join(told)}"


def by_layer(runs: Sequence[RecordedRun], layers: Sequence[int] | None, window: Window) -> Iterator[str]:
    """Markdown, a row a run, and a line that counts the layers beyond two standard errors."""
    tables = [_ratios(run, layers, window) for run in runs]
    shown = sorted({layer for table in tables for layer in table})
    columns = [
        "run",
        "verdict",
        *(f"layer {layer}" for layer in shown),
        "bias of the hottest",
        "noise",
        "bias / noise²",
    ]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    found: dict[str, list[float]] = {"hottest layers": [], "others": []}
    for run, table in zip(runs, tables, strict=True):
        cells = dict.fromkeys(shown, "")
        for layer, ratio in table.items():
            hottest = layer == run.hottest_layer
            cells[layer] = f"**{ratio:+.1f}**" if hottest else f"{ratio:+.1f}"
            found["hottest layers" if hottest else "others"].append(ratio)
        yield f"| `{run.name}` | {run.verdict} | {' | '.join([*cells.values(), *_of_hottest(run, window)])} |"
    counts = []
    for name, ratios in found.items():
        above, below = sum(ratio > 2 for ratio in ratios), sum(ratio < -2 for ratio in ratios)
        counts.append(f"of {len(ratios)} {name} {above} above +2, {below} below −2")
    yield f"\n{'; '.join(counts)} (2.3 % on either side, had no error a bias)"


def _ratios(run: RecordedRun, layers: Sequence[int] | None, window: Window) -> dict[int, float]:
    """Σ in standard errors by layer, those without an error left out."""
    steps, sums = run.measured_by_head("delta_error_sum")
    chosen = window.of(run, steps)
    _check(run, layers or [], len(sums))
    totals = {layer: _sum(run, layer, slice(None), chosen) for layer in layers or range(1, len(sums) + 1)}
    return {layer: total.ratio for layer, total in totals.items() if total.expected}


def _of_hottest(run: RecordedRun, window: Window) -> tuple[str, str, str]:
    steps, biases = run.measured_by_head("delta_error_relative_bias")
    _, noises = run.measured_by_head("delta_error_relative_noise")
    chosen = window.of(run, steps)
    layer = run.hottest_layer - 1
    mean, half = mean_interval(biases[layer][:, chosen].mean(0))
    variance = float(np.square(noises[layer][:, chosen]).mean())
    interval = "" if half is None else f" ± {half:.1e}"
    return f"{mean:+.1e}{interval}", f"{variance**0.5:.1e}", f"{mean / variance:.1f}" if variance else ""


def _summed(run: RecordedRun, layer: int, head: int, chosen: NDArray[np.bool_]) -> str:
    from scipy.stats import binomtest

    errors = run.measured_by_head("delta_error_sum")[1][layer - 1, head][chosen]
    total = _sum(run, layer, slice(head, head + 1), chosen)
    positive, count = int((errors > 0).sum()), int(chosen.sum())
    interval = binomtest(positive, count).proportion_ci(0.95, "exact")
    in_errors = f"= {total.ratio:+5.2f} standard errors, " if total.expected else ""
    return (
        f"Σ {total.value:+.2e} {in_errors}"
        f"positive at {positive} of {count} steps ({100 * interval.low:.0f} to {100 * interval.high:.0f} %)"
    )


@dataclass(frozen=True)
class _Sum:
    """Σ (δ_lp − δ_hp) over tokens, steps and heads."""

    value: float
    expected: float
    """Its standard error, were the errors of all tokens independent with mean zero."""

    @property
    def ratio(self) -> float:
        return self.value / self.expected


def _sum(run: RecordedRun, layer: int, heads: slice, chosen: NDArray[np.bool_]) -> _Sum:
    sums, variances = (
        run.measured_by_head(f"delta_error_{name}")[1][layer - 1, heads][:, chosen].sum()
        for name in ("sum", "variance")
    )
    tokens = run.config["probes"]["sequences"] * run.config["model"]["context"]
    return _Sum(float(sums), float(np.sqrt(tokens * variances)))


def by_attention(runs: Sequence[RecordedRun], of: str, layers: Sequence[int] | None, window: Window) -> Iterator[str]:
    """Markdown, a row an attention; of these layers, or of all."""
    yield "| attention | runs | bias | 95 % interval | noise | bias / noise² | 95 % interval |"
    yield "|---|---|---|---|---|---|---|"
    groups: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        steps, biases = run.measured_by_head(f"{of}_relative_bias")
        _, noises = run.measured_by_head(f"{of}_relative_noise")
        if layers:
            _check(run, layers, len(biases))
            biases, noises = (values[np.array(layers) - 1] for values in (biases, noises))
        chosen = window.of(run, steps)
        one = float(biases[..., chosen].mean()), float(np.sqrt(np.square(noises[..., chosen]).mean()))
        groups.setdefault(run.title, []).append(one)
    for title, members in groups.items():
        biases, noises = np.array(members).T
        noise = np.sqrt(np.square(noises).mean())
        cells = [f"`{title}`", str(len(members)), *_told(biases, "+.1e"), f"{noise:.1e}"]
        cells += _told(biases / np.square(noises), ".2f") if noises.all() else ["", ""]
        yield f"| {' | '.join(cells)} |"


def _told(values: NDArray[np.float64], form: str) -> tuple[str, str]:
    mean, half = mean_interval(values)
    return f"{mean:{form}}", "" if half is None else f"{mean - half:{form}} to {mean + half:{form}}"


def _check(run: RecordedRun, layers: Sequence[int], count: int) -> None:
    if unknown := [layer for layer in layers if not 1 <= layer <= count]:
        raise UserError(f"{run.folder.path}: --layers {unknown[0]}: it has layers 1 to {count}")


def _relative(run: RecordedRun, of: str, layer: int, head: int, chosen: NDArray[np.bool_]) -> str:
    biases, noises = run.by_head(f"{of}_relative_bias"), run.by_head(f"{of}_relative_noise")
    if biases is None or noises is None or chosen.sum() < 2:
        return ""
    mean, half = mean_interval(biases[1][layer - 1, head][chosen])
    noise = np.sqrt(np.square(noises[1][layer - 1, head][chosen]).mean())
    return f"bias {mean:+.1e} ± {half:.1e}, noise {noise:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--since", type=int, default=0, help="step from which observations count (default: 0)")
    parser.add_argument("--last", type=int, metavar="STEPS", help="of these steps count only the last so many")
    parser.add_argument("--until", type=int, help="step before which observations count")
    parser.add_argument(
        "--layers", nargs="+", type=int, metavar="LAYER", help="default: the hottest, by layer or attention all"
    )
    parser.add_argument("--by", choices=("head", "layer", "attention"), default="head", help="what has a line each")
    parser.add_argument("--of", choices=("delta_error", "row_sum"), default="delta_error", help="which error")
    arguments = parser.parse_args()
    try:
        runs = [RecordedRun(RunFolder.open(name)) for name in arguments.runs]
        window = Window(arguments.since, arguments.until, arguments.last)
        if arguments.by == "layer" and arguments.of == "row_sum":
            raise UserError("--by layer --of row_sum: the Σ of that error is not recorded; take --by head or attention")
        if arguments.by == "layer":
            lines = by_layer(runs, arguments.layers, window)
        elif arguments.by == "attention":
            lines = by_attention(runs, arguments.of, arguments.layers, window)
        else:
            lines = (line for run in runs for line in by_head(run, arguments.of, arguments.layers, window))
        print("\n".join(lines))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
