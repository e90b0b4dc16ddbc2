"""What only an attention itself can tell: it is called with inputs that have a few features more.

Whatever computes softmax attention treats a feature like any other. Four groups of features that hold zeros elsewhere
therefore read out what no attention returns, and change nothing else:

- K has a feature that is 1: dQ there is α Σⱼ dSᵢⱼ, which is 0 in exact arithmetic and −α·(error of δ) else.
- V has a feature for each block of keys, 1 on its keys: O there is the weight Σⱼ Pᵢⱼ that a query gives the block.
- dO has a feature for each block of queries, 1 on its queries. dV there sums to Σᵢⱼ Pᵢⱼ over the block, as the backward
  pass has P. With an L that is off the sum is off.

K's feature that is 1 serves twice: with a number in that feature of Q all scores of a row grow alike, which changes no
softmax. Where O changes, as with a soft cap, a correct dS has row sums that are not 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import Exact
from flashpoint.diagnosis.measures import Measures, Probed, Results, relative
from flashpoint.errors import UserError

Function = Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]
"""q [N, H, T, d], k and v [N, H_kv, T, d], whether it is causal, and α, to O [N, H, T, d]."""
_SIZES = (16, 32, 64, 128, 256)
"""Features per head that attentions take."""
_SHIFT = 4.0
"""Nats, by which all scores of a row are raised and lowered."""
_SINK = 1e-9
"""Of Σⱼ Pᵢⱼ, that is missing with a sink. FP64 leaves 1e-15."""
_BLOCKS = 15
"""Blocks of queries and of keys at most."""


def results_of(function: Function, call: AttentionCall) -> Results:
    """Call an attention, and have its gradients by autograd."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v))
    with torch.enable_grad():
        out = _computed(function, call, q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), call.grad_out.to(out.dtype))
    return Results(out.detach(), *grads)


