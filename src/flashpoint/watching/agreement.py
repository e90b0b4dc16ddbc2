"""Which form of an attention its O shows, of those that a call may have had.

Shapes: N sequences, H heads, H_kv heads of keys and values, T_q queries, T_k keys, R rows that are looked at.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall, fit_together
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.sink import sink_of
from flashpoint.errors import UserError, notify

_ROWS = 64
"""Of a sequence that are looked at."""
_HALF, _FAR = 0.5, 0.5
"""Share of the rows, and how far they may err over their norms, where a form is plain. An attention with a fault in
some heads or blocks stays far below."""
_NEARLY_ALL, _NEAR = 0.99, 0.02
"""Where it is not, so many rows of each sequence err by no more, save what rounded scores make. A mask can leave most
rows as they are; the rounding of P̄ and O to BF16 accounts for 0.004."""


@torch.no_grad()
def agreeing(
    forms: Sequence[Form], tensors: Sequence[Tensor], *, closely: bool, known: dict[Any, Any] | None = None
) -> Form | None:
    """Return the form from which some rows of O err least; None where they are far from each.

    Args:
        forms: that the call may have had.
        tensors: q, k, v and O of some sequences, [N, H, T_q, d], [N, H_kv, T_k, d], [N, H_kv, T_k, d_v] and
            [N, H, T_q, d_v].
        closely: whether nearly all rows of every sequence have to agree, and not half of those of the first one.
        known: what other questions about these tensors have measured, and what this one does.
    """
    least, found = math.inf, None
    for form in forms:
        excess, error = _excess(form, tensors, closely, {} if known is None else known)
        if excess <= 0 and error < least:
            least, found = error, form
    return found


def as_out_shows(call: AttentionCall, what: str) -> AttentionCall:
    """Return a call of which nobody said whether it is causal, as its O shows; causal where that shows neither.

    Args:
        what: holds it, in words.

    Raises:
        UserError: O shows tensors [N, T, H, d].
    """
    if call.out is None:
        return call
    tensors = {"q": call.q, "k": call.k, "v": call.v, "out": call.out}
    full = dataclasses.replace(call.form, is_causal=False)
    found = agreeing([call.form, full], [*tensors.values()], closely=True)
    turned = {name: x.transpose(1, 2) for name, x in tensors.items()}
    can_be = found is None and call.form.is_plain and fit_together({name: x.shape for name, x in turned.items()})
    if can_be and agreeing([call.form, full], [*turned.values()], closely=True) is not None:
        raise UserError(
            f"{what}: O is softmax(QKᵀ·scale)V of tensors [N, T, H, d]; write all as [N, H, T, d], by "
            "x.transpose(1, 2).contiguous()"
        )
    if (found or agreeing([call.form, full], [*tensors.values()], closely=False)) is not full:
        return call
    notify(f"{what}: O is that of attention without a causal mask, and is judged as such")
    return dataclasses.replace(call, form=full)


@torch.no_grad()
def gradient_of_logsumexp(gradient: Tensor, values: Tensor, kept: Mapping[str, Tensor], form: Form) -> Tensor | None:
    """Return the gradient [N, H, T_q] of an output that is L, the logarithm of Σⱼ exp(S) of each row; None of another.

    Some rows of the first sequence show it.

    Args:
        gradient, values: of the output, L where they are [B, H, T_q], [B, T_q, H] or [B, H, T_q, 1].
        kept: q and k, [N, H, T_q, d] and [N, H_kv, T_k, d], of the first N sequences.
        form: of the call.
    """
    q, k = kept["q"], kept["k"]
    rows = _rows(q.shape[2], q.device)
    expected = _scores(form, q[0].float(), k[0].float(), rows, 0).logsumexp(-1)
    if values.dim() == 4 and values.shape[-1] == 1:
        gradient, values = gradient[..., 0], values[..., 0]
    for turned in (False, True) if values.dim() == 3 else ():
        gradients, found = (x.transpose(1, 2) if turned else x for x in (gradient, values))
        if found.shape[1:] == q.shape[1:3]:
            of_rows = found[0][:, rows].float()
            error = torch.where(of_rows == expected, 0, (of_rows - expected).abs())
            if bool((error <= _NEAR * (1 + expected.abs())).all()):
                return gradients[: len(q)].float().clone(memory_format=torch.contiguous_format)
    return None


def _excess(form: Form, tensors: Sequence[Tensor], closely: bool, known: dict[Any, Any]) -> tuple[float, float]:
    """Return by how much the errors of rows exceed what is allowed, and the mean of the errors: of the sequence where
    that is most. Rows that see no key, or have no number, count for nothing. Where all that are looked at see none, and
    O is something else in them than a softmax of equal scores makes, the form is none of it. Blurred rows exceed
    nothing if another row tells. In the mean they are less than a row that sees no key and has something."""
    found = []
    for n in range(len(tensors[0]) if closely else 1):
        all_of_it = (form.is_causal, form.scale) if form.is_plain and form.sink is None else id(form)
        if (n, all_of_it) not in known:
            known[n, all_of_it] = form, _errors(form, [x[n] for x in tensors], n)  # the form lives on with its id
        errors, rounding, lone, blurred = known[n, all_of_it][1]
        allowed = (_NEAR + rounding).clamp_max(_FAR) if closely else _FAR
        blurred = blurred & ~(blurred | errors.isnan()).all()
        telling = (errors - allowed).masked_fill(blurred, torch.nan)
        errors = torch.where(blurred, errors.clamp_max(_FAR), errors)
        over = float(telling.nanquantile(_NEARLY_ALL if closely else _HALF))
        if math.isnan(over):
            over = math.inf if bool(lone.any()) else -math.inf
        found.append((over, float(torch.where(lone, 1.0, errors).nanmean().nan_to_num())))
    return max(found)


def _errors(form: Form, sequence: Sequence[Tensor], n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return how far some rows of O are from what the definition makes of q, k and v, over their norms. Each is
    [H, T, d], of sequence n. Where the form has no sink the definition has that which the rows show in a head.

    A row that almost cancels counts by the norm that it would have if its terms were independent.

    Returns:
        The error of each head and row, NaN where a row sees no key. By how much weights change where scores are
        rounded to the dtype of O. Which rows see no key, and are neither 0, nor NaN, which a softmax of −∞ is, nor the
        mean of V of several keys, as where −3.4·10³⁸ is added to all scores. Which rows a bias blurs: it is so large at
        their largest score, −10,000 at all keys for example, that rounding to the dtype of O changes that by a nat.
    """
    out = sequence[3]
    # Autocast casts what the attention is given to what O has.
    q, k, v = (x.to(out.dtype).float() for x in sequence[:3])
    v = v.repeat_interleave(len(q) // len(v), 0)
    rows = _rows(q.shape[1], q.device)
    scores = _scores(form, q, k, rows, n)
    closed = scores == -math.inf
    rounding = torch.expm1(scores.masked_fill(closed, 0.0).abs().amax(-1) * torch.finfo(out.dtype).eps / 2)
    logsumexp = scores.logsumexp(-1)
    probs, actual = scores.softmax(-1).masked_fill(closed.all(-1, keepdim=True), torch.nan), out[:, rows].float()
    sink = form.sink
    if (dropped := form.dropped(n, rows)) is not None:
        probs = probs * dropped.float()
    elif sink is None:
        sink = sink_of(logsumexp, probs @ v, actual)
    if sink is not None:
        probs = probs * torch.sigmoid(logsumexp - sink[:, None])[..., None]
    expected = probs @ v
    size = torch.maximum(expected.norm(dim=-1), (probs.square() @ v.square().sum(-1, keepdim=True))[..., 0].sqrt())
    size = size.clamp_min(torch.finfo(out.dtype).tiny)  # below, O has few bits, as FP16's beside a large sink
    mean = v.mean(-2, keepdim=True)
    of_equal = (actual - mean).norm(dim=-1) <= _NEAR * v.square().mean(-2, keepdim=True).sum(-1).sqrt()
    of_equal &= v.shape[-2] > 1  # O of a single key is its V, also where the key is seen
    lone = closed.all(-1) & (actual != 0).any(-1) & ~of_equal & ~actual.isnan().all(-1)
    blurred = torch.zeros_like(lone)
    if (bias := form.added(n, rows)) is not None:
        at_largest = bias.expand_as(scores).gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
        blurred = ~closed.all(-1) & (at_largest.abs() * torch.finfo(out.dtype).eps / 2 > 1)
    return (actual - expected).norm(dim=-1) / size, rounding, lone, blurred


def _scores(form: Form, q: Tensor, k: Tensor, rows: Tensor, n: int) -> Tensor:
    """Return what the softmax of a form is of [H, R, T_k], −∞ at closed pairs, for some rows of sequence n.

    Args:
        q, k: of that sequence, [H, T_q, d] and [H_kv, T_k, d].
    """
    raw = q[:, rows] @ k.repeat_interleave(len(q) // len(k), 0).mT * form.scale
    return form.scores(raw, n, rows)


def _rows(length: int, device: torch.device) -> Tensor:
    return torch.linspace(0, length - 1, min(length, _ROWS), device=device).long()
