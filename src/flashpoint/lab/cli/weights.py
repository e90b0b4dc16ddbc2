"""``flashpoint weights``: how far weights come apart where runs differ in one thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from flashpoint.cli.selection import answered, ended_runs, format_option, provenance, runs_argument
from flashpoint.cli.table import Cell, Table, show
from flashpoint.errors import UserError, notify
from flashpoint.lab.analysis.weight_distances import Apart, Distance, apart, by_difference, last_common_step
from flashpoint.lab.cli.interval_cells import plus_minus, ratio
from flashpoint.lab.cli.shared_options import figures_option, tell_of_texts

_FORM = ".2e"
_FURTHER = ("over the spread", "W₁ over the spread", "p of W₁ ∝ step^p")
"""Columns that few ask for."""


def table(groups: Mapping[str, Sequence[Apart]], step: int, controls: Sequence[str]) -> Table:
    """Return a row for each thing that runs differ in, with the distances after ``step`` steps, and over controls'."""
    columns = ["differs in", "pairs", "largest difference", _FURTHER[0], "W₁", *_FURTHER[1:]]
    columns += [f"W₁ over that of {control}" for control in controls]
    rows = []
    for kind, members in groups.items():
        found = [one.at(step) for one in members]
        growth = [one.growth for one in members if one.growth is not None]
        row = [
            kind,
            len(members),
            plus_minus([one.largest for one in found], _FORM),
            _over_spread(found, "largest", ".3g"),
            plus_minus([one.wasserstein for one in found], _FORM),
            _over_spread(found, "wasserstein"),
            plus_minus(growth, ".2f") if growth else None,
        ]
        for control in controls:
            others = {one.pairing: one.at(step).wasserstein for one in groups[control]}
            pairs = [(one.at(step).wasserstein, others[one.pairing]) for one in members if one.pairing in others]
            ratios = [own / other for own, other in pairs if own and other]  # equal weights have no ratio
            row.append(_over_control(ratios, len(members)) if ratios and kind != control else None)
        rows.append(row)
    told = f"after {step:,} steps; 95 % over seeds (Student's t"
    note = f"{told}; of ratios, of their logarithms)" if controls else f"{told})"
    return Table(columns, rows, note, _FURTHER)


def _over_spread(found: Sequence[Distance], name: str, form: str = _FORM) -> Cell | None:
    """Return the mean of a distance over the spread, of those that have one: gains that no step has changed do not."""
    values = [getattr(one, name) / one.spread for one in found if one.spread]
    return plus_minus(values, form) if values else None


def _over_control(ratios: Sequence[float], pairs: int) -> Cell:
    """Return the mean of ratios with its interval, and their number where some of the pairs have none."""
    cell = ratio(ratios, ".3g")
    if len(ratios) == pairs:
        return cell
    return Cell({**cell.value, "n": len(ratios)}, f"{cell.text}, n = {len(ratios)}")


@click.command("weights")
@runs_argument
@click.option("--at", type=click.IntRange(1), metavar="STEPS", help="Default: the last that all runs have.")
@click.option(
    "--control", "controls", multiple=True, metavar="DIFFERENCE",
    help="What the others' W₁ is divided by, by seed and data; repeatable.",
)  # fmt: skip
@figures_option("both distances over steps")
@format_option
def command(
    words: tuple[str, ...],
    at: int | None,
    controls: tuple[str, ...],
    folder: Path | None,
    form: str,
) -> None:
    """Print how far the weights of runs are from their twins', where the two differ in one thing.

    Such runs are trained with probes.weights_against=TWIN, and the twin with checkpoints.weights_interval=N. Both have
    the same batches and initial weights but for that thing: the attention, the precision, the initial weights, one
    weight, or the batch order.

    Largest difference: of one element. W₁: the 1-Wasserstein distance between the two distributions of values. Spread:
    the standard deviation of the twin's values. p: W₁ grows as steps to this power. Means over seeds, with 95 %
    intervals.

    --control DIFFERENCE: the table's name of a difference, e.g. "initial weights".
    """
    runs = ended_runs(words)
    answers = answered(runs, apart)
    runs, found = [run for run, _ in answers], [one for _, one in answers]
    groups = by_difference(found)
    for control in controls:
        if control not in groups:
            raise UserError(f"--control {control}: these runs differ in {'; '.join(groups)}; give one of them")
    show(table(groups, at or last_common_step(found), controls), form, provenance(runs))
    tell_of_texts([runs], "distance")
    if folder:
        from flashpoint.lab.report.weight_figures import write_figures

        notify(f"figures: {', '.join(map(str, write_figures(groups, provenance(runs), folder)))}")
