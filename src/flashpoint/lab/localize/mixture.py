"""An attention in some layers and heads of a branch, and another one elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.lab.localize.engine import engine
from flashpoint.numerics.choices import Heads, heads_in
from flashpoint.watching.functions import NoMask


@dataclass(frozen=True)
class Mixture:
    """An attention in some layers and heads, and another one elsewhere.

    Attributes:
        inside, elsewhere: names that :func:`engine` takes.
        layers, heads: from 1; None is all.
    """

    inside: str
    elsewhere: str
    layers: tuple[int, ...] | None = None
    heads: Heads | None = None


@dataclass(frozen=True)
class LayerOf(NoMask):
    """A layer, from 1, of a mixture."""

    mixture: Mixture
    layer: int


def mixed(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, *, place: LayerOf) -> Tensor:
    """Compute a layer's attention. :func:`flashpoint.watch` records calls of this function.

    Args:
        q: [B, H, T, d].
        k, v: [B, H_kv, T, d].
    """
    mixture, layer = place.mixture, place.layer
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if mixture.layers is not None and layer not in mixture.layers:
        return engine(mixture.elsewhere)(q, k, v, is_causal, scale)
    inside = engine(mixture.inside)(q, k, v, is_causal, scale)
    heads = heads_in(layer, mixture.layers, mixture.heads)
    if heads is None:
        return inside
    chosen = torch.zeros(q.shape[1], dtype=torch.bool, device=q.device)
    chosen[[head - 1 for head in heads]] = True
    return torch.where(chosen[:, None, None], inside, engine(mixture.elsewhere)(q, k, v, is_causal, scale))
