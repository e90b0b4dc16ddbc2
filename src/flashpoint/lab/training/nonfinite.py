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
from flashpoint.numerics.production import repeat_kv
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
    with recorded(model) as kept, torch.enable_grad(), autocast(sequences.device, precision):
        loss = model(sequences[:, :-1], sequences[:, 1:], seed_and_step)
    taken = list(zip(kept.q, kept.k, kept.v, strict=True))
    for attention, projected, tensors, out in zip(attentions, kept.projected, taken, kept.outs, strict=True):
        if not projected.isfinite().all():
            return f"q, k or v of layer {attention.core.layer} is not finite: the projection's result"
        if not out.isfinite().all():
            return _of_row(attention, tensors, out, seed_and_step)
    if not loss.isfinite():
        return "the loss is not finite: every attention's output is"
    L = len(attentions)
    grads = torch.autograd.grad(loss * scale, [*kept.outs, *kept.q, *kept.k, *kept.v])
    of_layers = zip(attentions, *(grads[L * part : L * (part + 1)] for part in range(4)), strict=True)
    for attention, grad_out, *parts in reversed(list(of_layers)):
        if not grad_out.isfinite().all():
            return f"dO of layer {attention.core.layer} is not finite: it comes from above the attention"
        bad = [~part.isfinite().all(-1) for part in parts]  # [B, H, T], and with H_kv heads
        if which := [name for name, rows in zip(("dQ", "dK", "dV"), bad, strict=True) if rows.any()]:
            sequence, row, head = min(
                (*(int(index) for index in rows.transpose(1, 2).nonzero()[0]),) for rows in bad if rows.any()
            )
            return f"{', '.join(which)} of {_place(attention, head, sequence, row)} is not finite: O and dO are"
    return None


def _of_row(
    attention: CausalSelfAttention, taken: tuple[Tensor, Tensor, Tensor], out: Tensor, seed_and_step: Tensor
) -> str:
    """Say what made the first row of O not finite, of all heads."""
    variant, layer = attention.core.variant, attention.core.layer
    by_head = out.detach().unflatten(-1, (attention.n_head, -1)).transpose(1, 2)  # [B, H, T, d]
    broken = ~by_head.isfinite().all(-1)
    sequence, head, row = (int(index) for index in broken.nonzero()[0])
    place = f"O of {_place(attention, head, sequence, row)}"
    count = f"{int(broken.sum()):,} of {broken.numel():,} rows of the layer"
    if kernel_in(variant, layer) != "flash":
        return f"{place} is not finite ({count})"
    q, *others = (x.detach()[sequence : sequence + 1] for x in taken)
    k, v = (repeat_kv(q, x) for x in others)
    context: dict[str, Any] = {"layer": layer, "seed_and_step": seed_and_step}
    shift = row_statistics(q, k, v, variant, **context)[0][0, head, row].item()
    logsumexp = flash_fwd(q, k, v, variant, **context)[1][0, head, row].item()
    row_max = whole_scores(q, k, variant, **context)[0, head, row].amax().item()
    if logsumexp == -math.inf:
        return (
            f"{place} is NaN ({count}): every P̄ underflows, so that ℓ = 0; m = {shift:.1f} lies "
            f"{shift - row_max:.1f} nats above the row's largest score"
        )
    return f"{place} is not finite ({count}): L = {logsumexp:.1f}, m = {shift:.1f}, largest score {row_max:.1f} nats"


def _place(attention: CausalSelfAttention, head: int, sequence: int, row: int) -> str:
    return f"layer {attention.core.layer}, head {head + 1}, row {row + 1} of sequence {sequence + 1}"
