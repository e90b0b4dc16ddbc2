"""``flashpoint survival``: how long runs last, against a control, a setting, or the same seed elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from flashpoint.analysis.foretelling import Foretelling, foretellings
from flashpoint.analysis.provenance import provenance
from flashpoint.analysis.ratios import OnsetRatio, onset_ratios, pairs
from flashpoint.analysis.response import HARDWARE, Dose, exponents, responses
from flashpoint.analysis.severity import Severity, severity
from flashpoint.analysis.survival import (
    FEWEST,
    Lifetimes,
    by_variant,
    control_of,
    grouped,
    logrank_p,
    settings_of,
    side_by_side,
    usual_settings,
)
from flashpoint.analysis.verdicts import Tally, compared
from flashpoint.cli.cells import (
    code,
    interval,
    mean,
    median_and_range,
    number,
    share,
    share_interval,
    step,
    steps_between,
)
from flashpoint.cli.selection import (
    CONTROL,
    attention_names,
    control_option,
    ended,
    figure_option,
    format_option,
    refuse_unknown_control,
    runs_argument,
    tell_of_texts,
)
from flashpoint.cli.table import Cell, Table, is_shown, show
from flashpoint.runs.run import Run

NOT_REACHED = "not reached"
OF_THE_TEXT = ("model.vocab_size",)
"""Settings whose values cannot have one corpus: it is kept as tokens."""


def by_attention(
    groups: Sequence[Lifetimes], control: str, severities: Mapping[tuple[str, str], Severity] | None = None
) -> Table:
    """Return a row for each attention; within a setting, those that exploded most, and soonest, come first.
    Severities are by setting and label. Where no row has a p, its column is one of the further."""
    settings = any(group.setting for group in groups)
    columns = ["attention", "exploded", "95 % interval", "median onset", "longest stable"]
    columns.append(_of_logrank(control))
    if severities is not None:
        columns += ["rise of the loss", "largest W_Q at the end"]
    rows, tested = [], False
    for group in sorted(groups, key=_rank):
        against = control_of(group, groups, control)
        p = logrank_p(group, against) if against and against is not group else None
        tested |= p is not None
        severe = severities[group.setting, group.label] if severities is not None else None
        rows.append(
            [
                *([group.setting] if settings else []),
                code(group.label),
                _exploded(group),
                share_interval(len(group.onsets), group.count),
                step(group.median_onset, NOT_REACHED),
                _longest(group),
                number(p, ".2g"),
                *([median_and_range(severe.rises, "+.2f"), median_and_range(severe.norms, ".0f")] if severe else []),
            ]
        )
    further = () if tested else (_of_logrank(control),)
    return Table([*(["setting"] if settings else []), *columns], rows, further=further)


def why_no_p(groups: Sequence[Lifetimes], control: str) -> list[str]:
    """Return why rows have no p, a line for each reason; the control's own has none to have."""
    if control not in attention_names(groups):
        return [f"no {control} among these runs to test against; choose one with --control"]
    pairs = [(group, control_of(group, groups, control)) for group in groups]
    alone = sum(against is None for _, against in pairs)
    untested = [
        min(group.count, against.count)
        for group, against in pairs
        if against and against is not group and logrank_p(group, against) is None
    ]
    few = sum(runs < FEWEST for runs in untested)
    reasons = {
        f"no {control} of their setting among these runs; add one, or choose another --control": alone,
        f"a log-rank test needs {FEWEST} runs of each of the two": few,
        f"no run exploded while both it and {control} were under way": len(untested) - few,
    }
    return [f"{rows} of {len(groups)} rows have no p: {reason}" for reason, rows in reasons.items() if rows]


def _of_logrank(control: str) -> str:
    return f"log-rank p against {control}"


def _exploded(group: Lifetimes) -> Cell:
    counted = share(len(group.onsets), group.count)
    if not group.nonfinite:
        return counted
    return Cell({**counted.value, "nonfinite": group.nonfinite}, f"{counted.text}, {group.nonfinite} by NaN")


def _rank(group: Lifetimes) -> tuple[str, float, float]:
    median = float("inf") if group.median_onset is None else group.median_onset
    return group.setting, -len(group.onsets) / group.count, median


def _longest(group: Lifetimes) -> Cell:
    return step(int(group.censored.max()) if len(group.censored) else None, "none")


