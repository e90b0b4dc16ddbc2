"""Tables of the error of δ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.cli.table import Cell, Table, code, number, share, share_interval
from flashpoint.lab.analysis.bias import BEFORE_ONSET
from flashpoint.lab.analysis.bias_breakdown import AttentionErrors, HeadError, LayerErrors
from flashpoint.lab.analysis.bias_law import Point
from flashpoint.lab.analysis.drawn_targets import MEASURES, Group
from flashpoint.lab.analysis.localisation import SENSITIVITY, Localisation
from flashpoint.lab.analysis.trajectory import Trajectory
from flashpoint.lab.cli.interval_cells import interval, mean, mean_and_interval, plus_minus
from flashpoint.runs.run import Run


def heads(found: Sequence[tuple[Run, Sequence[HeadError]]], until: int | None) -> Table:
    """Return a row for each head of each run. ``until`` is as in ``Window``."""
    summed, related = (
        any(getattr(one, name) is not None for _, errors in found for one in errors) for name in ("summed", "biases")
    )
    columns = ["run", "head"]
    columns += ["Σ", "z", "positive steps", "95 % interval"] if summed else []
    columns += ["bias", "noise"] if related else []
    rows = []
    for run, errors in found:
        for one in errors:
            row: list[Any] = [code(run.name), f"L{one.layer}H{one.head}"]
            if summed:
                row += _summed(one)
            if related:
                row += [None if one.biases is None else plus_minus(one.biases, "+.1e"), number(one.noise, ".1e")]
            rows.append(row)
    notes = []
    if summed:
        notes.append("z: Σ in its own standard errors, were the errors of all tokens independent with mean zero.")
    if until is None and any(run.onset is not None for run, _ in found):
        notes.append(f"The last {BEFORE_ONSET:,} steps before an onset do not count; --until STEP counts others.")
    return Table(columns, rows, " ".join(notes))


def _summed(one: HeadError) -> list[Cell | None]:
    if one.summed is None:
        return [None] * 4
    told = one.summed
    return [
        number(told.total, "+.2e"),
        number(told.standard_errors, "+.2f"),
        share(told.positive, told.steps),
        share_interval(told.positive, told.steps),
    ]


_OF_HOTTEST = ("bias", "noise", "bias / noise²", SENSITIVITY, "bias / variance")


def layers(found: Sequence[LayerErrors]) -> list[Table]:
    """Return a row for each run, and for several runs a second table over all of them."""
    count = max(len(one.z) for one in found)
    names = [f"layer {layer + 1}" for layer in range(count)]
    rows = []
    for one in found:
        cells: list[Any] = [number(None if np.isnan(z) else float(z), "+.1f") for z in one.z]
        cells[one.hottest] = _bold(cells[one.hottest])
        cells += [None] * (count - len(cells))
        rows.append([code(one.run.name), one.run.verdict, *cells, *_hottest(one)])
    by_run = Table(
        ("run", "verdict", *names, *_OF_HOTTEST),
        rows,
        "Layers: z; the columns after them: of the hottest. z takes the tokens of a run as independent, ± its steps.",
    )
    if len(found) < 2:
        return [by_run]
    measured = _measured([one.z for one in found], count)
    sums = [number(float(z.sum() / len(z) ** 0.5) if len(z) else None, "+.1f") for z in measured]
    means: list[list[Any]] = [["Σz/√n", *sums]]
    for name, attribute, form in (
        ("bias / noise²", "bias_over_noise2", ".1f"),
        (SENSITIVITY, "sensitivity", ".1f"),
        ("bias / variance", "bias_over_variance", ".2f"),
    ):
        values = _measured([getattr(one, attribute) for one in found], count)
        means.append([name, *(mean_and_interval(column, form) if len(column) > 1 else None for column in values)])
    fewer = [f"{len(z)} in layer {layer}" for layer, z in enumerate(measured, 1) if len(z) < len(found)]
    note = f"Of {len(found)} runs δ takes part of O's error in fewer: {', '.join(fewer)}." if fewer else ""
    return [by_run, Table((f"all {len(found)} runs", *names), means, note)]


def _hottest(one: LayerErrors) -> list[Any]:
    cells: list[Any] = [plus_minus(one.biases, "+.1e"), number(one.variance**0.5, ".1e")]
    if not one.variance:
        return [*cells, None, None, None]
    return [
        *cells,
        number(float(one.bias_over_noise2[one.hottest]), ".1f"),
        number(float(one.sensitivity[one.hottest]), ".1f"),
        plus_minus(one.biases_over_variance, ".2f"),
    ]


def _measured(rows: Sequence[NDArray[np.float64]], count: int) -> list[NDArray[np.float64]]:
    """Return, for each layer, the values of the runs that have one."""
    return [
        np.array([row[layer] for row in rows if layer < len(row) and not np.isnan(row[layer])])
        for layer in range(count)
    ]


def _bold(cell: Cell) -> Cell:
    return Cell(cell.value, f"**{cell.text}**" if cell.text else "")


def metric(
    runs: Sequence[Run],
    verdicts: Sequence[Run],
    found: Sequence[NDArray[np.float64]],
    name: str,
    localised: Localisation,
) -> Table:
    """Return a row for each run, with the verdict and in bold the hottest layer of the run that knows them."""
    count, form = max(map(len, found)), ".1f" if name == SENSITIVITY else ".3g"
    rows = []
    for run, verdict, values in zip(runs, verdicts, found, strict=True):
        cells: list[Any] = [number(None if np.isnan(value) else float(value), form) for value in values]
        cells += [None] * (count - len(cells))
        if cells[verdict.hottest_layer - 1]:
            cells[verdict.hottest_layer - 1] = _bold(cells[verdict.hottest_layer - 1])
        rows.append([code(run.name), verdict.verdict, *cells])
    note = ""
    if localised.explosions > 1:
        interval = share_interval(localised.right, localised.explosions).text
        told = ", ".join(f"layer {layer} in {times}" for layer, times in localised.layers.items())
        share_told = share(localised.right, localised.explosions).text
        note = f"largest in the layer that explodes: {share_told} ({interval}); {told}"
    return Table(("run", "verdict", *(f"layer {layer + 1}" for layer in range(count))), rows, note)


def attentions(found: Sequence[AttentionErrors]) -> Table:
    """Return a row for each attention."""
    rows = []
    for one in found:
        ratios = one.biases / one.variances if one.variances.all() else None
        rows.append(
            [
                code(one.title),
                len(one.biases),
                mean(one.biases, "+.1e"),
                interval(one.biases, "+.1e"),
                number(float(one.variances.mean() ** 0.5), ".1e"),
                None if ratios is None else mean(ratios, ".2f"),
                None if ratios is None else interval(ratios, ".2f"),
            ]
        )
    columns = ("attention", "runs", "bias", "95 % interval of the bias", "noise", "bias / noise²", "95 % interval")
    return Table(columns, rows)


def metric_by_attention(groups: Mapping[str, Sequence[NDArray[np.float64]]]) -> Table:
    """Return a row for each attention, with the values [L] of its runs."""
    rows = [
        [code(title), len(runs), *(plus_minus(of_layer, ".3g") for of_layer in np.transpose(runs))]
        for title, runs in groups.items()
    ]
    return Table(("attention", "runs", *(f"L{layer + 1}" for layer in range(len(rows[0]) - 2))), rows)


def over_time(found: Trajectory) -> Table:
    """Return a row for each interval of time, with the bias of each layer."""
    rows = [
        [number * found.interval, len(values), *(plus_minus(of_layer, ".1e") for of_layer in values.T)]
        for number, values in enumerate(found.values)
    ]
    layers = range(1, found.values[0].shape[1] + 1)
    return Table(("from step", "runs", *(f"L{layer}" for layer in layers)), rows)


def weights(groups: Mapping[str, Sequence[Point]]) -> Table:
    """Return a row for each set of weights."""
    columns = (
        "weights",
        "roundings",
        "noise², largest / smallest",
        "bias / noise²",
        "95 % interval",
        "farthest rounding",
        "independent δ",
    )
    rows = []
    for name, points in groups.items():
        known = [point for point in points if not point.independent]
        apart = [point.factor for point in points if point.independent]
        independent = Cell({str(n): factor for n, factor in enumerate(apart, 1)}, ", ".join(f"{x:.1f}" for x in apart))
        rows.append([name, len(known), *_law(known), independent if apart else None])
    return Table(columns, rows)


def _law(known: Sequence[Point]) -> list[Any]:
    if not known:
        return [None] * 4
    variances, factors = [point.variance for point in known], [point.factor for point in known]
    middle = float(np.mean(factors))
    away = None
    if len(known) > 1 and middle:
        farthest = max(known, key=lambda point: abs(point.factor - middle))
        percent = 100 * (farthest.factor / middle - 1)
        away = Cell({"rounding": farthest.run.title, "percent": percent}, f"{percent:+.0f} %, `{farthest.run.title}`")
    ratio = number(max(variances) / min(variances), ".0f")
    return [ratio, mean(factors, ".1f"), interval(factors, ".1f"), away]


def targets(groups: Sequence[Group]) -> list[Table]:
    """Return a row for each digest's heaviest layer, and for several digests a second table with means by layer."""
    rows = []
    for group in groups:
        layer = group.heaviest_layer
        rows.append([_weights(group.first), layer, *(_measure(group, *what, layer) for what in MEASURES)])
    names = [f"{name}, {drawn}" for name, drawn in MEASURES]
    by_digest = Table(("weights and attention", "layer", *names), rows)
    complete = [group for group in groups if group.complete]
    if len(complete) < 2:
        return [by_digest]
    count = min(group.layers for group in complete)
    means = []
    for (name, drawn), heading in zip(MEASURES, names, strict=True):
        by_layer = [
            [
                float(np.mean(value))
                for group in complete
                if (value := group.measure(name, drawn, layer + 1)) is not None
            ]
            for layer in range(count)
        ]
        if (members := len(by_layer[0])) > 1:
            means.append([f"{heading} (n = {members})", *(mean_and_interval(values, ".2f") for values in by_layer)])
    columns = ("all with `model`", *(f"layer {layer + 1}" for layer in range(count)))
    return [by_digest, Table(columns, means)]


def _measure(group: Group, name: str, drawn: str, layer: int) -> Cell | None:
    values = group.measure(name, drawn, layer)
    if values is None:
        return None
    cell = plus_minus(values, ".2f")
    return cell if group.complete else Cell(cell.value, f"*{cell.text}*")


def _weights(run: Run) -> str:
    return f"`{run.title}`" + (" from step {1:,} of `{0}`".format(*run.origin) if run.origin else "")