def _computed(function: Function, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute on tensors in the place of a call's own, with its options: the one place that passes them on."""
    return function(q, k, v, call.form.is_causal, call.form.scale)


def probe(function: Function, call: AttentionCall) -> Probed | None:
    """Call an attention with features of its own; None where it does not take as many."""
    d, d_v = call.q.shape[-1], call.v.shape[-1]
    lengths = call.q.shape[-2], call.k.shape[-2]
    block = max(16, 1 << (-(-max(lengths) // _BLOCKS) - 1).bit_length())
    of_query, of_key = (_blocks_of(length, block, call.q.device) for length in lengths)
    first = max(d, d_v) + 1
    of_dv = first + of_key.shape[1]
    wanted = of_dv + of_query.shape[1]
    for size in (size for size in _SIZES if size >= wanted):
        q, k, v, grad_out = (F.pad(x, (0, size - x.shape[-1])) for x in (call.q, call.k, call.v, call.grad_out))
        k[..., d] = 1.0
        v[..., first:of_dv] = of_key.to(v.dtype)
        grad_out[..., of_dv:wanted] = of_query.to(grad_out.dtype)
        if (empty := call.form.empty_rows((*q.shape[:3], k.shape[2]), q.device)) is not None:
            grad_out[..., of_dv:wanted].masked_fill_(empty[..., None], 0.0)
        widened = AttentionCall(q, k, v, grad_out, call.form, call.layer, call.step, call.attention)
        try:
            found = results_of(function, widened)
            raised, lowered = (_shifted(function, widened, d, nats) for nats in (_SHIFT, -_SHIFT))
        except (RuntimeError, ValueError, AssertionError, UserError):  # heads so wide are not for every attention
            return None
        assert found.out is not None
        assert found.grad_q is not None
        assert found.grad_v is not None
        in_block = of_query.double().sum(0)  # queries of each
        masses = found.grad_v[..., of_dv:wanted].double().sum(-2)
        return Probed(
            out=found.out[..., :d_v],
            row_sums=found.grad_q[..., d].double() / call.form.scale,
            responses=(call.grad_out.double() * (raised - lowered)[..., :d_v]).sum(-1) / (2 * _SHIFT),
            weights=found.out[..., first:of_dv].double(),
            masses=masses / (in_block * call.groups),
            block=block,
        )
    return None


def _blocks_of(length: int, block: int, device: torch.device) -> Tensor:
    """Return which block each token is in [T, blocks], bool."""
    blocks = torch.arange(-(-length // block), device=device)
    return torch.arange(length, device=device)[:, None] // block == blocks


@torch.no_grad()
def _shifted(function: Function, call: AttentionCall, feature: int, nats: float) -> Tensor:
    """Return O float64 with so much added to all scores; K's feature is 1, and Q's 0."""
    q = call.q.clone()
    q[..., feature] = nats / call.form.scale
    return _computed(function, call, q, call.k, call.v).double()


def probed_measures(call: AttentionCall, probed: Probed, true: Exact, n: int) -> Measures:
    """Return what the features of a sequence say, [H] each: ``row_sum_bias`` to ``mass_error_block`` of the table."""
    error = delta_error_of_row_sums(probed, true, n)
    count = probed.weights.shape[-1]
    of_block, of_key = (_blocks_of(x.shape[-2], probed.block, error.device).double() for x in (true.q, true.k))
    wanted = true.weights @ of_key  # [H, T_q, blocks]
    sizes = of_block.sum(0)[:, None]
    weights = probed.weights[n].masked_fill((true.mass == 0)[..., None], 0.0)
    errors, given, due = (of_block.mT @ x / sizes for x in ((weights - wanted).abs(), weights, wanted))
    largest, place = errors.flatten(1).max(-1)
    head, queries, keys = torch.arange(len(largest), device=place.device), place // count, place % count
    # Several blocks of keys may lack what one has too much. Keys that a mask hides have nothing due.
    lacking = (due - given)[head, queries].argmax(-1)
    keys = torch.where(due[head, queries, keys] > 0, lacking, keys)
    masses = probed.masses[n].repeat_interleave(call.groups, 0)
    shared = true.mass.unflatten(0, (-1, call.groups)).mean(1).repeat_interleave(call.groups, 0)  # as dV adds them up
    mass_error = (masses - (of_block.mT @ shared[..., None])[..., 0] / sizes[:, 0]).abs()
    response = (-probed.responses[n]).sum(-1) / true.bound.sum(-1).clamp_min(1e-300)
    return {
        **relative(table.ROW_SUMS, error, true.bound),
        table.SHIFT_BIAS.name: response.where((true.mass > 1 - _SINK).all(-1) & (not true.softcap), math.nan),
        table.WEIGHT_ERROR.name: largest,
        table.WEIGHT_ERROR_QUERIES.name: queries.double(),
        table.WEIGHT_ERROR_KEYS.name: keys.double(),
        table.WEIGHT_FOUND.name: given[head, queries, keys],
        table.WEIGHT_EXACT.name: due[head, queries, keys],
        table.MASS_ERROR.name: mass_error.amax(-1),
        table.MASS_ERROR_BLOCK.name: mass_error.argmax(-1).double(),
    }


def delta_error_of_row_sums(probed: Probed, true: Exact, n: int) -> Tensor:
    """Return the error ε of δ [H, T] that row sums of dS tell of: Σⱼ dSᵢⱼ / α = (1 − m) δᵢ − m εᵢ. Here m is Σⱼ Pᵢⱼ, 1
    without a sink. With a soft cap it is Σⱼ dSᵢⱼ / α of FP64 less εᵢ Σⱼ (P∘J)ᵢⱼ. A row that sees no key tells of 0."""
    if true.softcap:
        sums = true.slopes.sum(-1)
        return torch.where(sums > 0, (true.grad_scores.sum(-1) - probed.row_sums[n]) / sums, 0.0)
    delta = (true.grad_out * true.out).sum(-1)
    error = ((1 - true.mass) * delta - probed.row_sums[n]) / true.mass
    return torch.where(true.mass == 0, 0.0, error)
