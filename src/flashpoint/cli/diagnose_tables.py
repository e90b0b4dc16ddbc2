"""What ``flashpoint diagnose`` prints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flashpoint.cli.diagnose_advice import (
    FIXED,
    Exchange,
    advice,
    exchange_for,
    is_flashpoints,
    of_other_outputs,
    suspects,
    to_be_sure_of,
    told_first,
    verdict,
)
from flashpoint.cli.diagnose_run import NOT_RECORDED, Growth
from flashpoint.cli.table import ALL, Cell, Table, number
from flashpoint.diagnosis.measure_table import (
    ALONG_MEAN_KEY,
    DEAD_ROWS,
    DELTA,
    FOLLOWS_OUT,
    GRAD_Q,
    LARGEST_SCORE,
    OUT_ERROR,
    SCORE_OFFSET,
    SEQUENCES,
    TIES,
    Measure,
)
from flashpoint.errors import counted

if TYPE_CHECKING:
    from torch import Tensor

    from flashpoint.diagnosis.delta_bias import DeltaBias, DeltaSample
    from flashpoint.diagnosis.finding import Finding
    from flashpoint.diagnosis.verdict import Diagnosis

_SCREEN = 24
"""Lines of a terminal, unless somebody makes it larger: with a row for more heads the first line is out of sight."""
_STANDARD_ERRORS = Measure(
    name="standard_errors",
    label="standard errors",
    trouble="away from 0",
    sentence="The bias over its standard error, which is that of a ratio of sums, from the spread between sequences.",
)
BIAS_COLUMNS = {
    DELTA.bias.label: DELTA.bias,
    _STANDARD_ERRORS.label: _STANDARD_ERRORS,
    DELTA.sum.axis: DELTA.sum,
    DELTA.noise.label: DELTA.noise,
}
"""What is shown of δ's error over several sequences, by column."""
COLUMNS = {
    FOLLOWS_OUT: ".2f",
    OUT_ERROR: ".1e",
    GRAD_Q.error: ".1e",
    ALONG_MEAN_KEY: ".0%",
    DEAD_ROWS: ".1%",
    TIES: ".1%",
    LARGEST_SCORE: ".3g",
    SCORE_OFFSET: ".2g",
}
"""The other measures that are shown, each with the format of its values."""


def heading(diagnoses: Sequence[Diagnosis], attention: str | None, weights: str) -> str:
    """Return what was diagnosed: the attention, the weights, layers, sequences."""
    from flashpoint.runs.migrations import UNSEEN

    sequences, heads, lengths, sizes = zip(*(diagnosis.call.q.shape for diagnosis in diagnoses), strict=True)
    recorded = ", ".join(dict.fromkeys(diagnosis.call.attention for diagnosis in diagnoses))
    given = "these tensors" if recorded == UNSEEN else f"what {recorded} was given"
    name = f"{attention} on {given}" if attention else recorded
    how = "called anew" if diagnoses[0].probed else "as recorded"
    told = (
        f"{name}, {how}: {weights}, {counted('layer', len(diagnoses))} of {counted('head', *heads)}, "
        f"{counted('sequence', *sequences)} of {counted('token', *lengths)}, d {' to '.join(_least_and_most(sizes))}"
        f"{_otherwise_called(diagnoses)}"
    )
    bias = diagnoses[0].bias
    return told if bias is None or str(bias) == counted("sequence", sequences[0]) else f"{told}; bias of δ: {bias}"


def _otherwise_called(diagnoses: Sequence[Diagnosis]) -> str:
    """Return which layers were called in another form than softmax(QKᵀ/√d), causal: no finding judges what a call was
    told."""
    layers: dict[str, list[str]] = {}
    for diagnosis in diagnoses:
        for what in diagnosis.otherwise_called:
            layers.setdefault(what, []).append(str(diagnosis.call.layer))
    every = {what for what, numbers in layers.items() if len(numbers) == len(diagnoses)}
    where = {
        what: "every layer" if what in every else f"layer {', '.join(numbers)}" for what, numbers in layers.items()
    }
    return "".join(f"; {what} in {numbers}" for what, numbers in where.items())


