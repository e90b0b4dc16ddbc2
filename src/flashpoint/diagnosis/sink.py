"""Attention sinks inside an attention: one more key in the softmax, with a score of its own and no value.

A learned sink is one, and softmax-off-by-one, whose sink has the score 0. Each row of O is then FP64's times Σⱼ Pᵢⱼ =
1 / (1 + exp(s − Lᵢ)), with L of the row and one score s in all rows of a head. No row is free: L tells how short it is.

Shapes: N sequences, H heads, T tokens, R rows that are looked at.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall, heads_of

if TYPE_CHECKING:
    from flashpoint.diagnosis.finding import Finding, Make

_ROWS = 64
"""Of a sequence that are looked at, most of them among the first: with few keys a sink shows most."""
_SHOWS = 0.01
"""Of the weight of a row, that a sink takes where it is to be seen. BF16's rounding makes 0.001 along O."""
_FEW = 6
"""Rows without which nothing is said of a head."""
_NEARLY_ALL = 0.9
"""Share of rows that have to agree. A fault in some blocks leaves the sink to be seen."""
_AGREES, _ALONG, _ACROSS = 0.25, 0.002, 0.02
"""A row agrees if O errs by no more than this share of what the sink takes, and these shares of |O|."""
_FAR_ACROSS = 1.001 * (_AGREES + _ACROSS) ** 2 / (4 * _AGREES)
"""A row that errs by more across O, over |O| without a sink, agrees with no sink."""


@torch.no_grad()
def with_sink(call: AttentionCall, out: Tensor | None) -> AttentionCall:
    """Return the call with the sink that O [N, H, T_q, d_v] shows in each head, −∞ where it shows none.

    Where no head has one, nobody kept O, or the call told its sink, it is the call as it was.
    """
    if out is None or call.form.sink is not None:
        return call
    starts = range(0, len(call.q), call.at_a_time)
    looked_at = [_rows_of(call, out, slice(start, start + call.at_a_time)) for start in starts]
    sink = sink_of(*(torch.cat(parts, 1) for parts in zip(*looked_at, strict=True)))
    if not (sink > -torch.inf).any():
        return call
    return dataclasses.replace(call, form=dataclasses.replace(call.form, sink=sink))


def sink_of(logsumexp: Tensor, exact: Tensor, found: Tensor) -> Tensor:
    """Return the score [H] of the sink that rows of O show, nats; −∞ where they show none.

    Args:
        logsumexp: L [H, R].
        exact, found: O [H, R, d] of the definition, and as it was returned.
    """
    size = exact.square().sum(-1)
    mass = (found * exact).sum(-1) / size
    across = (found - mass[..., None] * exact).norm(dim=-1) / size.sqrt()
    sink = logsumexp.new_full(logsumexp.shape[:1], -torch.inf)
    tells = mass.isfinite() & across.isfinite() & logsumexp.isfinite()
    far = (tells & (across <= _FAR_ACROSS)).sum(-1) / tells.sum(-1).double() < _NEARLY_ALL
    can_have = (_short(mass).sum(-1) >= _FEW) & ~far
    for head in can_have.nonzero().flatten().tolist():  # usually none: a training waits for this
        sink[head] = _score(logsumexp[head], mass[head], across[head])
    return sink


def sink_finding(call: AttentionCall, finding: Make) -> Finding | None:
    """Say which heads have a sink that O shows: it is told, and everything else is compared with the attention that has
    it."""
    if call.form.sink is None:
        return None
    heads = (call.form.sink > -torch.inf).cpu()
    scores = call.form.sink.cpu()[heads]
    lowest, highest = float(scores.min()), float(scores.max())
    told = " to ".join(dict.fromkeys(f"{round(score, 2) + 0.0:.2f}" for score in (lowest, highest)))
    text = (
        f"Σⱼ Pᵢⱼ of the rows is below 1, as with a sink: one more key without a value, whose score is {told} in every "
        "row of a head; all else is compared with attention that has it"
    )
    return finding("sink", heads, text)


def _rows_of(call: AttentionCall, out: Tensor, some: slice) -> list[Tensor]:
    """Return what :func:`sink_of` takes, of some rows of some sequences."""
    one, out, heads = call.as_one_sequence(some), heads_of(out, some), call.q.shape[1]
    form, length = one.form, one.q.shape[-2]
    spaced = torch.logspace(0, 1, _ROWS, base=length, device=out.device).long() - 1
    rows = torch.cat([torch.arange(min(length, _ROWS // 2), device=out.device), spaced.clamp(0, length - 1)]).unique()
    k, v = (x[0].double().repeat_interleave(call.groups, 0) for x in (one.k, one.v))
    scores = form.scores(form.scale * one.q[0, :, rows].double() @ k.mT, 0, rows)
    probs, dropped = scores.softmax(-1), form.dropped(0, rows)
    weights = probs if dropped is None else probs * dropped
    found = scores.logsumexp(-1), weights @ v, out[0, :, rows].double()
    return [x.unflatten(0, (-1, heads)).transpose(0, 1).flatten(1, 2) for x in found]


def _score(sums: Tensor, masses: Tensor, across: Tensor) -> Tensor | float:
    """Return the score of a head's sink by rows [R]: L, O along that of the definition, and across it, over |O|."""
    tells = masses.isfinite() & across.isfinite() & sums.isfinite()
    sums, masses, across = sums[tells], masses[tells], across[tells]
    score = (sums + (1 / masses - 1).log())[_short(masses)].median()
    for _ in range(4):  # Gauss-Newton over the rows that agree
        expected, agrees = _agreement(score, sums, masses, across)
        slope = expected * (1 - expected) * agrees
        score = score - ((masses - expected) * slope).sum() / slope.square().sum().clamp_min(1e-300)
    expected, agrees = _agreement(score, sums, masses, across)
    shows = expected < 1 - _SHOWS
    sure = shows.sum() >= _FEW and agrees[shows].double().mean() >= _NEARLY_ALL
    return score if sure and agrees.double().mean() >= _NEARLY_ALL else -torch.inf


def _short(masses: Tensor) -> Tensor:
    return (masses > 0) & (masses < 1 - _SHOWS)


def _agreement(score: Tensor, sums: Tensor, masses: Tensor, across: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σⱼ Pᵢⱼ of rows beside a sink, and which rows have it."""
    expected = torch.sigmoid(sums - score)
    along, taken = (masses - expected).abs() / expected, _AGREES * (1 - expected)
    return expected, (along <= taken + _ALONG) & (across / expected <= taken + _ACROSS)
