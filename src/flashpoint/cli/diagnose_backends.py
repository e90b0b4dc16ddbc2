"""What ``flashpoint diagnose --attention all`` prints: the attentions of other libraries on the recorded tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashpoint.cli.diagnose_tables import heading, too_few
from flashpoint.cli.table import Cell, Table, number
from flashpoint.diagnosis.measure_table import DELTA, FOLLOWS_OUT, GRAD_K, GRAD_Q, GRAD_V, OUT_ERROR
from flashpoint.diagnosis.measures import over_sequences
from flashpoint.diagnosis.other_attention import ALL, OtherAttention, Refused, attention_named
from flashpoint.errors import one_line

if TYPE_CHECKING:
    import torch

    from flashpoint.cli.diagnose_inputs import Inputs
    from flashpoint.diagnosis.verdict import Diagnosis

_ERRORS = (OUT_ERROR, GRAD_Q.error, GRAD_K.error, GRAD_V.error)
_COLUMNS = (
    "attention", "deterministic", *(error.label for error in _ERRORS), DELTA.bias.label, "standard errors",
    FOLLOWS_OUT.label, "findings", "why not",
)  # fmt: skip
_READING = (
    'Errors are those of the worst head. The bias of δ is of the head with the most standard errors, and "follows O" '
    "is the mean over heads. An attention is deterministic whose backward pass gives the same bits again in PyTorch's "
    "deterministic mode. --attention NAME tells the rest."
)


def backends(inputs: Inputs, device: torch.device) -> tuple[str, Table]:
    """Return what is told first, and a row for the recorded attention, or the run's own, and for each of :data:`ALL`.

    Raises:
        UserError: the inputs cannot be read.
    """
    attentions: list[OtherAttention | None] = [attention_named(name) for name in ALL]
    if inputs.anew or all(call.out is not None for call in inputs.calls):
        attentions.insert(0, inputs.anew)
    rows: list[list[Any]] = []
    ran: dict[str, list[Diagnosis]] = {}
    notes = []
    for one, found in zip(attentions, inputs.diagnoses_of(attentions, device), strict=True):
        name = one.name if one else f"{inputs.calls[0].attention}, as recorded"
        deterministic = "" if one is None else "yes" if one.deterministic else "no"
        if isinstance(found, Exception):
            why = found.why if isinstance(found, Refused) else one_line(found)
            rows.append([name, deterministic, *[None] * (len(_COLUMNS) - 3), why])
            notes.append(f"- {name}: {why}")
            continue
        ran[name] = found
        rows.append([name, deterministic, *_measures(found), ", ".join(_kinds(found)), ""])
        if one and one.mode_left:
            notes.append(f"- {one.mode_left}")
    suspects = ", ".join(name for name, found in ran.items() if _kinds(found))
    told = f"{len(ran.keys() & set(ALL))} of {len(ALL)} backends ran; "
    told += f"something was found in {suspects}." if suspects else "nothing was found."
    unjudged = ""
    for found in list(ran.values())[-1:]:  # which all were called on the same sequences
        told += f"\n\n{heading(found, 'each', inputs.weights)}"
        unjudged = too_few(
            {diagnosis.call.layer: diagnosis.bias for diagnosis in found if diagnosis.bias is not None}, inputs.more
        )
    note = "\n\n".join(filter(None, ("\n".join(notes), unjudged, _READING)))
    shown = Table(_COLUMNS[:-1], [row[:-1] for row in rows if not row[-1]], note)
    return told, Table(_COLUMNS, rows, note, instead=shown)


def _kinds(diagnoses: Sequence[Diagnosis]) -> list[str]:
    return list(dict.fromkeys(finding.kind for diagnosis in diagnoses for finding in diagnosis.findings))


def _measures(diagnoses: Sequence[Diagnosis]) -> list[Cell]:
    """Return the cells of an attention, over all layers and heads."""
    together = [over_sequences(diagnosis.measures) for diagnosis in diagnoses]

    def known(name: str) -> list[float]:
        values = [value for measures in together if name in measures for value in measures[name].tolist()]
        return [value for value in values if not math.isnan(value)]

    cells = [number(max(known(error.name), default=None), ".1e") for error in _ERRORS]
    biases = [
        (mean, mean / max(error, 1e-300))
        for bias in (diagnosis.bias for diagnosis in diagnoses)
        if bias is not None
        for mean, error in zip(bias.mean.tolist(), bias.error.tolist(), strict=True)
    ]
    sure = [one for one in biases if math.isfinite(one[1])]
    mean, errors = max(sure, key=lambda one: abs(one[1]), default=(None, None))
    slopes = known(FOLLOWS_OUT.name)
    slope = sum(slopes) / len(slopes) if slopes else None
    return [*cells, number(mean, "+.1e"), number(errors, "+.1f"), number(slope, ".2f")]