def _least_and_most(numbers: Sequence[int]) -> list[str]:
    return [str(number) for number in sorted({min(numbers), max(numbers)})]


def delta_heading(samples: Mapping[int, DeltaSample]) -> str:
    """Return that only errors of δ are left, and of what."""
    from flashpoint.diagnosis.call import by_identity

    sample = next(iter(samples.values()))  # what was measured beside each other has the same steps in each layer
    first, last = min(sample.steps), max(sample.steps)
    steps = f"steps {first:,} to {last:,}" if first < last else f"step {last:,}"
    different = len(by_identity(sample.identities))
    repeated = f", {different:,} different," if different < len(sample.steps) else ""
    return (
        f"δ alone, the tensors have been deleted: {counted('layer', len(samples))} of {counted('head', sample.heads)}, "
        f"{counted('sequence', len(sample.steps))}{repeated} of {steps}"
    )


def delta_tables(
    samples: Mapping[int, DeltaSample],
    later: str = "",
    growth: Growth | None = None,
    attentions: str = "",
    modules: Mapping[int, str] = MappingProxyType({}),
) -> tuple[str, list[Table]]:
    """Return what was found, and the tables: the findings, where there are some, and the bias of δ in each head.

    Args:
        later, growth: as of :func:`tables`.
        attentions: names of the attentions.
        modules: names of the modules that call them, by layer.
    """
    from flashpoint.diagnosis.call import WITH_FP16_INSIDE
    from flashpoint.diagnosis.delta_bias import DeltaBias
    from flashpoint.diagnosis.verdict import delta_finding

    biases = {layer: DeltaBias.of_samples([sample]) for layer, sample in samples.items()}
    findings = [one for layer, bias in biases.items() if (one := delta_finding(layer, bias))]
    measured: list[list[Cell | int]] = [
        [layer, head + 1, *(_cell(values, head, form) for values, form in _bias_columns(bias))]
        for layer, bias in biases.items()
        for head in range(samples[layer].heads)
    ]
    known = {layer: bias for layer, bias in biases.items() if bias is not None}
    unjudged, unseen = too_few(known, ""), "" if findings else _unseen(known, "")
    measures = Table(("layer", "head", *BIAS_COLUMNS), measured, _joined(later, unjudged, unseen))
    lacking = _unjudged_in(known)
    nothing = f"Nothing found, and {lacking} was not judged." if unjudged else "Nothing found."
    nothing = "δ was not judged." if unjudged and lacking == "δ" else nothing
    stabilizes = WITH_FP16_INSIDE not in attentions and not is_flashpoints(attentions)
    exchange = Exchange(FIXED, stabilizes, is_there=attentions == FIXED)
    return _told(findings, growth, measures, nothing, bool(unjudged or unseen), "", modules, exchange)


def tables(
    diagnoses: Sequence[Diagnosis],
    more: str,
    attention: str | None,
    later: str = "",
    growth: Growth | None = None,
    bad_loss: str = "",
) -> tuple[str, list[Table]]:
    """Return what was found and what to try, in a sentence, and the tables: what W_Q did, the findings, and the
    measures of heads.

    Args:
        more: how a user gets more sequences, with ``{}`` for their number.
        attention: that was called anew; None where the results are those that were recorded.
        later: what came after the tensors in their run.
        growth: what W_Q did there.
        bad_loss: which loss of it was no finite number; told where nothing is found, in place of what else could be.
    """
    findings = [finding for diagnosis in diagnoses for finding in diagnosis.findings]
    measured = [[diagnosis.call.layer, *row] for diagnosis in diagnoses for row in _measures(diagnosis)]
    biases = {diagnosis.call.layer: diagnosis.bias for diagnosis in diagnoses if diagnosis.bias is not None}
    coarse, hidden = _coarse(diagnoses), _hidden(diagnoses)
    unjudged = _joined(too_few(biases, more), of_other_outputs(diagnoses))
    unseen = "" if findings or bad_loss else _unseen(biases, more)
    beyond = " beyond what FP32 itself may do" if coarse else ""
    others = any(one.call.other_gradients for one in diagnoses)
    lacking = "gradients were" if others else f"{_unjudged_in(biases)} was"
    some_alone = later.startswith(NOT_RECORDED)
    where = " in the attentions that were recorded (why others were not: below)" * some_alone
    but = f", and {lacking} not judged" if unjudged else ""
    nothing = f"Nothing found{where}{beyond}{but}{bad_loss and f': {bad_loss}'}."
    note = _joined(later, coarse, unjudged, hidden, unseen, _scaled(diagnoses))
    measures = Table(("layer", "head", *BIAS_COLUMNS, *(measure.label for measure in COLUMNS)), measured, note)
    suspected = suspects(diagnoses, attention)
    modules = {call.layer: call.module for call in (one.call for one in diagnoses) if call.module}
    to_be_sure = not bad_loss and bool(unjudged or hidden or unseen)
    return _told(findings, growth, measures, nothing, to_be_sure, suspected, modules, exchange_for(diagnoses))