def by_setting(found: dict[str, list[Dose]], key: str) -> list[Table]:
    """Return a row for each attention and value; then, where every seed exploded, the exponents.

    Hardware is tested against the first one on which the attention ran.
    """
    rows: list[list[object]] = []
    laws = []
    for label, doses in found.items():
        for dose in doses:
            runs = dose.lifetimes
            low, high = runs.median_interval() if runs.median_onset is not None else (None, None)
            rows.append(
                [
                    code(label),
                    dose.value if isinstance(dose.value, str) else number(dose.value, "g"),
                    _exploded(runs),
                    step(runs.median_onset, NOT_REACHED),
                    None if low is None else steps_between(low, high, NOT_REACHED),
                    _longest(runs),
                ]
            )
            if key == HARDWARE:
                p = logrank_p(runs, doses[0].lifetimes) if dose is not doses[0] else None
                rows[-1].append(number(p, ".2g"))
        if per_seed := exponents(doses, key):
            laws.append([code(label), mean(per_seed, "+.2f"), interval(per_seed, "+.2f"), len(per_seed)])
    columns = ["attention", key, "exploded", "median onset", "95 % interval", "longest stable"]
    columns += ["log-rank p against the attention's first"] if key == HARDWARE else []
    doses_table = Table(columns, rows)
    law_table = Table(("attention", f"p of onset ∝ {key}^p", "95 % interval", "seeds"), laws)
    return [doses_table, law_table] if laws else [doses_table]


def by_seed(groups: Mapping[tuple[str, str], Mapping[int, OnsetRatio]]) -> list[Table]:
    """Return a row for each attention and setting: the ratio of each seed, and how many of them are later.

    Then, of attentions in several settings, how many are later of each seed. Pairs of one seed are not independent:
    all together have no interval.
    """
    seeds = sorted({seed for ratios in groups.values() for seed in ratios})
    of_label: dict[str, dict[str, Mapping[int, OnsetRatio]]] = {}
    for (setting, label), ratios in groups.items():
        of_label.setdefault(label, {})[setting] = ratios
    rows: list[list[object]] = []
    counts: list[list[object]] = []
    for label, settings in of_label.items():
        for setting, ratios in settings.items():
            later = compared(list(ratios.values()), "later")
            cells = [_ratio(ratios[seed]) if seed in ratios else None for seed in seeds]
            interval = share_interval(later.count, later.of) if later.of else None
            rows.append([code(f"{label} {setting}".strip()), *cells, _later(later), interval])
        if len(settings) > 1:
            of_seeds = [[ratios[seed] for ratios in settings.values() if seed in ratios] for seed in seeds]
            of_all = [one for own in of_seeds for one in own]
            counts.append([code(label), *(_later(compared(own, "later")) for own in [*of_seeds, of_all])])
    names = [f"seed {seed}" for seed in seeds]
    ratios_table = Table(("experiment", *names, "later", "95 % interval"), rows)
    return [ratios_table, Table(("attention, later", *names, "all"), counts)] if counts else [ratios_table]


def _later(tally: Tally) -> Cell | None:
    return share(tally.count, tally.of) if tally.of else None


def by_measure(found: Sequence[Foretelling]) -> Table:
    """Return a row for each measure; a negative correlation means: the larger, the sooner."""
    rows = [
        [
            one.measure,
            len(one.correlations),
            median_and_range(one.attentions, ".0f"),
            mean(one.correlations, "+.2f"),
            interval(one.correlations, "+.2f"),
        ]
        for one in found
    ]
    return Table(("measure", "seeds", "attentions a seed", "Spearman's ρ with the onset", "95 % interval"), rows)


def _ratio(one: OnsetRatio) -> Cell:
    value = {"ratio": one.ratio, "exploded": one.exploded, "control_exploded": one.control_exploded}
    if one.ratio is None:
        return Cell(value, "both hold")
    sign = ">" if not one.exploded else "" if one.control_exploded else "<"
    return Cell(value, f"{sign}{one.ratio:.2f}")


