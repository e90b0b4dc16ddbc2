"""Where the first value that is no finite number came from: the layer, head and row of the attention, and why."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from flashpoint.lab.model import GPT, Block, CausalSelfAttention
from flashpoint.lab.precision import Precision, autocast, loss_scale
from flashpoint.lab.probes.instrumented import recorded
from flashpoint.numerics.dispatch import flash_fwd, row_statistics, whole_scores
from flashpoint.numerics.variant import kernel_in


def locate(model: GPT, batch: Tensor, seed_and_step: Tensor, precision: Precision = "bf16") -> str:
    """Repeat the forward and backward pass of a step; say where the first NaN or infinity appears.

    Args:
        model: with the weights of before the step.
        batch: [micro-batches, sequences, T + 1] int64, on the model's device.
        seed_and_step: [2] int64, key of stochastic rounding; its count goes up by one a micro-batch.
        precision: of the training.

    Returns:
        One sentence. Layers, heads and rows (query positions) count from 1, sequences within the micro-batch from 1.
    """
    scale = loss_scale(precision) / len(batch)
    for number, sequences in enumerate(batch):
        found = _look_through(model, sequences, seed_and_step, precision, scale)
        seed_and_step[1] += 1
        if found is not None:
            where = f" of micro-batch {number + 1}" if len(batch) > 1 else ""
            return found + where
    return "no value of the repeated step is NaN or infinite in the attention or in the loss"


def _look_through(
    model: GPT, sequences: Tensor, seed_and_step: Tensor, precision: Precision, scale: float
) -> str | None:
    """Return what is not finite in one micro-batch, whose gradients are those of the loss times ``scale``."""
    attentions = [cast(Block, block).attention for block in model.blocks]
    with recorded(model) as (_, packed, outs), torch.enable_grad(), autocast(sequences.device, precision):
        loss = model(sequences[:, :-1], sequences[:, 1:], seed_and_step)
    for attention, projected, out in zip(attentions, packed, outs, strict=True):
        if not projected.isfinite().all():
            return f"q, k or v of layer {attention.layer} is not finite: the projection's result"
        if not out.isfinite().all():
            return _of_row(attention, projected, out, seed_and_step)
    if not loss.isfinite():
        return "the loss is not finite: every attention's output is"
    grads = torch.autograd.grad(loss * scale, [*outs, *packed])
    grad_outs, grad_packed = grads[: len(outs)], grads[len(outs) :]
    for attention, grad_out, grad in reversed(list(zip(attentions, grad_outs, grad_packed, strict=True))):
        if not grad_out.isfinite().all():
            return f"dO of layer {attention.layer} is not finite: it comes from above the attention"
        if not grad.isfinite().all():
            names = ("dQ", "dK", "dV")
            which = [name for name, part in zip(names, grad.chunk(3, -1), strict=True) if not part.isfinite().all()]
            sequence, row, feature = (int(index) for index in (~grad.isfinite()).nonzero()[0])
            head = feature % attention.qkv.in_features // (attention.qkv.in_features // attention.n_head)
            return f"{', '.join(which)} of {_place(attention, head, sequence, row)} is not finite: O and dO are"
    return None


def _of_row(attention: CausalSelfAttention, projected: Tensor, out: Tensor, seed_and_step: Tensor) -> str:
    """Say what made the first row of O not finite, of all heads."""
    by_head = out.detach().unflatten(-1, (attention.n_head, -1)).transpose(1, 2)  # [B, H, T, d]
    broken = ~by_head.isfinite().all(-1)
    sequence, head, row = (int(index) for index in broken.nonzero()[0])
    place = f"O of {_place(attention, head, sequence, row)}"
    count = f"{int(broken.sum()):,} of {broken.numel():,} rows of the layer"
    if kernel_in(attention.variant, attention.layer) != "flash":
        return f"{place} is not finite ({count})"
    q, k, v = (
        part.unflatten(-1, (attention.n_head, -1)).transpose(1, 2)
        for part in projected.detach()[sequence : sequence + 1].chunk(3, -1)
    )
    context: dict[str, Any] = {"layer": attention.layer, "seed_and_step": seed_and_step}
    shift = row_statistics(q, k, v, attention.variant, **context)[0][0, head, row].item()
    logsumexp = flash_fwd(q, k, v, attention.variant, **context)[1][0, head, row].item()
    row_max = whole_scores(q, k, attention.variant, **context)[0, head, row].amax().item()
    if logsumexp == -math.inf:
        return (
            f"{place} is NaN ({count}): every P̄ underflows, so that ℓ = 0; m = {shift:.1f} lies "
            f"{shift - row_max:.1f} nats above the row's largest score"
        )
    return f"{place} is not finite ({count}): L = {logsumexp:.1f}, m = {shift:.1f}, largest score {row_max:.1f} nats"


def _place(attention: CausalSelfAttention, head: int, sequence: int, row: int) -> str:
    return f"layer {attention.layer}, head {head + 1}, row {row + 1} of sequence {sequence + 1}"
