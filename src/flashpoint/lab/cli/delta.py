"""``flashpoint delta``: the error of δ, by head, layer, attention, weights or targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from flashpoint.cli.run_words import open_run
from flashpoint.cli.selection import answered, ended_runs, format_option, provenance, runs_argument
from flashpoint.cli.table import Table, show
from flashpoint.errors import UserError
from flashpoint.files import atomic_write, check_target
from flashpoint.lab.analysis.bias import Window
from flashpoint.lab.cli import delta_tables as tables
from flashpoint.lab.cli.shared_options import figure_option, refuse_given, tell_of_texts
from flashpoint.runs.metric_table import DELTA_ERROR, ROW_SUM, DeltaErrorMetrics
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Options:
    """What the command line chose."""

    window: Window
    error: DeltaErrorMetrics
    layers: Sequence[int] | None
    metric: str | None
    verdicts: str | None
    out: Path | None
    every: int
    variant: Path | None


def _by_head(runs: Sequence[Run], options: Options) -> list[Table]:
    from flashpoint.lab.analysis.bias_breakdown import by_head

    found = answered(runs, lambda run: by_head(run, options.error, options.layers, options.window))
    return [tables.heads(found, options.window.until)]


def _by_layer(runs: Sequence[Run], options: Options) -> list[Table]:
    if options.metric:
        return [_metric_by_layer(runs, options.metric, options)]
    from flashpoint.lab.analysis.bias_breakdown import by_layer

    return tables.layers([found for _, found in answered(runs, lambda run: by_layer(run, options.window))])


def _metric_by_layer(runs: Sequence[Run], metric: str, options: Options) -> Table:
    from flashpoint.lab.analysis.localisation import by_layer, localisation

    def judged(run: Run) -> tuple[Run, NDArray[np.float64]]:
        verdict, layers = run, by_layer(metric, run, options.window)
        if options.verdicts is not None:
            between = "" if options.verdicts.endswith(":") else "/"
            verdict = open_run(f"{options.verdicts}{between}{run.name}")
        if verdict.hottest_layer > len(layers):
            told = f"{verdict.where}: its hottest layer is {verdict.hottest_layer}"
            raise UserError(f"{told}, and {run.where} has {len(layers)}; give the verdicts of the same runs")
        return verdict, layers

    found = answered(runs, judged)
    verdicts, values = [one for _, (one, _) in found], [layers for _, (_, layers) in found]
    return tables.metric([run for run, _ in found], verdicts, values, metric, localisation(verdicts, values))


def _by_attention(runs: Sequence[Run], options: Options) -> list[Table]:
    if options.metric:
        return [_metric_by_attention(runs, options.metric, options.window)]
    from flashpoint.lab.analysis.bias_breakdown import by_attention

    return [tables.attentions(by_attention(runs, options.error, options.layers, options.window))]


def _metric_by_attention(runs: Sequence[Run], metric: str, window: Window) -> Table:
    from flashpoint.lab.analysis.localisation import by_layer

    groups: dict[str, list[NDArray[np.float64]]] = {}
    for run, layers in answered(runs, lambda run: by_layer(metric, run, window)):
        groups.setdefault(run.title, []).append(layers)
    counts = sorted({len(layers) for members in groups.values() for layers in members})
    if len(counts) > 1:
        raise UserError(f"--metric {metric}: runs of {counts[0]} and of {counts[-1]} layers; give runs of one depth")
    return tables.metric_by_attention(groups)


def _by_weights(runs: Sequence[Run], options: Options) -> list[Table]:
    from flashpoint.lab.analysis.bias_law import by_weights

    groups = by_weights(runs, options.window)
    if options.out:
        from flashpoint.lab.report.axes import save
        from flashpoint.lab.report.bias_law_figure import draw_law

        save(draw_law(groups), options.out)
    return [tables.weights(groups)]


def _by_time(runs: Sequence[Run], options: Options) -> list[Table]:
    import yaml

    from flashpoint.lab.analysis.trajectory import trajectory

    found = trajectory(runs, options.error, options.every)
    if options.variant:
        text = yaml.safe_dump(found.variant(options.variant.stem), sort_keys=False, default_flow_style=None, width=120)
        with atomic_write(options.variant, durable=False) as partial:
            partial.write_text(text, encoding="utf-8")
    return [tables.over_time(found)]


def _by_targets(runs: Sequence[Run], _options: Options) -> list[Table]:
    from flashpoint.lab.analysis.drawn_targets import by_digest

    return tables.targets(by_digest(runs))


ERRORS = {"delta_error": DELTA_ERROR, "row_sum": ROW_SUM}
"""Errors of δ as ``--of`` names them: against δ of an FP32 O, and against the exact row sum."""
WINDOW = ("since", "until", "last")
KINDS: dict[str, tuple[Callable[[Sequence[Run], Options], list[Table]], tuple[str, ...]]] = {
    "head": (_by_head, (*WINDOW, "error", "layers")),
    "layer": (_by_layer, (*WINDOW, "metric", "verdicts")),
    "attention": (_by_attention, (*WINDOW, "error", "layers", "metric")),
    "weights": (_by_weights, (*WINDOW, "out")),
    "targets": (_by_targets, ()),
    "time": (_by_time, ("error", "every", "variant")),
}
"""What has a row each: how its tables are made, and the parameters of :func:`command` that it takes."""
POOLED = ("layer", "attention", "time")
"""Kinds of which a table has means over runs."""


def _layers(_context: click.Context, _option: click.Parameter, value: str | None) -> list[int] | None:
    try:
        return None if value is None else [int(layer) for layer in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value}: give layers from 1 with commas between, e.g. 2,3") from None


@click.command("delta")
@runs_argument
@click.option("--by", "kind", type=click.Choice(list(KINDS)), default="head", show_default=True, help="What has a row.")
@click.option("--of", "error", type=click.Choice(list(ERRORS)), help="Which error.  [default: delta_error]")
@click.option(
    "--layers",
    callback=_layers,
    metavar="LAYER,...",
    help="Layers, with commas between.  [default: the hottest; by attention all]",
)
@click.option("--since", type=int, metavar="STEP", help="First step that counts.  [default: 0]")
@click.option(
    "--until",
    type=int,
    metavar="STEP",
    help="First step that no longer counts.  [default: 1,000 before the onset, or the end]",
)
@click.option("--last", type=int, metavar="STEPS", help="Count only the last so many of these steps.")
@click.option("--metric", metavar="NAME", help="With --by layer or attention: a metric of heads, or sensitivity.")
@click.option(
    "--verdicts", metavar="FOLDER|EXPERIMENT:", help="With --metric: where runs of the same names have the verdicts."
)
@figure_option("with --by weights the biases")
@click.option("--every", type=click.IntRange(1), metavar="STEPS", help="With --by time: of a row.  [default: 500]")
@click.option(
    "--variant",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.yaml",
    help="With --by time: write an attention variant that injects these biases.",
)
@format_option
@click.pass_context
def command(
    context: click.Context,
    words: tuple[str, ...],
    kind: str,
    error: str | None,
    layers: list[int] | None,
    since: int | None,
    until: int | None,
    last: int | None,
    metric: str | None,
    verdicts: str | None,
    out: Path | None,
    every: int | None,
    variant: Path | None,
    form: str,
) -> None:
    """Print the error of δ = Σ dO·O before the onset: low precision (lp) minus high precision (hp).

    --by head: the heads of the hottest layer. Σ (δ_lp − δ_hp) over all observed steps, and z, the same in units of its
    own standard error if the errors of all tokens were independent with mean zero. The share of observed steps at which
    the sum over tokens was positive. Bias and noise (root mean square) in units of |dO|·|O|.

    --by layer: z of each layer, the hottest in bold. Of the hottest layer bias, noise and bias over noise². In nats of
    the loss summed over the step's N tokens, the sensitivity N·|dO|·|O|, and the mean of N·error over its mean square.
    Several runs have a second table: Σz/√n, and means over the runs.

    --by layer --metric NAME: the mean of a metric over heads and steps, or the sensitivity. A line says in how many
    explosions the layer that explodes has the largest.

    --by attention: bias, noise and bias over noise², means over steps, heads and layers, with intervals over runs.

    --by attention --metric NAME: the mean of a metric over heads, steps and runs by layer, with intervals over runs.

    --by weights: RUN... are several attentions on the same weights, replayed with from_step and train.lr=0. Bias over
    noise² as a mean over the roundings, and the rounding farthest from the mean. A δ whose error is not that of the O
    that the loss sees, drawn anew or with a residual, has a column of its own.

    --by targets: variance and bias by what the observed sequences were to predict (probes.targets), over the variance
    with the model's targets. Where that was not measured, the bias is over its own variance, in italics, and in no
    mean.

    --by time: the bias of each layer in units of |dO|·|O|. It is a mean over heads, observed steps and the runs that
    have no onset yet, as long as they are no fewer than those that have one. --variant FILE.yaml writes exact row sums
    with these biases injected: attn.delta_error.trajectory.

    All intervals are 95 %.
    """
    make, taken = KINDS[kind]
    refuse_given(context, f"--by {kind}", {name for _, names in KINDS.values() for name in names if name not in taken})
    if verdicts and not metric:
        raise click.UsageError("--verdicts: needs --metric")
    if kind == "attention" and metric and (error or layers):
        raise click.UsageError("--by attention --metric: takes no --of and no --layers")
    if variant:
        check_target(variant, "--variant", ".yaml")
    runs = ended_runs(words, metrics=True)
    options = Options(
        Window(since or 0, until, last),
        ERRORS[error or "delta_error"],
        layers,
        metric,
        verdicts,
        out,
        every or 500,
        variant,
    )
    show(make(runs, options), form, provenance(runs))
    if kind in POOLED:
        tell_of_texts([runs], "error of δ")
