"""One attention call of somebody's model as intercepted, and hooks that leave no trace in the model.

Shapes: N sequences that are kept, H heads, T tokens, d features per head, C features of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashpoint.diagnosis.call import AttentionCall


class Hook:
    """A hook of a module that copies and files of the module have in name only."""

    def __init__(self, do: Callable[..., None] | None = None) -> None:
        self._do = do

    def __call__(self, *given: Any) -> None:
        if self._do is not None:
            self._do(*given)

    def __reduce__(self) -> Any:
        return Hook, ()


def with_hooks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that take hooks: scripted ones take none, and call nothing that is Python's."""
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


@dataclass(eq=False)
class InterceptedCall:
    """One call, whose backward pass may be still to come.

    Attributes:
        q, k: as given to the attention, with their graph, by which projections are found.
        kept: copies of some sequences, [N, H, T, d], by the names of :class:`AttentionCall`.
        weights: where ``nn.MultiheadAttention`` called it: [3C, C] of W_Q, W_K and W_V, or these three.
        forward: the forward pass that it is of, from 0: an evaluation may come before the training's.
        has_derivative: whether the gradient that came last can be differentiated, as with ``create_graph=True``.
        is_differentiated_twice: whether another one came after that: it is not of the call alone.
    """

    attention: str
    q: Tensor
    k: Tensor
    is_causal: bool
    scale: float
    kept: dict[str, Tensor] = field(default_factory=dict)
    weights: tuple[nn.Parameter, ...] = ()
    forward: int = 0
    has_derivative: bool = False
    is_differentiated_twice: bool = False

    def with_gradients(self, layer: int, step: int) -> AttentionCall | None:
        """Return the call; None if no gradient came to its output, or not of this call alone."""
        if "grad_out" not in self.kept or self.is_differentiated_twice:
            return None
        gradients = {name: self.kept.get(name) for name in ("grad_q", "grad_k", "grad_v")}
        told = {"is_causal": self.is_causal, "scale": self.scale, "attention": self.attention}
        tensors = {name: self.kept[name] for name in ("q", "k", "v", "out", "grad_out")}
        return AttentionCall(**tensors, **gradients, **told, layer=layer, step=step)  # type: ignore[arg-type]
