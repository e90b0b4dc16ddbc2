"""Targets for an observed pass that are drawn from a prediction instead of taken from the data.

Drawn from the prediction that the rounded O makes, the targets know of O's error ε, and dO has mean zero whatever ε is.
Drawn from that of an unrounded O they do not, as the data does not. Then E[dO·ε] = E[εᵀHε]. H is the second derivative
of the loss by O, of which the Gauss–Newton part holds no targets. That part is what the gradients of tokens drawn from
the model vary by (Fisher's identity). N·dO·ε is the nats by which ε changes the loss summed over the step's N tokens.
So it has the mean that its square has with the first kind of targets (docs/findings/mechanism.md).
"""

from __future__ import annotations

import copy
import dataclasses
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpoint.lab.model import GPT, Block
from flashpoint.lab.precision import Precision, linear_dtype
from flashpoint.lab.probes.observation import analysed
from flashpoint.numerics.choices import UNROUNDED
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels.codes import Stream


def with_unrounded_out(model: GPT, precision: Precision = "bf16") -> GPT:
    """Return the model with the same tensors, not copies of them, and Ō and O in FP32 in every layer and head, also
    where the projection that follows takes O.

    Args:
        precision: of the training, whose formats all other values keep.
    """
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for block in twin.blocks:
        attention = cast(Block, block).attention
        attention.core.variant = _with_unrounded_out(analysed(attention.core.variant, precision))
        attention.projection = _FP32Input(attention.projection, linear_dtype(precision))
    return twin


def draw(logits: Tensor, seed_and_step: Tensor) -> Tensor:
    """Return a token of each distribution: the largest of its logits with Gumbel noise from counter-based random bits.

    Args:
        logits: [N, T, V].
        seed_and_step: [2] int64; the same key draws the same.

    Returns:
        [N, T] int64.
    """
    N, T, V = logits.shape
    rows, columns = (torch.arange(size, device=logits.device) for size in (T, V))
    key = NoiseKey(seed_and_step, layer=0, heads=torch.zeros_like(rows[:1]), n_head=1, n_sequences=N)
    words = key.words(Stream.TARGETS, rows[:, None], columns[None])[:, 0]
    uniform = (words.double() + 0.5) / 2**32
    return (logits.double() - (-uniform.log()).log()).argmax(-1)


class _FP32Input(nn.Linear):
    """A linear layer of weights and output as autocast rounds them, whose input autocast does not round."""

    def __init__(self, original: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(original.in_features, original.out_features, bias=False, device="meta")
        self.weight, self._dtype = original.weight, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.to(self._dtype).float()).to(self._dtype)


def _with_unrounded_out(variant: AttentionVariant) -> AttentionVariant:
    elsewhere = variant.elsewhere and _with_unrounded_out(variant.elsewhere)
    delta = "out" if variant.saved_out == "redrawn" else variant.delta  # nothing is left to draw again
    unrounded = {"out_unnormalized": UNROUNDED, "out": UNROUNDED, "out_residual_bits": None}
    return dataclasses.replace(variant, **unrounded, delta=delta, elsewhere=elsewhere)  # type: ignore[arg-type]
