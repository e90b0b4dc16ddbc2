"""Which weights make the queries and keys of each head, and their spectral norms.

Nobody tells which part of which matrix feeds a head: it is found once, in the graph of one forward pass. The nearest
module with a matrix in the graph of q is the projection, and those of its output's features are a head's on which q of
the head depends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from flashpoint.capture.intercepted_call import Hook, InterceptedCall
from flashpoint.probes.spectral import largest_eigenvalue


@dataclass(frozen=True)
class Projection:
    """The part of a weight that makes the queries, or keys, of one layer.

    Attributes:
        weight: [features, C], or [C, features] if ``by_column``.
        features: of each head, [H, f] int64; heads of queries that share keys have the same ones. They lie beside the
            weight: to bring them there is to wait for the device.
    """

    weight: nn.Parameter
    by_column: bool
    features: Tensor

    def matrices(self) -> Tensor:
        """Return the matrix of each head, [H, f, C]."""
        weight = self.weight.detach()
        return (weight.mT if self.by_column else weight)[self.features.to(weight.device)]


class ModuleOutputs:
    """While entered, remembers the outputs of modules with a matrix, by their node in the graph."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.by_node: dict[Any, tuple[nn.Module, Tensor]] = {}

    def __enter__(self) -> ModuleOutputs:
        with_matrix = [m for m in self._model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)]
        self._hooks = [
            m.register_forward_hook(Hook(self._remember)) for m in with_matrix if cast(Tensor, m.weight).dim() == 2
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _remember(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            self.by_node[output.grad_fn] = module, output


def projection(q: Tensor, outputs: ModuleOutputs, groups: int) -> Projection | None:
    """Return what makes ``q`` [B, H, T, d], or keys that ``groups`` heads share; None where no module with a matrix
    does, as in a sharded model."""
    found = next((outputs.by_node[node] for node in _ancestors(q.grad_fn) if node in outputs.by_node), None)
    if found is None:
        return None
    module, output = found
    weight: Any = module.weight
    by_column = not isinstance(module, nn.Linear) and type(module).__name__ == "Conv1D"  # GPT-2's, in Transformers
    if not isinstance(weight, nn.Parameter) or weight.shape[1 if by_column else 0] != output.shape[-1]:
        return None
    features = []
    generator = torch.Generator(q.device).manual_seed(0)
    for head in range(q.shape[1]):
        asked = torch.zeros_like(q)
        asked[:, head] = torch.randn(asked[:, head].shape, generator=generator, device=q.device).to(q.dtype)
        (answer,) = torch.autograd.grad(q, output, asked, retain_graph=True)
        features.append((answer != 0).flatten(0, -2).any(0).nonzero().flatten())
    together = torch.cat(features)
    alike = len({len(of_head) for of_head in features}) == 1 and len(features[0]) > 0
    if not alike or len(together.unique()) < len(together):  # a head of its own has features of its own
        return None
    return Projection(weight, by_column, torch.stack(features).repeat_interleave(groups, 0).to(weight.device))


def _packed(call: InterceptedCall, part: int) -> Projection | None:
    """Return the projection of ``nn.MultiheadAttention``: part 0 makes q, 1 makes k."""
    heads, width = call.q.shape[1], call.q.shape[1] * call.q.shape[-1]
    if call.packed is None:  # three matrices
        return None
    features = torch.arange(part * width, (part + 1) * width, device=call.packed.device)
    return Projection(call.packed, False, features.view(heads, -1))


@torch.no_grad()
def spectral_norms(projections: list[Projection]) -> Tensor:
    """Return the largest singular value of each head's matrix, [layers, H] float32."""
    grams = [_gram(one.matrices()) for one in projections]
    if len({gram.shape for gram in grams}) == 1:  # at once: one by one they are a thousand kernels on a GPU
        return _roots(torch.stack(grams))
    return torch.stack([_roots(gram) for gram in grams])


def projections_of(calls: list[InterceptedCall], outputs: ModuleOutputs) -> dict[str, list[Projection]]:
    """Return the projections of all layers by metric; without those that one of the layers lacks."""
    found = {
        "w_q_spectral_norm": [_packed(call, 0) or projection(call.q, outputs, 1) for call in calls],
        "w_k_spectral_norm": [
            _packed(call, 1) or projection(call.k, outputs, call.q.shape[1] // call.k.shape[1]) for call in calls
        ],
    }
    return {name: [one for one in layers if one] for name, layers in found.items() if all(layers)}


def _gram(matrices: Tensor) -> Tensor:
    """Return the smaller one of M·Mᵀ and Mᵀ·M of each matrix, float64."""
    double = matrices.double()
    return double @ double.mT if double.shape[-2] <= double.shape[-1] else double.mT @ double


def _roots(grams: Tensor) -> Tensor:
    """Return the square root of each matrix's largest eigenvalue, float32."""
    return largest_eigenvalue(grams, torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)).sqrt().float()


def _ancestors(node: Any) -> Iterator[Any]:
    """Return the nodes of a graph from one on, nearest first."""
    seen, front = set(), [node]
    while front:
        front = [one for one in front if one is not None and not (one in seen or seen.add(one))]  # type: ignore[func-returns-value]
        yield from front
        front = [parent for one in front for parent, _ in one.next_functions]
