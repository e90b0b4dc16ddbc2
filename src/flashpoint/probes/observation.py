"""What the attention of one layer computed on a few sequences: the material of the probes.

Shapes: N sequences, H heads, T tokens, C = d_model, d features per head. What is derived is FP32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from flashpoint.attention.dispatch import delta_error, flash_forward_op, row_statistics, whole_scores
from flashpoint.attention.reference import centered_keys
from flashpoint.attention.variant import AttentionVariant
from flashpoint.model import GPT, Block


@dataclass(frozen=True)
class LayerObservation:
    """One layer's forward and backward pass.

    Attributes:
        layer: number, from 1.
        variant: numerics of the attention; production kernels count as FlashAttention-2's.
        x: [N, T, C], what W_Q, W_K and W_V take; float32.
        q, k, v: [N, H, T, d] as the attention took them, bfloat16 or float32.
        out: O [N, H, T, d] in the dtype in which the rest of the network saw it.
        grad_out: dO [N, H, T, d] float32, of these sequences' part of the step's loss.
        seed_and_step: [2] int64, key of stochastic rounding.
        w_q: [H, d, C] before the step.
        update: [H, d, C], what the step added to W_Q.
    """

    layer: int
    variant: AttentionVariant
    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    grad_out: Tensor
    seed_and_step: Tensor
    w_q: Tensor
    update: Tensor

    @property
    def scale(self) -> float:
        """α."""
        return float(self.q.shape[-1] ** -0.5)

    @cached_property
    def out_fp32(self) -> Tensor:
        """O of the same P̄ with nothing rounded after them, [N, H, T, d]."""
        return self._forward[2]

    @cached_property
    def logsumexp(self) -> Tensor:
        """L [N, H, T]."""
        return self._forward[1]

    @cached_property
    def scores(self) -> Tensor:
        """S [N, H, T, T] as rounded, −∞ above the diagonal."""
        return whole_scores(self.q, self.k, self.variant, layer=self.layer, seed_and_step=self.seed_and_step)

    @cached_property
    def probs(self) -> Tensor:
        """P [N, H, T, T]."""
        return (self.scores - self.logsumexp[..., None]).exp()

    @cached_property
    def grad_probs(self) -> Tensor:
        """dP [N, H, T, T]."""
        return self.grad_out @ self.v.float().mT

    @cached_property
    def delta(self) -> Tensor:
        """δ [N, H, T] as the variant takes it, with the error that it injects: the paper's δ_lp."""
        groups = self.variant.groups(self.layer, self.q.shape[1])
        result = torch.empty_like(self.logsumexp)
        for variant, heads in groups:
            result[:, heads] = self._delta_of(variant)[:, heads]
        return result + delta_error(
            self.grad_out, self.out, self.variant, layer=self.layer, seed_and_step=self.seed_and_step
        )

    @cached_property
    def delta_fp32(self) -> Tensor:
        """rowsum(dO∘O) [N, H, T] of :attr:`out_fp32`: the paper's δ_hp."""
        return (self.grad_out * self.out_fp32).sum(-1)

    @cached_property
    def ones(self) -> Tensor:
        """[N, H, T] int32: P̄ that entered P̄V as exactly 1."""
        _, ones = row_statistics(
            self.q, self.k, self.v, self.variant, layer=self.layer, seed_and_step=self.seed_and_step
        )
        return ones

    @cached_property
    def keys(self) -> Tensor:
        """K [N, H, T, d] as QKᵀ takes it: centred where the variant centres it."""
        centered = self._forward[3]
        result = self.k.float()
        if not centered.numel():
            return result
        result = result.clone()
        for variant, heads in self.variant.groups(self.layer, self.q.shape[1]):
            if variant.center_keys:
                result[:, heads] = centered[:, heads].float()
        return result

    @cached_property
    def attended_keys(self) -> Tensor:
        """PK [N, H, T, d] of K as dQ takes it: what an error of δ adds to dQ, by α."""
        keys = self.keys.clone()
        for variant, heads in self.variant.groups(self.layer, self.q.shape[1]):
            if variant.center_grad_q:
                keys[:, heads] = centered_keys(self.k[:, heads]).float()
        return self.probs @ keys

    @cached_property
    def _forward(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._forward_of(_with_fp32_out(self.variant))

    @cached_property
    def _out_for_delta(self) -> Tensor:
        """The O that the variant's own δ is of, in the heads that save one."""
        return self._forward_of(self.variant)[2]

    def _forward_of(self, variant: AttentionVariant) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        results: tuple[Tensor, Tensor, Tensor, Tensor] = flash_forward_op(
            self.q, self.k, self.v, self.seed_and_step, variant.key, self.layer
        )
        return results

    def _delta_of(self, variant: AttentionVariant) -> Tensor:
        if variant.exact_row_sum:
            return (self.probs * self.grad_probs).sum(-1) / self.probs.sum(-1)
        if variant.delta == "p_dp":
            return (self.probs * self.grad_probs).sum(-1)
        return (self.grad_out * (self._out_for_delta if variant.saves_out_for_delta else self.out.float())).sum(-1)


def observe(model: GPT, sequences: Tensor, seed_and_step: Tensor, share: float) -> list[LayerObservation]:
    """Forward and backward pass of a few sequences beside the training: no gradient of a parameter, no state changes.

    Args:
        sequences: [N, T + 1] int64 on the model's device.
        seed_and_step: [2] int64, key of stochastic rounding.
        share: N over the sequences of the step, so that dO is these sequences' part of the step's.

    Returns:
        An observation per layer, whose ``update`` is zero so far (:func:`with_updates`).
    """
    inputs: list[Tensor] = []
    packed: list[Tensor] = []
    outs: list[Tensor] = []
    attentions = [cast(Block, block).attention for block in model.blocks]

    def keep_projected(_module: Any, arguments: tuple[Tensor, ...], result: Tensor) -> None:
        inputs.append(arguments[0])
        packed.append(result)

    def keep_out(_module: Any, arguments: tuple[Tensor, ...]) -> None:
        outs.append(arguments[0])

    handles = [attention.qkv.register_forward_hook(keep_projected) for attention in attentions]
    handles += [attention.projection.register_forward_pre_hook(keep_out) for attention in attentions]
    try:
        with torch.enable_grad(), torch.autocast(sequences.device.type, dtype=torch.bfloat16):
            loss = model(sequences[:, :-1], sequences[:, 1:], seed_and_step)
    finally:
        for handle in handles:
            handle.remove()
    grads = torch.autograd.grad(loss * share, outs)
    N, T, C = inputs[0].shape
    H = model.config.n_head

    def by_head(x: Tensor) -> Tensor:
        return x.detach().view(N, T, H, -1).transpose(1, 2)

    observations = []
    for attention, x, qkv, out, grad in zip(attentions, inputs, packed, outs, grads, strict=True):
        q, k, v = (by_head(part) for part in qkv.split(C, dim=-1))
        w_q = attention.w_q.detach().clone()
        observations.append(
            LayerObservation(
                layer=attention.layer,
                variant=_analysed(attention.variant),
                x=x.detach().float(),
                q=q,
                k=k,
                v=v,
                out=by_head(out),
                grad_out=by_head(grad).float(),
                seed_and_step=seed_and_step.clone(),
                w_q=w_q,
                update=torch.zeros_like(w_q),
            )
        )
    return observations


def with_updates(observations: list[LayerObservation], model: GPT) -> Iterator[LayerObservation]:
    """The same after the step, with what it added to W_Q; one at a time, since each may come to hold T² of memory."""
    for seen, block in zip(observations, model.blocks, strict=True):
        yield dataclasses.replace(seen, update=cast(Block, block).attention.w_q.detach() - seen.w_q)


def _analysed(variant: AttentionVariant) -> AttentionVariant:
    """PyTorch's production kernels are looked at as what they implement: FlashAttention-2's numerics."""
    elsewhere = variant.elsewhere and _analysed(variant.elsewhere)
    if variant.kernel == "sdpa":
        selection = {"layers": variant.layers, "heads": variant.heads, "elsewhere": elsewhere}
        return AttentionVariant(name="sdpa", **selection)  # type: ignore[arg-type]
    return dataclasses.replace(variant, elsewhere=elsewhere)


def _with_fp32_out(variant: AttentionVariant) -> AttentionVariant:
    elsewhere = variant.elsewhere and _with_fp32_out(variant.elsewhere)
    return dataclasses.replace(variant, delta="out_fp32", elsewhere=elsewhere)
