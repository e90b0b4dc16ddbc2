"""``flashpoint survival``: how long runs last, against a control, a setting, or the same seed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from flashpoint.cli.selection import ended_runs, format_option, provenance, runs_argument
from flashpoint.cli.table import is_shown, show
from flashpoint.errors import tell
from flashpoint.lab.analysis.foretelling import foretellings
from flashpoint.lab.analysis.lifetimes import (
    by_variant,
    grouped,
    lasting_of,
    settings_of,
    severity,
    side_by_side,
    usual_settings,
)
from flashpoint.lab.analysis.ratios import onset_ratios, pairs
from flashpoint.lab.analysis.response import responses
from flashpoint.lab.cli.shared_options import (
    control_among,
    control_option,
    figure_option,
    refuse_given,
    refuse_unknown_control,
    tell_of_texts,
)
from flashpoint.lab.cli.survival_tables import (
    LASTING,
    by_attention,
    by_measure,
    by_seed,
    by_setting,
    of_logrank,
    why_no_p,
)
from flashpoint.runs.run import Run

OF_THE_TEXT = ("model.vocab_size",)
"""Settings whose values cannot have one corpus: it is kept as tokens."""


@click.command("survival")
@runs_argument
@control_option("test against")
@click.option("--by", "key", metavar="KEY", help="A number of the configuration, e.g. train.lr, or hardware.")
@click.option("--paired", multiple=True, metavar="RUN", help="Runs to compare with; repeatable.")
@click.option("--severity", "severe", is_flag=True, help="Rise of the loss and growth of W_Q beside the verdict.")
@click.option("--measures", is_flag=True, help="Which measure of an attention goes with its onset.")
@figure_option("the survival curves, or with --by the median onsets,")
@format_option
@click.pass_context
def command(
    context: click.Context,
    words: tuple[str, ...],
    control: str | None,
    key: str | None,
    paired: tuple[str, ...],
    severe: bool,
    measures: bool,
    out: Path | None,
    form: str,
) -> None:
    """Count the runs that exploded, and when, a row for each attention and setting.

    Exploded of n, by the detector's rule, with its 95 % interval (Clopper–Pearson), and how many of them by a NaN or an
    infinity. Lasting: of these, the runs whose validation loss is still 0.3 nats above that before the onset after a
    common tail, 5,000 steps, or 1,000 from 50 M parameters on. Of runs with a shorter tail: how many are up at its end.
    Kaplan–Meier median of the onset, the shortest and the longest stable run, and the p of a log-rank test against the
    control. Why a row has no p is told on stderr; where none has, there is no column.

    --severity: how far the validation loss of the runs that exploded ended above its value before the onset. And the
    largest spectral norm of W_Q over all heads at the end of each run. Both have median, least and most.

    --by KEY: the median onset at each value of a setting, from five runs on with its 95 % interval. Where every seed
    exploded at every value, the exponent p of onset ∝ value^p follows: its mean over seeds, with its 95 % interval.
    --by hardware: a row for each device, with the p of a log-rank test against the first one of the same attention.

    --paired RUN: a run's onset over the onset of the run of the same seed among RUN, a column for each seed. Where any
    seed has several RUN, a run is paired with that of its own data and settings. A run that did not explode counts with
    its length: ">" where its pair exploded, "<" where the pair is the one that held. Later: of the pairs that can say,
    those whose run explodes after its pair, or holds beyond the pair's onset. Of an attention in several settings a
    second table counts them by seed.

    --measures: Spearman's rank correlation over attentions between the onset and a measure, a mean over seeds. A run
    that did not explode ranks behind all onsets. On random inputs: the error of O and dQ of one pass in BF16 from FP64.
    In training: noise and bias of δ against the exact row sum, steps 1,000 to 2,999. W₁: the 1-Wasserstein distance of
    the weights from those of a twin (probes.weights_against). A run may have measured it alone and be shorter: the
    longest of the runs of one experiment has the onset.
    """
    _refuse_together(control=control, by=key, paired=paired, measures=measures)
    if severe:
        refuse_given(context, "--severity", {"key", "paired", "measures"})
    if measures:
        refuse_given(context, "--measures", {"out"})
    if paired:
        refuse_given(context, "--paired", {"out"})
    runs = ended_runs(words, metrics=severe)
    if measures:
        show(by_measure(foretellings(runs)), form, provenance(runs))
        return
    if paired:
        controls = ended_runs(paired)
        meaning = (
            "onset over that of its pair, of the same seed; > where the run did not explode, < where the pair did not"
        )
        found_pairs = pairs(runs, controls)
        show(by_seed(onset_ratios(found_pairs)), form, f"{provenance([*runs, *controls])}\n{meaning}")
        rows = [members.values() for members in found_pairs.values()]
        tell_of_texts([[one for pair in row if _tokenised_alike(*pair) for one in pair] for row in rows], "onset")
    elif key:
        found = responses(runs, key)
        show(by_setting(found, key), form, provenance(runs))
        if key not in OF_THE_TEXT:
            tell_of_texts([[run for dose in doses for run in dose.runs] for doses in found.values()], "onset")
        if out:
            from flashpoint.lab.report.axes import save
            from flashpoint.lab.report.survival_figures import draw_responses

            save(draw_responses(found, key), out)
    else:
        _against_control(runs, control, severe, out, form)


def _tokenised_alike(run: Run, control: Run) -> bool:
    return all(settings_of(run).get(name) == settings_of(control).get(name) for name in OF_THE_TEXT)


def _against_control(runs: Sequence[Run], asked: str | None, severe: bool, out: Path | None, form: str) -> None:
    members, control = grouped(runs), control_among(asked, runs)
    groups = by_variant(members)
    refuse_unknown_control(asked and control, groups)
    lasting = {key: lasting_of(own) for key, own in members.items()} if is_shown(LASTING) else {}
    severities = {key: severity(own) for key, own in members.items()} if severe else None
    usual = " ".join(f"{name}={value}" for name, value in usual_settings(runs).items())
    unless = f"\nunless a row says otherwise: {usual}" if usual else ""
    show(by_attention(groups, control, lasting, severities), form, provenance(runs) + unless)
    tell_of_texts(side_by_side(members), "onset")
    if is_shown(of_logrank(control)):
        for line in why_no_p(groups, control):
            tell(line)
    if out:
        from flashpoint.lab.report.axes import save
        from flashpoint.lab.report.survival_figures import draw_survival

        save(draw_survival(groups), out)


def _refuse_together(**options: object) -> None:
    given = [f"--{name}" for name, value in options.items() if value]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)}: give one of them")
