"""What ``flashpoint survival`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashpoint.cli.table import Cell, Table, code, number, share, share_interval, step
from flashpoint.lab.analysis.foretelling import Foretelling
from flashpoint.lab.analysis.lifetimes import FEWEST, Lasting, Lifetimes, Severity, control_of, logrank_p
from flashpoint.lab.analysis.ratios import OnsetRatio
from flashpoint.lab.analysis.response import HARDWARE, Dose, exponents
from flashpoint.lab.analysis.verdicts import Tally, compared
from flashpoint.lab.cli.interval_cells import interval, lasting_cell, mean, median_and_range, steps_between
from flashpoint.lab.cli.shared_options import attention_names

NOT_REACHED = "not reached"
STABLE = "stable runs, steps"
"""The column of the shortest and the longest run that did not explode."""


LASTING = "lasting"
"""The column of the second end point."""
Of = tuple[str, str]
"""Setting and label."""


def by_attention(
    groups: Sequence[Lifetimes],
    control: str,
    lasting: Mapping[Of, Lasting],
    severities: Mapping[Of, Severity] | None = None,
) -> Table:
    """Return a row for each attention; within a setting, those that exploded most, and soonest, come first.

    Where no row has a p, or none is in ``lasting``, that column is one of the further."""
    settings = any(group.setting for group in groups)
    columns = ["attention", "exploded", "95 % interval", LASTING, "median onset", STABLE]
    columns.append(of_logrank(control))
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
                lasting_cell(found) if (found := lasting.get((group.setting, group.label))) else None,
                step(group.median_onset, NOT_REACHED),
                _stable(group),
                number(p, ".2g"),
                *([median_and_range(severe.rises, "+.2f"), median_and_range(severe.norms, ".0f")] if severe else []),
            ]
        )
    further = [*([] if tested else [of_logrank(control)]), *([] if lasting else [LASTING])]
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


def of_logrank(control: str) -> str:
    """Return the name of the column of p."""
    return f"log-rank p against {control}"


def _exploded(group: Lifetimes) -> Cell:
    counted = share(len(group.onsets), group.count)
    if not group.nonfinite:
        return counted
    return Cell({**counted.value, "nonfinite": group.nonfinite}, f"{counted.text}, {group.nonfinite} by NaN")


def _rank(group: Lifetimes) -> tuple[str, float, float]:
    median = float("inf") if group.median_onset is None else group.median_onset
    return group.setting, -len(group.onsets) / group.count, median


def _stable(group: Lifetimes) -> Cell:
    """Return the lengths of the shortest and the longest run that did not explode."""
    if not len(group.censored):
        return Cell(None, "none")
    low, high = int(group.censored.min()), int(group.censored.max())
    return Cell({"shortest": low, "longest": high}, f"{low:,}" if low == high else f"{low:,} to {high:,}")


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
                    _stable(runs),
                ]
            )
            if key == HARDWARE:
                p = logrank_p(runs, doses[0].lifetimes) if dose is not doses[0] else None
                rows[-1].append(number(p, ".2g"))
        if per_seed := exponents(doses, key):
            laws.append([code(label), mean(per_seed, "+.2f"), interval(per_seed, "+.2f"), len(per_seed)])
    columns = ["attention", key, "exploded", "median onset", "95 % interval", STABLE]
    columns += ["log-rank p against the attention's first"] if key == HARDWARE else []
    doses_table = Table(columns, rows)
    law_table = Table(("attention", f"p of onset ∝ {key}^p", "95 % interval", "seeds"), laws)
    return [doses_table, law_table] if laws else [doses_table]


def by_seed(groups: Mapping[tuple[str, str], Mapping[int, OnsetRatio]]) -> list[Table]:
    """Return a row for each attention and setting: the ratio of each seed, and how many of them are later.

    Then, of attentions in several settings, how many are later of each seed.
    """
    of_label: dict[str, dict[str, Mapping[int, OnsetRatio]]] = {}
    for (setting, label), ratios in groups.items():
        of_label.setdefault(label, {})[setting] = ratios
    seeds = sorted({seed for ratios in groups.values() for seed in ratios})
    rows: list[list[object]] = []
    for label, settings in of_label.items():
        for setting, ratios in settings.items():
            cells = [_ratio(ratios[seed]) if seed in ratios else None for seed in seeds]
            later = compared(list(ratios.values()), "later")
            ends = share_interval(later.count, later.total) if later.total else None
            rows.append([code(f"{label} {setting}".strip()), *cells, _later(later), ends])
    tables = [Table(("experiment", *map(_of_seed, seeds), "later", "95 % interval"), rows)]
    several = {label: list(settings.values()) for label, settings in of_label.items() if len(settings) > 1}
    return [*tables, _later_by_seed(several, seeds)] if several else tables


def _later_by_seed(of_label: Mapping[str, Sequence[Mapping[int, OnsetRatio]]], seeds: Sequence[int]) -> Table:
    """Return a row for each attention: of the pairs of each seed, how many are later. Pairs of one seed are not
    independent, so that all together have no interval."""
    rows = []
    for label, settings in of_label.items():
        pairs = [[ratios[seed] for ratios in settings if seed in ratios] for seed in seeds]
        pairs.append([one for of_seed in pairs for one in of_seed])
        rows.append([code(label), *(_later(compared(some, "later")) for some in pairs)])
    return Table(("attention, later", *map(_of_seed, seeds), "all"), rows)


def _of_seed(seed: int) -> str:
    return f"seed {seed}"


def _later(tally: Tally) -> Cell | None:
    return share(tally.count, tally.total) if tally.total else None


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