def _told(
    findings: Sequence[Finding],
    growth: Growth | None,
    measures: Table,
    nothing: str,
    to_be_sure: bool,
    suspected: str,
    modules: Mapping[int, str],
    exchange: Exchange,
) -> tuple[str, list[Table]]:
    """Return the sentence, ``nothing`` where nothing was found, and the tables."""
    first, beside = told_first(findings, growth)
    before = [growth.table] if growth else []
    if findings:
        rows = [[one.layer, _heads(one), one.kind, one.text] for one in findings]
        inherited = {one.inherited for one in findings if one.kind == "nonfinite"}
        note = advice({one.kind for one in findings}, suspected, exchange, inherited)
        before.append(Table(("layer", "heads", "finding", "what shows it"), rows, note, instead=Table((), [])))
    else:
        ignited = _UNSEEN_CAUSE if growth and growth.warned else ""
        note = _joined(measures.note, ignited, to_be_sure_of(exchange) if to_be_sure or ignited else "")
        measures = dataclasses.replace(measures, note=note)
    lines = [f"- {_place(one)}, {one.kind}: {one.text}" for one in first]
    lines += [f"- {_place(one)}, {one.kind}; its W_Q did not grow" for one in beside]
    said = ["\n".join(lines), growth.words if growth else "", note if findings else ""]
    captured = {row[0] for row in measures.rows}
    return verdict(first, growth, captured, suspected, nothing, modules, exchange), [
        *before,
        _measures_shown(measures, findings, first, growth, said, modules),
    ]


def _heads(finding: Finding) -> str:
    return ", ".join(map(str, finding.heads))


def _place(finding: Finding) -> str:
    return f"layer {finding.layer}, head{'s' * (len(finding.heads) > 1)} {_heads(finding)}"


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _measures_shown(
    measures: Table,
    findings: Sequence[Finding],
    first: Sequence[Finding],
    growth: Growth | None,
    said: Sequence[str],
    modules: Mapping[int, str],
) -> Table:
    """Return the measures with the module of each layer, where some are known, and with what was found and what W_Q did
    in each head.

    People are shown five columns of the heads of the ``first`` findings and of the one that grew most. Without findings
    it is all heads, or if they are more than a screen has lines the one of each layer whose bias is the surest. Below
    them stands what is ``said``.
    """
    found: dict[tuple[int, int], list[str]] = {}
    for one in findings:
        for head in one.heads:
            found.setdefault((one.layer, head), []).append(one.kind)
    by_head = growth.by_head if growth else {}
    named = ("module",) if modules else ()
    columns = (*measures.columns[:2], *named, "finding", *measures.columns[2:], "W_Q growth")
    rows: list[list[Any]] = [
        [
            *(layer, head, *(modules.get(layer, "") for _ in named), ", ".join(found.get((layer, head), []))),
            *(*cells, number(by_head.get((layer, head)), ".2f")),
        ]
        for layer, head, *cells in measures.rows
    ]
    whole = dataclasses.replace(measures, columns=columns, rows=rows)
    places_first = {(one.layer, head) for one in first for head in one.heads}
    if growth and growth.layer is not None:
        places_first.add((growth.layer, growth.head))
    some = [row for row in rows if (row[0], row[1]) in places_first]
    some = some or (rows if len(rows) <= _SCREEN else _surest(rows, columns.index(_STANDARD_ERRORS.label)))
    last = "W_Q growth" if by_head else _STANDARD_ERRORS.label
    places = [columns.index(name) for name in ("layer", "head", *named, "finding", DELTA.bias.label, last)]
    left = f"--columns {ALL} shows {len(columns) - len(places)} more columns"
    if len(some) < len(rows):
        left += f" and all {len(rows)} heads"
    shown = Table(
        [columns[at] for at in places],
        [[row[at] for at in places] for row in some],
        "\n\n".join(part for part in (*said, measures.note, f"{left}.") if part),
    )
    return dataclasses.replace(whole, instead=shown)


