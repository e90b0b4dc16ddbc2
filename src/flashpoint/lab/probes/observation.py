"""What the attention computed on a few sequences, all layers side by side: the material of the probes.

Shapes: L layers, N sequences, H heads, T tokens, C = d_model, d features per head. What is derived is FP32. Tensors of
T² take nearly all of a probe's memory: they are made in place where they can be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from flashpoint.lab.precision import Precision, linear_dtype
from flashpoint.numerics.choices import UNROUNDED, Rounding
from flashpoint.numerics.delta_rules import rule_of
from flashpoint.numerics.deltas import whole_saved_out
from flashpoint.numerics.dispatch import delta_error, flash_fwd, row_statistics, whole_scores
from flashpoint.numerics.reference import centered_keys
from flashpoint.numerics.variant import AttentionVariant


@dataclass(frozen=True)
class Observation:
    """One forward and backward pass of every attention.

    Attributes:
        variant: numerics of the attention; of PyTorch's kernels as :func:`analysed` has them.
        x: [L, N, T, C], what W_Q, W_K and W_V take; float32.
        q, k, v: [L, N, H, T, d] as the attention took them, bfloat16 or float32.
        out: O [L, N, H, T, d] in the dtype in which the projection is given it.
        grad_out: dO [L, N, H, T, d] float32, of these sequences' part of the step's loss.
        grad_q: dQ [L, N, H, T, d] float32, of the same, as the attention computed it.
        seed_and_step: [2] int64, key of stochastic rounding.
        w_q: [L, H, d, C] before the step.
        update: [L, H, d, C], what the step added to W_Q.
        to_projection: of gradients by q, those by W_Q x; [L, N, H, T, d] float32 both. None where q is W_Q x.
    """

    variant: AttentionVariant
    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    grad_out: Tensor
    grad_q: Tensor
    seed_and_step: Tensor
    w_q: Tensor
    update: Tensor
    to_projection: Callable[[Tensor], Tensor] | None = None

    @property
    def scale(self) -> float:
        """α."""
        return float(self.q.shape[-1] ** -0.5)

    @cached_property
    def out_fp32(self) -> Tensor:
        """O of the same P̄ with nothing rounded after them, [L, N, H, T, d]."""
        return torch.stack([results[2] for results in self._forward])

    @cached_property
    def out_error(self) -> Tensor:
        """O_lp − O_hp [L, N, H, T, d]: what rounding after P̄ has made of O."""
        return self.out.float() - self.out_fp32

    @cached_property
    def out_exact(self) -> Tensor:
        """O [L, N, H, T, d] of attention in FP32 throughout, on the same Q, K and V."""
        return self._exact[0]

    @cached_property
    def grad_q_exact(self) -> Tensor:
        """dQ [L, N, H, T, d] of that attention, for the same dO."""
        return self._exact[1]

    @cached_property
    def _exact(self) -> tuple[Tensor, Tensor]:
        q, k, v, grad_out = (x.flatten(0, 1).float() for x in (self.q, self.k, self.v, self.grad_out))
        with torch.enable_grad():
            q.requires_grad_()
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            (grad_q,) = torch.autograd.grad(out, q, grad_out)
        shape = self.q.shape[:2]
        return out.detach().unflatten(0, shape), grad_q.unflatten(0, shape)

    @cached_property
    def logsumexp(self) -> Tensor:
        """L [L, N, H, T]."""
        return torch.stack([results[1] for results in self._forward])

    @cached_property
    def scores(self) -> Tensor:
        """S [L, N, H, T, T] as rounded, −∞ above the diagonal."""
        scores = self.q.new_empty((*self.q.shape[:-1], self.q.shape[-2]), dtype=torch.float32)
        for layer, (of_layer, q, k) in enumerate(zip(scores, self.q, self.k, strict=True), 1):
            of_layer.copy_(whole_scores(q, k, self.variant, layer=layer, seed_and_step=self.seed_and_step))
        return scores

    @cached_property
    def probs(self) -> Tensor:
        """P [L, N, H, T, T]."""
        return (self.scores - self.logsumexp[..., None]).exp_()

    @cached_property
    def grad_probs(self) -> Tensor:
        """dP [L, N, H, T, T]."""
        return self.grad_out @ self.v.float().mT

    @cached_property
    def delta(self) -> Tensor:
        """δ [L, N, H, T] as the variant takes it for dQ, with the error that it injects: the paper's δ_lp."""
        own = self._where_it_runs(self._delta_of)
        if not self.variant.injected:
            return own
        layers = enumerate(zip(self.grad_out, self.out, strict=True), 1)
        return own + torch.stack(
            [
                delta_error(grad_out, out, self.variant, layer=layer, seed_and_step=self.seed_and_step)
                for layer, (grad_out, out) in layers
            ]
        )

    @cached_property
    def delta_fp32(self) -> Tensor:
        """rowsum(dO∘O) [L, N, H, T] of :attr:`out_fp32`: the paper's δ_hp."""
        return (self.grad_out * self.out_fp32).sum(-1)

    @cached_property
    def ones(self) -> Tensor:
        """How many P̄ of a row entered P̄V as exactly 1, [L, N, H, T] int32."""

        def of_layer(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return row_statistics(q, k, v, self.variant, layer=layer, seed_and_step=self.seed_and_step)[1]

        return self._by_layer(of_layer)

    @cached_property
    def keys(self) -> Tensor:
        """K [L, N, H, T, d] as QKᵀ takes it: centred where the variant centres it."""
        return self._where_it_runs(lambda variant: (centered_keys(self.k) if variant.center_keys else self.k).float())

    @cached_property
    def attended_keys(self) -> Tensor:
        """PK [L, N, H, T, d] of K as dQ takes it: what an error of δ adds to dQ, by α."""
        return self.probs @ self._where_it_runs(
            lambda variant: (centered_keys(self.k) if variant.center_keys or variant.center_grad_q else self.k).float()
        )

    @cached_property
    def pushes(self) -> Tensor:
        """What an error of δ adds to the gradient by W_Q x, by α, [L, N, H, T, d]: PK, taken back to before norm and
        rotation."""
        return self.to_projection(self.attended_keys) if self.to_projection else self.attended_keys

    @cached_property
    def _forward(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        return self._forward_of(_with_fp32_out(self.variant))

    @cached_property
    def saved_for_delta(self) -> list[Tensor]:
        """What each layer's forward pass saves for δ beside O, in the layers and heads that save something."""
        return [saved for _, _, saved, _ in self._forward_of(self.variant)]

    def _forward_of(self, variant: AttentionVariant) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        layers = enumerate(zip(self.q, self.k, self.v, strict=True), 1)
        return [
            flash_fwd(*tensors, variant, layer=layer, seed_and_step=self.seed_and_step) for layer, tensors in layers
        ]

    def _by_layer(self, compute: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        layers = zip(self.q, self.k, self.v, strict=True)
        return torch.stack([compute(layer, *tensors) for layer, tensors in enumerate(layers, 1)])

    def _where_it_runs(self, compute: Callable[[AttentionVariant], Tensor]) -> Tensor:
        """Return what each variant computes [L, N, H, …] in the layers and heads in which it runs."""
        L, _, H = self.q.shape[:3]
        places: dict[AttentionVariant, list[tuple[int, int]]] = {}
        for layer in range(L):
            for variant, heads in self.variant.groups(layer + 1, H):
                places.setdefault(variant, []).extend((layer, head) for head in heads)
        (first, _), *others = places.items()
        result = compute(first)
        for variant, chosen in others:
            layers, heads = zip(*chosen, strict=True)
            result = result.clone()
            result[list(layers), :, list(heads)] = compute(variant)[list(layers), :, list(heads)]
        return result

    def _delta_of(self, variant: AttentionVariant) -> Tensor:
        inputs = _InputsOfDelta(self, variant)
        if variant.exact_row_sum:
            total, mass = inputs.row_sums()
            return total / mass
        return rule_of(variant.delta).delta(inputs)


@dataclass(frozen=True)
class _InputsOfDelta:
    """What a variant's rule of δ takes (:class:`~flashpoint.numerics.delta_rules.rule.BackwardInputs`), [L, N, H, …].

    It has a meaning in the layers and heads in which the variant runs.
    """

    seen: Observation
    variant: AttentionVariant

    @property
    def grad_out(self) -> Tensor:
        return self.seen.grad_out

    @property
    def out(self) -> Tensor:
        return self.seen.out.float()

    @property
    def saved_out(self) -> Tensor:
        if self.variant.saved_out == "unrounded" and self.variant.out_residual is None:
            return self.seen.out_fp32
        pairs = zip(self.seen.out, self.seen.saved_for_delta, strict=True)
        return torch.stack(
            [whole_saved_out(out, saved, self.variant) if saved.numel() else out.float() for out, saved in pairs]
        )

    def row_sums(self) -> tuple[Tensor, Tensor]:
        return (self.seen.probs * self.seen.grad_probs).sum(-1), self.seen.probs.sum(-1)


def launch_kernels(variant: AttentionVariant, like: Tensor, seed_and_step: Tensor) -> None:
    """Launch the kernels of an observation that training does not launch: the first launch compiles them.

    Args:
        variant: as :func:`analysed` has it.
        like: a tensor as q is, [L, N, H, T, d], whose values do not matter.
        seed_and_step: [2] int64.
    """
    seen = Observation(
        variant=variant, x=like, q=like, k=like, v=like, out=like, grad_out=like, grad_q=like,
        seed_and_step=seed_and_step, w_q=like, update=like,
    )  # fmt: skip
    assert len(seen.logsumexp) == len(seen.ones)


def analysed(variant: AttentionVariant, precision: Precision) -> AttentionVariant:
    """Return the variant to analyse. For PyTorch's own kernels it is FlashAttention-2's numerics, which they implement,
    with the mantissa bits of the training's precision. In FP32 and TF32 nothing is rounded between their products."""
    elsewhere = variant.elsewhere and analysed(variant.elsewhere, precision)
    if variant.kernel == "flash":
        return dataclasses.replace(variant, elsewhere=elsewhere)
    dtype = linear_dtype(precision)
    if variant.fp16_inside:
        dtype = torch.float16
    rounding = UNROUNDED if dtype == torch.float32 else Rounding("nearest", round(-math.log2(torch.finfo(dtype).eps)))
    return AttentionVariant(
        name=variant.name, probs=rounding, out=rounding, grad_scores=rounding, delta=variant.delta,
        out_residual_bits=variant.out_residual_bits, layers=variant.layers, heads=variant.heads, elsewhere=elsewhere,
    )  # fmt: skip


def _with_fp32_out(variant: AttentionVariant) -> AttentionVariant:
    elsewhere = variant.elsewhere and _with_fp32_out(variant.elsewhere)
    return dataclasses.replace(variant, delta="out_fp32", out_residual_bits=None, elsewhere=elsewhere)