@click.command("survival")
@runs_argument
@control_option("test against")
@click.option("--by", "key", metavar="KEY", help="A number of the configuration, e.g. train.lr, or hardware.")
@click.option("--paired", multiple=True, metavar="RUN", help="Runs to compare with; repeatable.")
@click.option("--severity", "severe", is_flag=True, help="Rise of the loss and growth of W_Q beside the verdict.")
@click.option("--measures", is_flag=True, help="Which measure of an attention goes with its onset.")
@figure_option("the survival curves, or with --by the median onsets,")
@format_option
def command(
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

    Exploded of n with its 95 % interval (Clopper–Pearson), and how many of them by a NaN or an infinity; Kaplan–Meier
    median of the onset, the longest stable run, and the p of a log-rank test against the control. Why a row has no p
    is told on stderr; where none has, there is no column.

    --severity: how far the validation loss of the runs that exploded ended above its value before the onset, and the
    largest spectral norm of W_Q over all heads at the end of each run; median, least and most.

    --by KEY: the median onset at each value of a setting, from five runs on with its 95 % interval. Where every seed
    exploded at every value, the exponent p of onset ∝ value^p follows: its mean over seeds, with its 95 % interval.
    --by hardware: a row for each device, with the p of a log-rank test against the first one of the same attention.

    --paired RUN: a run's onset over the onset of the run of the same seed among RUN, a column for each seed. Where RUN
    are several of one seed, a run is paired with that of its own data and settings. A run that did not explode counts
    with its length: ">" where its pair exploded, "<" where the pair is the one that held. Later: of the pairs that can
    say, those whose run explodes after its pair, or not.

    --measures: Spearman's rank correlation over attentions between the onset and a measure, a mean over seeds. A run
    that did not explode ranks behind all onsets. On random inputs: the error of O and dQ of one pass in BF16 from FP64.
    In training: noise and bias of δ against the exact row sum, steps 1,000 to 2,999. W₁: the 1-Wasserstein distance of
    the weights from those of a twin (probes.weights_against). A run may have measured it alone and be shorter: the
    longest of the runs of one experiment has the onset.
    """
    _refuse_together(control=control, by=key, paired=paired, measures=measures)
    if severe and (key or paired or measures):
        raise click.UsageError("--severity: takes no --by, no --paired and no --measures")
    runs = ended(words, metrics=severe)
    if measures:
        if out:
            raise click.UsageError("--measures: draws nothing, drop --out")
        show(by_measure(foretellings(runs)), form, provenance(runs))
        return
    if paired:
        if out:
            raise click.UsageError("--paired: draws nothing, drop --out")
        controls = ended(paired)
        meaning = (
            "onset over that of its pair, of the same seed; > where the run did not explode, < where the pair did not"
        )
        show(by_seed(onset_ratios(runs, controls)), form, f"{provenance([*runs, *controls])}\n{meaning}")
        each = [pair for members in pairs(runs, controls).values() for pair in members.values()]
        tell_of_texts([pair for pair in each if _tokenised_alike(*pair)], "onset")
    elif key:
        found = responses(runs, key)
        show(by_setting(found, key), form, provenance(runs))
        if key not in OF_THE_TEXT:
            tell_of_texts([[run for dose in doses for run in dose.runs] for doses in found.values()], "onset")
        if out:
            from flashpoint.report.survival import draw_responses

            draw_responses(found, key).savefig(out)
    else:
        _against_control(runs, control, severe, out, form)


def _tokenised_alike(run: Run, control: Run) -> bool:
    return all(settings_of(run).get(name) == settings_of(control).get(name) for name in OF_THE_TEXT)


def _against_control(runs: Sequence[Run], asked: str | None, severe: bool, out: Path | None, form: str) -> None:
    groups, control = by_variant(runs), asked or CONTROL
    refuse_unknown_control(asked, groups)
    severities = {key: severity(members) for key, members in grouped(runs).items()} if severe else None
    usual = " ".join(f"{name}={value}" for name, value in usual_settings(runs).items())
    unless = f"\nunless a row says otherwise: {usual}" if usual else ""
    show(by_attention(groups, control, severities), form, provenance(runs) + unless)
    tell_of_texts(side_by_side(runs), "onset")
    if is_shown(_of_logrank(control)):
        for line in why_no_p(groups, control):
            print(line, file=sys.stderr)
    if out:
        from flashpoint.report.survival import draw_survival

        draw_survival(groups).savefig(out)


def _refuse_together(**options: object) -> None:
    given = [f"--{name}" for name, value in options.items() if value]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)}: give one of them")