def _surest(rows: Sequence[list[Any]], at: int) -> list[list[Any]]:
    """Return of each layer the row of the head whose number in this column is the largest, without its sign."""
    of_layer = dict[int, list[Any]]()
    for row in rows:
        other = of_layer.setdefault(row[0], row)
        if abs(row[at].value or 0.0) > abs(other[at].value or 0.0):
            of_layer[row[0]] = row
    return list(of_layer.values())


def _measures(diagnosis: Diagnosis) -> list[list[Cell | int]]:
    """Return a row for each head."""
    from flashpoint.diagnosis.measures import over_sequences

    together = over_sequences(diagnosis.measures)
    columns = _bias_columns(diagnosis.bias)
    columns += [(together.get(measure.name), form) for measure, form in COLUMNS.items()]
    return [
        [head + 1, *(_cell(values, head, form) for values, form in columns)]
        for head in range(diagnosis.call.q.shape[1])
    ]


def _cell(values: Tensor | None, head: int, form: str) -> Cell:
    """Return the value of a head; an empty cell where it is not known."""
    value = math.nan if values is None else float(values[head])
    return number(None if math.isnan(value) else value, form)


def _bias_columns(bias: DeltaBias | None) -> list[tuple[Tensor | None, str]]:
    """Return the values [H] of the columns of δ's bias, and how they are written."""
    if bias is None:
        return [(None, "")] * len(BIAS_COLUMNS)
    sure = bias.mean / bias.error.clamp_min(1e-300) if bias.sequences > 1 else None
    return [(bias.mean, "+.1e"), (sure, "+.1f"), (bias.nats, "+.1e"), (bias.noise, ".1e")]


def _coarse(diagnoses: Sequence[Diagnosis]) -> str:
    """Return in which layers scores are so large that FP32 itself may change weights."""
    from flashpoint.diagnosis.finding import FP32_COARSE

    layers = {one.call.layer: float(one.fp32_error.max()) for one in diagnoses}
    coarse = [
        f"layer {layer} by up to {error:.1%}" if error < 1 else f"layer {layer} by any amount"
        for layer, error in layers.items()
        if error > FP32_COARSE
    ]
    if not coarse:
        return ""
    told = "; ".join(coarse)
    return f"At such scores FP32 itself may change weights, in {told}: smaller errors cannot be told from it there."


def _scaled(diagnoses: Sequence[Diagnosis]) -> str:
    """Return what a GradScaler has done to nats: they are of the loss as backward was called on it."""
    import torch

    if not any(one.bias is not None and one.call.q.dtype == torch.float16 for one in diagnoses):
        return ""
    return (
        "The tensors are FP16: if a GradScaler scaled the loss, or flashpoint.stabilize dO, errors of δ in nats are as "
        "many times too large."
    )


def _hidden(diagnoses: Sequence[Diagnosis]) -> str:
    """Return in which heads δ is not judged because their scores are rounded."""
    heads = {one.call.layer: (one.hidden.nonzero().flatten() + 1).tolist() for one in diagnoses}
    told = [f"layer {layer}: {', '.join(map(str, some))}" for layer, some in heads.items() if some]
    if not told:
        return ""
    return (
        "Rounded scores move dQ as an error of δ does. Therefore δ was not judged in these heads of "
        f"{'; '.join(told)}. --attention judges it, which asks the attention for row sums of dS."
    )


