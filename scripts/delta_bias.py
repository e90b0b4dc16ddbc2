"""Does the error of δ keep its sign before the explosion? ``python scripts/delta_bias.py RUN [RUN …]``

For each head of the hottest layer, or of those of ``--layers``: Σ (δ_lp − δ_hp) over all observed steps up to
``--until`` (default: 1,000 steps before the onset, or the end), in units of its own standard error, were the errors of
all tokens independent with mean zero; and the share of observed steps at which the sum over tokens was positive, with
its 95 % Clopper–Pearson interval. Then, where it was measured, the bias and the root mean square of the error in the
unit of ``attn.delta_error.size``, the bias as a mean over the observed steps with its 95 % interval (Student's t).

``--pool`` prints a row for each attention instead: bias and noise in that unit, means over steps, heads and layers
(all, or those of ``--layers``), and the bias over the square of the noise, with 95 % intervals over the runs.
``--since`` leaves out earlier steps, and ``--of row_sum`` takes the error against the exact row sum, which that of P̄ is
part of; its Σ is not recorded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.report.intervals import mean_interval
from flashpoint.report.series import RecordedRun
from flashpoint.run_folder import RunFolder

BEFORE_ONSET = 1000
"""Steps left out before the onset: there the growth is its own cause."""


def by_head(run: RecordedRun, of: str, layers: Sequence[int] | None, since: int, until: int | None) -> Iterator[str]:
    """A line for each head of these layers, or of the hottest."""
    summed = of == "delta_error"
    steps, values = run.measured_by_head("delta_error_sum" if summed else "row_sum_relative_bias")
    chosen = _window(run, steps, since, until)
    layers = layers or [run.hottest_layer]
    _check(run, layers, len(values))
    for layer, head in product(layers, range(values.shape[1])):
        told = [_summed(run, layer, head, chosen)] if summed else []
        if relative := _relative(run, of, layer, head, chosen):
            told.append(relative)
        yield f"{run.name:24} L{layer}H{head + 1}  {'; '.join(told)}"


def _summed(run: RecordedRun, layer: int, head: int, chosen: NDArray[np.bool_]) -> str:
    from scipy.stats import binomtest

    sums, variances = (run.measured_by_head(f"delta_error_{name}")[1] for name in ("sum", "variance"))
    tokens = run.config["probes"]["sequences"] * run.config["model"]["context"]
    errors, variance = sums[layer - 1, head][chosen], variances[layer - 1, head][chosen]
    expected, count = np.sqrt(tokens * variance.sum()), int(chosen.sum())
    positive = int((errors > 0).sum())
    interval = binomtest(positive, count).proportion_ci(0.95, "exact")
    in_errors = f"= {errors.sum() / expected:+5.2f} standard errors, " if expected else ""
    return (
        f"Σ {errors.sum():+.2e} {in_errors}"
        f"positive at {positive} of {count} steps ({100 * interval.low:.0f} to {100 * interval.high:.0f} %)"
    )


def pooled(
    runs: Sequence[RecordedRun], of: str, layers: Sequence[int] | None, since: int, until: int | None
) -> Iterator[str]:
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
        chosen = _window(run, steps, since, until)
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


def _window(run: RecordedRun, steps: NDArray[np.int64], since: int, until: int | None) -> NDArray[np.bool_]:
    if until is None:
        until = int(steps[-1]) + 1 if run.onset is None else run.onset - BEFORE_ONSET
    chosen = (steps >= since) & (steps < until)
    if not chosen.any():
        raise UserError(
            f"{run.folder.path}: no observed step from {since} to before step {until}; give other --since and --until"
        )
    return chosen


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
    parser.add_argument("--until", type=int, help="step before which observations count")
    parser.add_argument("--layers", nargs="+", type=int, metavar="LAYER", help="default: the hottest, with --pool all")
    parser.add_argument("--pool", action="store_true", help="a row for each attention")
    parser.add_argument("--of", choices=("delta_error", "row_sum"), default="delta_error", help="which error")
    arguments = parser.parse_args()
    try:
        runs = [RecordedRun(RunFolder.open(name)) for name in arguments.runs]
        if arguments.pool:
            print("\n".join(pooled(runs, arguments.of, arguments.layers, arguments.since, arguments.until)))
        else:
            for run in runs:
                print("\n".join(by_head(run, arguments.of, arguments.layers, arguments.since, arguments.until)))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
