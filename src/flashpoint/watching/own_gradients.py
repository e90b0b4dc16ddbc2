"""Gradients that one attention call gives to its q, k and v, whoever else uses these tensors.

A hook of a tensor gets the sum over all of its uses, and layers may share keys and values. So the nodes of the graph
that the call made are hooked, where they lead to q, k or v. The graph stays as it is, with the order of its sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

Edge = tuple[Any, int]
"""A node of the graph, and the place of one of its inputs; or of an input itself, the place in what its node gave."""


def next_node() -> int:
    """Return the number that the graph's next node will have."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def edges_of(inputs: Mapping[str, Tensor], out: Tensor, since: int, in_order: bool) -> dict[str, list[Edge]]:
    """Return by which edges a call gives each input its gradient; none where they cannot be told.

    Args:
        inputs: q, k and v. Those that want no gradient are left out.
        since: number of the graph's next node when the call began.
        in_order: whether the call is known to compute softmax(QKᵀ)V in this order, by which edges are told apart
            where one tensor is two of its inputs.
    """
    names: dict[Edge, list[str]] = {}
    for name, tensor in inputs.items():
        if tensor.requires_grad:
            names.setdefault(_origin(tensor), []).append(name)
    told: dict[str, list[Edge]] = {}
    for origin, edges in _edges_to(names, out, since).items():
        alike = names[origin]
        if len(alike) == 1:
            told[alike[0]] = edges
        else:
            known = in_order and len(edges) == len(alike)
            told |= {name: [edges[at]] if known else [] for at, name in enumerate(alike)}
    return told


def _origin(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _edges_to(origins: Mapping[Edge, object], out: Tensor, since: int) -> dict[Edge, list[Edge]]:
    """Return the edges that lead from the nodes since a number to each origin, in the order of the inputs."""
    found: dict[Edge, list[Edge]] = {origin: [] for origin in origins}
    seen = set()
    open_edges: list[tuple[Edge | None, Edge]] = [(None, _origin(out))]
    while open_edges:
        edge, end = open_edges.pop()
        node, _ = end
        if end in found and edge is not None:
            found[end].append(edge)
        elif node is not None and node not in seen and node._sequence_nr() >= since:
            seen.add(node)
            open_edges += [((node, at), onward) for at, onward in reversed([*enumerate(node.next_functions)])]
    return found


class GradientInParts:
    """A gradient of one backward pass, which comes by several edges."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self.begin()

    def begin(self) -> None:
        """Take what comes from here on as of another backward pass."""
        self._missing = self._parts
        self._sum: Tensor | None = None

    def add(self, part: Tensor | None) -> Tensor | None:
        """Add a part, None being zeros, and return the gradient once it is whole."""
        if part is not None:
            self._sum = part if self._sum is None else self._sum + part
        self._missing -= 1
        return None if self._missing else self._sum