def _unjudged_in(biases: Mapping[int, DeltaBias]) -> str:
    """Return what :func:`too_few` tells of, in words: δ, or that of some layers, as where the first ones are frozen."""
    from flashpoint.diagnosis.finding import FEW

    layers = [layer for layer, bias in biases.items() if not bias.judges or bias.fewest < FEW]
    if len(layers) in (0, len(biases)):
        return "δ"
    return f"δ of layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def too_few(biases: Mapping[int, DeltaBias], more: str) -> str:
    """Return why δ is not judged in some layer: no dQ, or too few sequences, with how many to measure.

    Args:
        biases: by layer.
        more: how a user gets more sequences, with ``{}`` for their number; empty where there is no way.
    """
    from flashpoint.diagnosis.finding import FEW

    parts = []
    if without := {layer: bias for layer, bias in biases.items() if not bias.judges}:
        layer, worst = max(without.items(), key=lambda one: float(one[1].mean.abs().max()))
        head = int(worst.mean.abs().argmax())
        size, sure = (float(x[head]) for x in (worst.mean, worst.mean / worst.error.clamp_min(1e-300)))
        spread = f", {abs(sure):.1f} standard errors" if worst.fewest >= FEW else ""
        parts.append(
            f"If δ is rowsum(dO∘O), its bias is {size:+.1e} of |dO||O| in head {head + 1} of layer {layer}{spread}; dQ "
            "is needed to tell, and there is none."
        )
    least = min((bias for bias in biases.values() if bias.judges), key=lambda bias: bias.fewest, default=None)
    if least is not None and least.fewest < FEW:
        remedy = f": {more.format(SEQUENCES)}" if more else ""
        count, different = counted("sequence", least.fewest), ""
        if least.repeats:
            count = f"{int(least.observed.max()):,} sequences, {least.fewest:,} different,"
            different = " different ones"
        parts.append(
            f"Too few sequences to say anything of δ: {count} with loss, and a finding needs {FEW} or more{different}. "
            f"Measure {SEQUENCES}{different}{remedy}."
        )
    return " ".join(parts)


def _unseen(biases: Mapping[int, DeltaBias], more: str) -> str:
    """Return how small a bias of δ could have been overlooked, if errors of that size have ignited runs.

    Args:
        biases: by layer.
        more: how a user gets more sequences, with ``{}`` for their number; empty where there is no way.
    """
    from flashpoint.diagnosis.delta_bias import IGNITED
    from flashpoint.diagnosis.finding import FEW

    # Of a layer with NaN or infinity there is a finding; how many sequences would show a bias there, nobody knows.
    ignites = min(IGNITED)
    judged = [one for one in biases.values() if one.judges and one.fewest >= FEW]
    unsure = [one for one in judged if bool(one.smallest.isfinite().all()) and float(one.smallest.max()) > ignites]
    if not unsure:
        return ""
    worst = max(unsure, key=lambda bias: float(bias.smallest.max()))
    needed, different = _rounded_up(worst.needed(ignites)), "different " if worst.repeats else ""
    remedy = f": {more.format(needed)}" if more else ""
    would = f"About {needed:,} {different}sequences would show one of {ignites:.0e}{remedy}."
    if needed > MOST_ADVISED:
        would = f"No number of sequences that one can wait for would show one of {ignites:.0e}."
    return (
        f"In some heads a bias of δ below {float(worst.smallest.max()):.0e} would not show on {worst}; in a "
        f"model of 7 M parameters a constant one of {ignites:.0e} in layer 2 made {IGNITED[ignites]} runs explode. "
        f"{would}"
    )


MOST_ADVISED = 10_000
"""Sequences of which nobody is advised to measure more."""


def _rounded_up(count: int) -> int:
    """Return a count with two digits that are not 0."""
    unit = 10 ** max(0, len(str(count)) - 2)
    return -(-count // unit) * unit


_UNSEEN_CAUSE = (
    "Most explosions that this package knows begin with a W_Q that grows, and the attention can be the cause where "
    "nothing is found: docs/watching.md, Limits."
)
