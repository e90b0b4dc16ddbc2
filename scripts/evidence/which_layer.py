"""Which layer grows first, told from half of the way there: ``python scripts/evidence/which_layer.py``.

The runs of the evidence whose attention makes δ of a rounded O, in all layers alike, and that were given an early
warning at least 100 steps before an onset, or without one. The layer of the warning is the one that grows first. A
measure is taken of each layer until half of the warning's step, and names the layer in which it is most like trouble.
Settings are divided in halves by a hash; seeds, attentions and lengths of one setting are in one half. On the first
half one measure is chosen: of those that both halves have in six settings or more, the one that is right most often.
That one alone is tested on the second half, beside the rule "layer 2" and beside chance.

settings      that have the measure, in the first and in the second half; runs behind them
right         share of the runs of a setting in which the measure names the layer that grows first, a mean over settings
right, runs   the same over all runs
… 95 %        intervals: settings are drawn 1,000 times with replacement
above …       by how much it is more often right: points of those per cent
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashpoint.cli.run_words import select_runs
from flashpoint.cli.selection import provenance
from flashpoint.cli.table import Table, show
from flashpoint.early_warning import LEAST_LEAD, warning_of
from flashpoint.errors import UserError, command_errors
from flashpoint.lab.analysis.bias import Sums, Window
from flashpoint.lab.analysis.bias_breakdown import by_layer
from flashpoint.lab.analysis.lifetimes import SETTINGS
from flashpoint.lab.config import Config
from flashpoint.lab.stored_config import trained_config
from flashpoint.runs.metric_table import (
    ATTENDED_KEY_COSINE,
    ATTENDED_KEY_SIMILARITY,
    DELTA_ERROR,
    ENTROPY,
    INPUT_SIMILARITY,
    ROW_SUM,
    SCORE_MEAN,
    TIED_ROWS,
    W_K_NORM,
    W_Q_MEAN_KEY,
    W_Q_NORM,
    Metric,
)
from flashpoint.runs.run import Run

INDEX = Path("runs/reference/index.csv")
ROUNDED = {
    "flash_bf16", "flash_fp32", "flash_fp32_out", "flash_per_block", "flash_stochastic", "flash_untiled", "released",
    "sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_flash", "flex",
}  # fmt: skip
"""Names of attentions whose δ is of a rounded O."""
FEWEST = 6
"""Settings of each half that a measure needs: right in all of five is no rarer than one in sixteen of a fair coin,
counted at both ends."""
DRAWS = 1_000
LAYER_2, CHANCE = "layer 2", "chance"
CHOOSING = ("measure", "settings", "runs", "right", "right, runs")
TESTING = (
    *("rule", "settings", "runs", "right, runs", "right", "95 %"),
    *("above layer 2", "layer 2: 95 %", "above chance", "chance: 95 %"),
)
Float = NDArray[np.float64]
Measure = Callable[[Run, int], Float]
"""Takes a run and a step. Returns a value of each layer [L] from what was measured until that step; of trouble comes
the largest, and NaN is none. Raises UserError where the run has not measured it."""


@dataclass(frozen=True)
class Example:
    """One run."""

    setting: str
    right: Mapping[str, float]
    """By rule: 1 where it names the layer that grows first, 0 where another. Of chance the probability."""

    @property
    def chooses(self) -> bool:
        return hashlib.sha256(self.setting.encode()).digest()[0] % 2 == 0


def setting_of(run: Run) -> str:
    """Return what runs of one setting share: all that is not as the defaults and acts on the weights, but for the
    attention, the seed and how long the run is. A kind of text is one text, whichever files of it a machine had."""
    config, default = trained_config(run), Config()
    left_out = {"model.init_seed", "model.init_ulps", "train.order_seed"}
    if config.train.min_lr_ratio == 1:
        left_out.add("train.decay_steps")  # of a constant learning rate
    values = {
        key: attrgetter(key)(config)
        for key in SETTINGS
        if not key.startswith("detector.") and key not in left_out
        if attrgetter(key)(config) != attrgetter(key)(default)
    }
    text = run.manifest.data.fingerprint if config.data.source == "text" else config.data.source
    return json.dumps([values, text], sort_keys=True, default=str)


def last(metric: Metric, over: Callable[[Float], Float]) -> Measure:
    def measure(run: Run, until: int) -> Float:
        return over(_until(run, metric, until)[..., -1])

    return measure


def growth(run: Run, until: int) -> Float:
    """Return the largest growth of a head's W_Q in the second half of the steps so far, as a logarithm."""
    now, before = (_until(run, W_Q_NORM, step)[..., -1] for step in (until, until // 2))
    return _largest(np.log(now / before))


def mean(metric: Metric) -> Measure:
    """Return the measure that takes the mean over heads and observations, with the sign that comes with trouble."""

    def measure(run: Run, until: int) -> Float:
        values: Float = _until(run, metric, until).mean((1, 2))
        if metric.trouble == "away from 0":
            return np.abs(values)
        return -values if metric.trouble == "down" else values

    return measure


def of_errors(quantity: str) -> Measure:
    """Return the measure that is a field of :class:`~flashpoint.lab.analysis.bias_breakdown.LayerErrors`."""

    def measure(run: Run, until: int) -> Float:
        values: Float = getattr(by_layer(run, Window(until=until + 1)), quantity)
        return values

    return measure


def nats(run: Run, until: int) -> Float:
    """Return the bias of δ in nats."""
    sums = Sums.of(run, Window(until=until + 1))
    return np.array([sums.bias_in_nats(layer).mean() for layer in range(1, len(sums.by_step) + 1)])


def _until(run: Run, metric: Metric, until: int) -> Float:
    steps, values = run.measured_by_head(metric.name)
    if not (chosen := steps <= until).any():
        raise UserError(f"{run.where}: {metric.name} was not measured by step {until:,}; leave the run out")
    return values[..., chosen]


def _largest(of_heads: Float) -> Float:
    values: Float = of_heads.max(-1)
    return values


def _mean(of_heads: Float) -> Float:
    values: Float = of_heads.mean(-1)
    return values


MEASURES: Mapping[str, Measure] = {
    "W_Q, largest head": last(W_Q_NORM, _largest),
    "W_Q, mean head": last(W_Q_NORM, _mean),
    "W_Q, growth": growth,
    "W_K, largest head": last(W_K_NORM, _largest),
    "bias of δ in nats": nats,
    "bias of δ in standard errors": of_errors("z"),
    "bias / noise²": of_errors("bias_over_noise2"),
    "bias / variance": of_errors("bias_over_variance"),
    "sensitivity": of_errors("sensitivity"),
    "bias of δ": mean(DELTA_ERROR.bias),
    "noise of δ": mean(DELTA_ERROR.noise),
    "bias against the exact row sum": mean(ROW_SUM.bias),
    "noise against the exact row sum": mean(ROW_SUM.noise),
    "mean |S|": mean(SCORE_MEAN),
    "tied rows": mean(TIED_ROWS),
    "entropy": mean(ENTROPY),
    "inputs alike": mean(INPUT_SIMILARITY),
    "PK alike": mean(ATTENDED_KEY_SIMILARITY),
    "PK along the mean key": mean(ATTENDED_KEY_COSINE),
    "W_Q along the mean key": mean(W_Q_MEAN_KEY),
}


def example(run: Run) -> Example | None:
    """Return what each measure says of the run; None where no layer is known to have grown first."""
    try:
        warning = warning_of(run)
    except UserError:
        return None
    if warning is None or (run.onset is not None and warning.step > run.onset - LEAST_LEAD):
        return None
    right = {LAYER_2: float(warning.layer == 2), CHANCE: 1 / run.shape.n_layer}
    for name, measure in MEASURES.items():
        try:
            values = measure(run, warning.step // 2)
        except UserError:
            continue
        if not np.isnan(values).all():
            right[name] = float(np.nanargmax(values) + 1 == warning.layer)
    return Example(setting_of(run), right)


def counted(run: Run) -> bool:
    """Whether the attention is one of those, in all layers and heads, and the run a whole one."""
    whole = not run.watched and run.origin is None
    return whole and run.attention.name in ROUNDED and not run.attention.injected and run.attention.elsewhere is None


def by_setting(examples: Sequence[Example], rule: str) -> Float:
    """Return in which share of its runs the rule is right, for each setting that has it, in the order of settings."""
    found: dict[str, list[float]] = {}
    for one in examples:
        if rule in one.right:
            found.setdefault(one.setting, []).append(one.right[rule])
    return np.array([np.mean(found[setting]) for setting in sorted(found)])


def choosing(first: list[Example], second: list[Example]) -> tuple[list[tuple[str, ...]], str | None]:
    """Return the rows of all rules on the first half, and the measure that is chosen; None where none may be.

    Of the second half only how many settings and runs have a measure is looked at.
    """
    rows: list[tuple[str, ...]] = []
    shares: dict[str, float] = {}
    for rule in (*MEASURES, LAYER_2, CHANCE):
        have = [[one for one in half if rule in one.right] for half in (first, second)]
        settings = [len({one.setting for one in half}) for half in have]
        right = by_setting(first, rule)
        cells = (
            (f"{right.mean():.0%}", f"{np.mean([one.right[rule] for one in have[0]]):.0%}") if len(right) else ("", "")
        )
        rows.append((rule, f"{settings[0]}, {settings[1]}", f"{len(have[0])}, {len(have[1])}", *cells))
        if rule in MEASURES and min(settings) >= FEWEST:
            shares[rule] = float(right.mean())
    return rows, max(shares, key=lambda rule: shares[rule]) if shares else None


def testing(second: list[Example], chosen: str) -> list[tuple[str, ...]]:
    """Return the rows of the chosen measure and of what it is tested against, on the runs that have the measure."""
    examples = [one for one in second if chosen in one.right]
    rules = (chosen, LAYER_2, CHANCE)
    shares = np.stack([by_setting(examples, rule) for rule in rules])  # [rules, settings]
    drawn = np.random.default_rng(0).integers(shares.shape[1], size=(DRAWS, shares.shape[1]))
    means = shares[:, drawn].mean(-1)  # [rules, draws]
    rows = []
    for at, rule in enumerate(rules):
        cells = [f"{shares[at].mean():.0%}", interval(means[at])]
        for against in (1, 2):
            above = shares[at].mean() - shares[against].mean()
            cells += [f"{above:+.0%}", interval(means[at] - means[against])] if at < against else ["", ""]
        of_runs = f"{np.mean([one.right[rule] for one in examples]):.0%}"
        rows.append((rule, f"{shares.shape[1]}", f"{len(examples)}", of_runs, *cells))
    return rows


def interval(drawn: Float) -> str:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f"{low:.0%} to {high:.0%}"


def main() -> None:
    with INDEX.open() as lines:
        experiments = sorted({row["experiment"] for row in csv.DictReader(lines)})
    runs = [run for name in experiments for run in select_runs([f"{name}:*"]) if counted(run)]
    examples = [one for run in runs if (one := example(run))]
    first, second = ([one for one in examples if one.chooses is half] for half in (True, False))
    rows, chosen = choosing(first, second)
    tables = [Table(CHOOSING, rows, f"Chosen: {chosen or 'none'}.")]
    if chosen:
        tables.append(Table(TESTING, testing(second, chosen)))
    show(tables, "markdown", provenance(runs))


if __name__ == "__main__":
    with command_errors():
        main()
