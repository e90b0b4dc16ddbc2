"""The graph that a call of an attention made: by which edges its gradients come, and what shares them.

Nodes have numbers in the order in which they were made; a call's own are those since the call began.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
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
            names.setdefault(origin_of(tensor), []).append(name)
    told: dict[str, list[Edge]] = {}
    for origin, edges in edges_to(names, out, since).items():
        alike = names[origin]
        if len(alike) == 1:
            told[alike[0]] = edges
        else:
            known = in_order and len(edges) == len(alike)
            told |= {name: [edges[at]] if known else [] for at, name in enumerate(alike)}
    return told


def origin_of(tensor: Tensor) -> Edge:
    """Return the node that made a tensor, or that adds up its gradient, and which of the node's outputs it is."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def edges_to(origins: Iterable[Edge], out: Tensor, since: int) -> dict[Edge, list[Edge]]:
    """Return the edges that lead from the nodes since a number to each origin, in the order of the inputs."""
    found: dict[Edge, list[Edge]] = {origin: [] for origin in origins}
    seen = set()
    open_edges: list[tuple[Edge | None, Edge]] = [(None, origin_of(out))]
    while open_edges:
        edge, end = open_edges.pop()
        node, _ = end
        if end in found and edge is not None:
            found[end].append(edge)
        elif node is not None and node not in seen and node._sequence_nr() >= since:
            seen.add(node)
            open_edges += [((node, at), onward) for at, onward in reversed([*enumerate(node.next_functions)])]
    return found


def other_outputs(result: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors beside O that an attention returned in a tuple or list, and what is told of each."""
    if isinstance(result, tuple | list):
        for number, one in enumerate(result[1:], 2):
            for tensor in one if isinstance(one, tuple | list) else (one,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    yield f"output {number} {list(tensor.shape)}", tensor


def meeting(other: Tensor, out: Tensor, inputs: Iterable[Tensor], since: int) -> tuple[bool, bool]:
    """Return whether a gradient of another output reaches the call's inputs by nodes of O, and not through O itself.

    And whether all of it does. Else what comes by the edges of O to some input lacks a part of it.
    """
    end = origin_of(out)
    of_out = _own_nodes([end], None, since)
    of_other = _own_nodes([origin_of(other)], end, since)
    origins = {origin_of(tensor) for tensor in inputs if tensor.requires_grad}
    alone = any(edge in origins for node in of_other - of_out for edge in node.next_functions)
    return not of_out.isdisjoint(of_other), not alone


def has_fp16_inside(q: Tensor, out: Tensor, since: int) -> bool:
    """Return whether the tensors of a call, or some inside it, were cast to FP16 by :func:`flashpoint.stabilize`."""
    stabilizers = sys.modules.get("flashpoint.numerics.stabilizers")  # loaded, where a graph has such a cast
    nodes = {origin_of(q)[0] if q.requires_grad else None, *_own_nodes([origin_of(out)], None, since)}
    return stabilizers is not None and any(map(stabilizers.enters_fp16, nodes))


def reaches_others(out: Tensor, inputs: Iterable[Tensor], since: int) -> bool:
    """Return whether gradients of O come to other tensors than the call's inputs, as to parameters of a module."""
    own = _own_nodes([origin_of(out)], None, since)
    origins = {origin_of(tensor) for tensor in inputs if tensor.requires_grad}
    ends = {edge for node in own for edge in node.next_functions if edge[0] is not None and edge[0] not in own}
    return not ends <= origins


def _own_nodes(open_edges: list[Edge], end: Edge | None, since: int) -> set[Any]:
    """Return the nodes of the call that edges lead to, without those behind ``end``."""
    found: set[Any] = set()
    while open_edges:
        edge = open_edges.pop()
        node, _ = edge
        if node is None or edge == end or node in found or node._sequence_nr() < since or not node.next_functions:
            continue
        found.add(node)
        open_edges += node.next_functions
    return found


@torch.no_grad()
def beside(whole: Tensor, through: Tensor | None, parts: int) -> Tensor | None:
    """Return what a gradient has beside those of its parts that came through O; None where that is nothing.

    Args:
        whole: the gradient.
        through: the sum of the parts; None is none.
        parts: their number. The sum of more than one can differ from what PyTorch added up by rounding.
    """
    if through is None:
        return whole if bool((whole != 0).any()) else None
    differs = (whole != through) & ~(whole.isnan() & through.isnan())
    if parts > 1:
        rounding = 2 * parts * torch.finfo(whole.dtype).eps * torch.maximum(whole.abs().max(), through.abs().max())
        differs &= ~((whole - through).abs() <= rounding)
    return whole - through if bool(differs.any()) else None


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
