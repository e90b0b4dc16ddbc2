"""Does the error of δ keep its sign before the explosion? ``python scripts/delta_bias.py RUN [RUN …]``

For each head of ``--layer`` (default: the hottest): Σ (δ_lp − δ_hp) over all observed steps up to ``--until`` (default:
1,000 steps before the onset, or the end), in units of its own standard error, were the errors of all tokens independent
with mean zero; and the share of observed steps at which the sum over tokens was positive, with its 95 % Clopper–Pearson
interval. Then, where it was measured, the bias and the root mean square of the error in the unit of
``attn.delta_error.size``, the bias as a mean over the observed steps with its 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.report.series import RecordedRun
from flashpoint.run_folder import RunFolder

BEFORE_ONSET = 1000
"""Steps left out before the onset: there the growth is its own cause."""


def lines(run: RecordedRun, until: int | None, layer: int | None) -> Iterator[str]:
    """A line for each head."""
    from scipy.stats import binomtest

    sums, variances = run.by_head("delta_error_sum"), run.by_head("delta_error_variance")
    if sums is None or variances is None:
        raise UserError(f"{run.folder.path}: δ's error was not observed; run it with probes.attention=[delta_error]")
    if until is None:
        until = int(sums[0][-1]) + 1 if run.onset is None else run.onset - BEFORE_ONSET
    chosen = sums[0] < until
    if not chosen.any():
        raise UserError(f"{run.folder.path}: no observed step before step {until}; give a later --until")
    tokens = run.config["probes"]["sequences"] * run.config["model"]["context"]
    layer, count = layer or run.hottest_layer, int(chosen.sum())
    if layer > len(sums[1]):
        raise UserError(f"{run.folder.path}: --layer {layer}: the model has layers 1 to {len(sums[1])}")
    for head in range(sums[1].shape[1]):
        errors, variance = sums[1][layer - 1, head][chosen], variances[1][layer - 1, head][chosen]
        expected = np.sqrt(tokens * variance.sum())
        positive = int((errors > 0).sum())
        interval = binomtest(positive, count).proportion_ci(0.95, "exact")
        total = errors.sum()
        yield (
            f"{run.name:24} L{layer}H{head + 1}  Σ {total:+.2e} = {total / expected:+5.2f} standard errors, "
            f"positive at {positive} of {count} steps ({100 * interval.low:.0f} to {100 * interval.high:.0f} %)"
            + _relative(run, layer, head, chosen)
        )


def _relative(run: RecordedRun, layer: int, head: int, chosen: NDArray[np.bool_]) -> str:
    from scipy.stats import t

    biases, noises = run.by_head("delta_error_relative_bias"), run.by_head("delta_error_relative_noise")
    if biases is None or noises is None or chosen.sum() < 2:
        return ""
    bias, noise = biases[1][layer - 1, head][chosen], noises[1][layer - 1, head][chosen]
    half = t.ppf(0.975, len(bias) - 1) * bias.std(ddof=1) / np.sqrt(len(bias))
    return f"; bias {bias.mean():+.1e} ± {half:.1e}, noise {np.sqrt((noise**2).mean()):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--layer", type=int, help="counted from 1")
    parser.add_argument("--until", type=int, help="step before which observations count")
    arguments = parser.parse_args()
    try:
        for name in arguments.runs:
            print("\n".join(lines(RecordedRun(RunFolder.open(name)), arguments.until, arguments.layer)))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
