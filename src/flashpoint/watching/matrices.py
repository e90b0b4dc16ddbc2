"""Which weights make the queries and keys of each head: found once, in the graph of a layer.

Nobody tells which part of which weight feeds a head. From q the graph is followed to the nearest products with a
matrix: outputs of modules that have one, and products with a parameter of the model, as by ``@`` or ``einsum``. Several
make q where each of its numbers comes from one of them, as where tokens of two kinds are joined. Of a product's output
those features are a head's on which q of the head depends.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from flashpoint.runs.metric_table import W_K_NORM, W_Q_NORM
from flashpoint.watching.events import AttentionCalled
from flashpoint.watching.interceptor import Hook, with_hooks
from flashpoint.watching.left_out import is_foreign
from flashpoint.watching.projections import Found, Projection

_DIGITS = 12
"""Powers of two by which heads are told apart in one backward pass: FP16 holds numbers near one times all of them."""
_CHOOSING = frozenset(
    f"{name}Backward0" for name in ("Cat", "Stack", "Where", "IndexPut", "IndexCopy", "Scatter", "MaskedScatter")
) | {"torch::autograd::CopySlices"}  # fmt: skip
"""Nodes that take each number from one of their inputs."""
_PRODUCTS = {"MmBackward0": 0, "BmmBackward0": 0, "AddmmBackward0": 1, "BaddbmmBackward0": 1}
"""Nodes of products, and the place of the left factor among their inputs; the right one is behind it."""
_CASTS = frozenset({"ToCopyBackward0"})
_VIEWS = _CASTS | frozenset(
    f"{name}Backward{number}"
    for name in (
        "Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze",
        "T", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
    )
    for number in range(4)
)  # fmt: skip
"""Nodes that order numbers otherwise, leave some out or repeat them."""

_ADDING = {"Dora", "MiCA", "Velora"}
"""Variants of PEFT's LoRA that add their ``get_delta_weight``, DoRA with a length of each feature."""


class NotFound(Exception):
    """No matrix is known that makes q or k; the text, which goes on "it", says why."""


@dataclass(frozen=True, eq=False)
class Product:
    """A product with a weight, in the graph.

    Attributes:
        weight: as its module or the model holds it.
        inputs: dimensions of the weight over which the product sums; the others are features.
        edge: of the product's output.
        by_feature: returns the output's gradient as [tokens, features].
        of_weight: returns numbers of the output's features [features] as those of the weight's, −1 for those that make
            none.
        added: returns what is added to the weight, as by an adapter; None for nothing.
    """

    weight: nn.Parameter
    inputs: tuple[int, ...]
    edge: GradientEdge
    by_feature: Callable[[Tensor], Tensor]
    of_weight: Callable[[Tensor], Tensor] = lambda heads: heads
    added: Callable[[], Tensor] | None = None


class Products:
    """While entered, remembers which modules with a matrix have an output in the graph, by its node.

    Args:
        wanted: whether a module's output now is one to remember.
    """

    def __init__(self, model: nn.Module, wanted: Callable[[], bool]) -> None:
        self._model, self._wanted = model, wanted
        self._by_node: dict[Any, tuple[Product | str, tuple[str, int]]] = {}
        self._frozen = set[tuple[str, int]]()  # where modules gave outputs without a graph, and their features

    def __enter__(self) -> Products:
        def remembering(name: str) -> Callable[..., None]:
            return lambda module, _inputs, output: self._remember(name.rpartition(".")[0], module, output)

        named = with_hooks(self._model)
        with_matrix = {module: name for module, name in named.items() if _matrix(module) is not None}
        self._hooks = [module.register_forward_hook(Hook(remembering(name))) for module, name in with_matrix.items()]
        self._holders = {
            id(one): (module, name) for module, name in named.items() for one in module._parameters.values()
        }
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def at(self, node: Any) -> Product | None:
        """Return the product that a node of the graph is the end of, if it is one.

        Raises:
            NotFound: it is the end of a product and of more.
        """
        found, place = self._by_node.get(node, (None, None))
        if isinstance(found, str):
            raise NotFound(found)
        if found is None and (found := self._with_parameter(node)) is not None:
            holder, name = self._holders[id(found.weight)]
            place = name, node._input_metadata[0].shape[-1]
            if any(one is not None and one.dim() > 1 and not one.requires_grad for one in holder._parameters.values()):
                self._frozen.add(place)
        if found is not None and found.added is None and place in self._frozen:
            raise NotFound("may be a sum with a product of a frozen weight beside it")
        return found

    def _remember(self, beside: str, module: nn.Module, output: Any) -> None:
        """Keep the edge of an output, not the tensor, which would keep what checkpoints give up. ``beside`` is the name
        of the module that has this one."""
        if not (isinstance(output, Tensor) and output.dim() > 1 and self._wanted() and torch.is_grad_enabled()):
            return
        matrix, node, place = _matrix(module), output.grad_fn, (beside, output.shape[-1])
        if node is None:
            self._frozen.add(place)
        elif isinstance(matrix, str):
            self._by_node[node] = matrix, place
        elif matrix is not None and matrix.weight.shape[1 if matrix.by_column else 0] == output.shape[-1]:
            inputs, edge = (0 if matrix.by_column else 1,), GradientEdge(node, output.output_nr)
            made = Product(matrix.weight, inputs, edge, lambda grad: grad.flatten(0, -2), added=matrix.added)
            self._by_node[node] = made, place

    def _with_parameter(self, node: Any) -> Product | None:
        """Return the product of something with a parameter of the model that a node is; None if it is none."""
        name, edge = node.name(), GradientEdge(node, 0)
        if name == "ConvolutionBackward0":
            path = self._views(*node.next_functions[1])
            if path is None or node._saved_groups != 1 or node._saved_transposed:
                return None
            if any(view.name() not in _CASTS for view, _ in path.nodes):
                return None
            dims = tuple(range(1, len(path.shape)))
            return Product(path.weight, dims, edge, lambda grad: grad.movedim(1, -1).flatten(0, -2))
        if name not in _PRODUCTS:
            return None
        for right in (False, True):
            path = self._views(*node.next_functions[_PRODUCTS[name] + right])
            if path is None or (inputs := _summed_over(path, right)) is None:
                continue
            tokens = -2 if right else -1
            return Product(
                path.weight, inputs, edge, lambda grad, tokens=tokens: grad.movedim(tokens, 0).flatten(1),  # type: ignore[misc]
                lambda heads, path=path, right=right, inputs=inputs: _of_weight(heads, path, right, inputs),  # type: ignore[misc]
            )  # fmt: skip
        return None

    def _views(self, node: Any, place: int) -> _Path | None:
        """Return how a factor of a product is made of a parameter of the model; None where it is made otherwise."""
        shape: tuple[int, ...] = ()
        nodes: list[tuple[Any, int]] = []
        while node is not None:
            shape = shape or tuple(node._input_metadata[place].shape)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                return _Path(leaf, shape, tuple(nodes)) if id(leaf) in self._holders and leaf.dim() > 1 else None
            if node.name() not in _VIEWS:
                return None
            nodes.append((node, place))
            node, place = node.next_functions[0]
        return None


@dataclass(frozen=True)
class _Path:
    """Views that make a factor of a product of a weight.

    Attributes:
        shape: of the factor.
        nodes: of the views, the last one first, each with which of its outputs is taken.
    """

    weight: nn.Parameter
    shape: tuple[int, ...]
    nodes: tuple[tuple[Any, int], ...]

    def back(self, of_factor: Tensor) -> Tensor:
        """Return numbers of the factor, which is broadcast to it, as numbers of the weight: NaN where the factor does
        not have them, or has several in the place of one.

        The nodes are called one by one. The engine would call the hooks of the weight, too.
        """
        numbers = of_factor.float().expand(self.shape)  # which holds whole numbers to 2^24
        count = self._add_up(torch.ones_like(of_factor, dtype=torch.float32).expand(self.shape))
        if bool((count <= 1).all()):
            return self._add_up(numbers).where(count == 1, math.nan)
        total, squares = (self._add_up(x) for x in (numbers.double(), numbers.double().square()))
        mean = total / count
        return mean.where(squares == mean.square() * count, math.nan)

    @torch.no_grad()
    def _add_up(self, numbers: Tensor) -> Tensor:
        for node, place in self.nodes:
            if node.name() not in _CASTS:
                outputs = range(len(node._input_metadata))
                numbers = node(*(numbers if output == place else None for output in outputs))
                numbers = numbers[0] if isinstance(numbers, tuple) else numbers
        return numbers


def _summed_over(path: _Path, right: bool) -> tuple[int, ...] | None:
    """Return over which dimensions of the weight a product with a factor sums; None where the weight is no matrix by
    such dimensions. ``right`` says which factor it is."""
    device, at = path.weight.device, -2 if right else -1
    numbers = torch.arange(path.shape[at], device=device)
    of_inputs = path.back(numbers[:, None] if right else numbers)
    steps = [of_inputs.diff(dim=dim).nan_to_num(0.0) for dim in range(of_inputs.dim())]
    changes = [dim for dim, step in enumerate(steps) if bool(step.any())]
    return tuple(changes) if math.prod(of_inputs.shape[dim] for dim in changes) == path.shape[at] > 1 else None


def _of_weight(heads: Tensor, path: _Path, right: bool, inputs: tuple[int, ...]) -> Tensor:
    """Return the heads of a product's features as those of the weight's, −1 for those of none."""
    by_factor = heads.reshape(*path.shape[:-2], -1)
    found = path.back(by_factor[..., None, :] if right else by_factor[..., None]).nan_to_num(-1.0)
    by_feature = found.movedim(inputs, [*range(-len(inputs), 0)]).flatten(-len(inputs)).flatten(0, -2)
    if not torch.equal(by_feature, by_feature[:, :1].expand_as(by_feature)):
        raise NotFound("has heads that share features of a weight")
    return by_feature[:, 0].long()


@dataclass(frozen=True)
class _Matrix:
    """A weight of two dimensions, whether its columns are features, and what returns what is added to it, if any is."""

    weight: nn.Parameter
    by_column: bool
    added: Callable[[], Tensor] | None


def _matrix(module: Any) -> _Matrix | str | None:
    """Return a module's matrix, to which adapters of PEFT add; or why it is not known, and None where there is none."""
    layers = sys.modules.get("peft.tuners.lora.layer")
    adapted = layers is not None and isinstance(module, layers.LoraLayer)
    base = module.get_base_layer() if adapted else module
    if "weight" in getattr(base, "parametrizations", ()):  # to ask for it may change it: spectral_norm then iterates
        return "is made by a weight that torch.nn.utils.parametrize computes, as weight_norm"
    weight = base._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return None
    if is_foreign(weight):
        return "is made by a weight of a class of its own, as quantised ones are"
    if not adapted and sum(one.dim() > 1 for one in module.parameters()) > 1:
        return "is a sum of several products, as with an adapter other than a LoRA of PEFT"
    kinds = {type(one).__name__.removesuffix("LinearVariant") for one in getattr(module, "lora_variant", {}).values()}
    adds = adapted and weight.is_floating_point() and hasattr(module, "get_delta_weight")
    if adapted and (not adds or kinds - _ADDING):
        return "is made by an adapter of PEFT that adds no matrix to another one"
    by_column = not isinstance(base, nn.Linear) and type(base).__name__ == "Conv1D"  # GPT-2's, in Transformers

    def added() -> Tensor:
        names = [] if module.merged or module.disable_adapters else module.active_adapters
        parts = [of_adapter(name) for name in names if name in module.lora_A]
        return sum(parts[1:], parts[0]) if parts else torch.zeros(())

    def of_adapter(name: str) -> Tensor:
        part: Tensor = module.get_delta_weight(name)
        if not module.use_dora.get(name):
            return part
        whole, inputs = weight + part, 0 if by_column else 1  # DoRA gives each feature a length that it learns
        lengths = torch.linalg.vector_norm(whole, dim=inputs, keepdim=True)
        learned: Tensor = module.lora_magnitude_vector[name].weight
        return whole * (learned.unsqueeze(inputs) / lengths) - weight

    return _Matrix(weight, by_column, added if adapted else None)


def _made_by(q: Tensor, products: Products) -> frozenset[Product]:
    """Return the products by which q comes.

    Raises:
        NotFound: none is known, or they are added up.
    """
    found: dict[Any, frozenset[Product]] = {None: frozenset()}
    open_nodes = [_source(q)[0]]
    while open_nodes:
        node = open_nodes[-1]
        if node not in found and (product := products.at(node)) is not None:
            found[node] = frozenset([product])
        if node in found:
            open_nodes.pop()
            continue
        parents = [parent for parent, _ in node.next_functions]
        if missing := [parent for parent in parents if parent not in found]:
            open_nodes += missing
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf.numel() > q.shape[1] * q.shape[-1]:  # a bias or a norm has one number a feature
            raise NotFound(f"is made of a parameter {list(leaf.shape)} without a product")
        parts = {found[parent] for parent in parents if found[parent]}
        if len(parts) > 1 and node.name() not in _CHOOSING:
            raise NotFound("is a sum of several products, as with an adapter other than a LoRA of PEFT")
        found[node] = frozenset[Product]().union(*parts)
    if not (made_by := found[_source(q)[0]]):
        raise NotFound("is no product with a weight" if q.grad_fn else "has no gradient")
    return made_by


def _source(q: Tensor) -> tuple[Any, int]:
    """Return the edge by which q comes; before the cast to FP16 that it shares with k and v."""
    node: Any = q.grad_fn
    stabilizers = sys.modules.get("flashpoint.numerics.stabilizers")  # loaded, where a graph has such a cast
    if stabilizers is not None and stabilizers.enters_fp16(node):
        return cast("tuple[Any, int]", node.next_functions[q.output_nr])
    return node, q.output_nr


def _heads_of_features(q: Tensor, product: Product, heads: Tensor) -> Tensor:
    """Return of which head's queries each feature of a product is, [features] int64, and −1 where it is of none.

    Places of q with the same number in ``heads`` hold the same: they count as one head, and the first is asked.

    Gradients are linear: where those that come to a head are twice as large, those of its features are, too, to the
    bit. So a few backward passes tell all heads apart: a checkpoint computes its layer anew in each of them.

    Raises:
        NotFound: a feature is of several heads.
    """
    generator = torch.Generator(q.device).manual_seed(0)
    asked = torch.randn(q.shape, generator=generator, device=q.device, dtype=torch.float32)
    asked *= (heads[:, None] == heads).tril(-1).any(1).logical_not()[:, None, None]
    devices, source = [q.device] if q.device.type == "cuda" else [], GradientEdge(*_source(q))

    def answer(times: Tensor) -> Tensor:
        with torch.random.fork_rng(devices):  # what is computed anew may draw dropout: the same each time
            given = (asked * times[:, None, None]).to(q.dtype)
            (of_output,) = torch.autograd.grad(source, product.edge, given, retain_graph=True)
        return product.by_feature(of_output).float()

    base = answer(torch.ones_like(heads))
    size = base.abs()
    clear = size > size.amax(0) / 1024  # smaller ones may have lost bits
    largest = size.argmax(0, keepdim=True)
    found = torch.zeros(base.shape[-1], dtype=torch.int64, device=q.device)
    for place in range(_digits(len(heads))):
        digit = heads // _DIGITS**place % _DIGITS
        other = answer(torch.exp2((digit - _DIGITS // 2).float()))
        times = (other.gather(0, largest) / base.gather(0, largest)).flatten()
        exponent = torch.log2(times.abs()).nan_to_num(0.0, 0.0, 0.0).round()
        expected = base * torch.exp2(exponent)
        if not ((other - expected).abs() <= expected.abs() / 8)[clear].all():
            found = _largest_parts(base, answer, heads)
            break
        found += (exponent.long() + _DIGITS // 2) * _DIGITS**place
    return torch.where(size.amax(0) > 0, found, -1)


def _largest_parts(base: Tensor, answer: Callable[[Tensor], Tensor], heads: Tensor) -> Tensor:
    """Return the head of each feature from which at least three quarters of its squared gradient come: one bit in each
    backward pass, by the sign of what comes to the head."""
    found = torch.zeros(base.shape[-1], dtype=torch.int64, device=base.device)
    for bit in range(int(heads.max()).bit_length()):
        part = (answer(1 - 2 * (heads >> bit & 1)) * base).sum(0) / base.square().sum(0)  # 1 − 2 of the share with −1
        if bool((part.abs() < 0.5).any()):
            raise NotFound("has features of several heads")
        found += (part < 0).long() << bit
    return found


def _digits(heads: int) -> int:
    return max(1, math.ceil(math.log(heads, _DIGITS)))


def _projection(q: Tensor, product: Product, groups: int, heads: Tensor) -> Projection:
    of_features = product.of_weight(_heads_of_features(q, product, heads))
    features = [(of_features == head).nonzero().flatten() for head in range(int(heads.max()) + 1)]
    if len({len(of_head) for of_head in features}) > 1 or not len(features[0]):
        raise NotFound("has other numbers of features of a weight in its heads")
    by_head = torch.stack(features)[heads].repeat_interleave(groups, 0).to(product.weight.device)
    return Projection(product.weight, product.inputs, by_head, product.added)


def _projections(q: Tensor, products: Products, groups: int = 1, heads: Tensor | None = None) -> tuple[Projection, ...]:
    """Return what makes q [B, H, T, d], or keys that ``groups`` heads share, with ``heads`` as copies of each other."""
    heads = torch.arange(q.shape[1], device=q.device) if heads is None else heads
    return tuple(_projection(q, product, groups, heads) for product in _made_by(q, products))


def _of_multihead(call: AttentionCalled, part: int) -> tuple[Projection, ...]:
    """Return the projection of ``nn.MultiheadAttention``: part 0 makes q, 1 makes k."""
    heads, width = call.q.shape[1], call.q.shape[1] * call.q.shape[-1]
    if not call.weights:
        return ()
    packed = len(call.weights) == 1
    weight = call.weights[0 if packed else part]
    first = part * width if packed else 0
    features = torch.arange(first, first + width, device=weight.device).view(heads, -1)
    return (Projection(weight, (1,), features),)


def projections_of(call: AttentionCalled, products: Products) -> Found:
    """Return the projections of a layer, whose graph is there."""
    found: dict[str, tuple[Projection, ...] | str] = {}
    for metric, find in ((W_Q_NORM, _of_queries), (W_K_NORM, _of_keys)):
        try:
            found[metric.name] = find(call, products)
        except NotFound as why:
            found[metric.name] = str(why)
    return found


def _of_queries(call: AttentionCalled, products: Products) -> tuple[Projection, ...]:
    return _of_multihead(call, 0) or _projections(call.q, products)


def _of_keys(call: AttentionCalled, products: Products) -> tuple[Projection, ...]:
    if found := _of_multihead(call, 1):
        return found
    groups = call.q.shape[1] // call.k.shape[1]
    try:
        return _projections(call.k, products, groups)
    except NotFound:
        heads = _equal_heads(call.k)
        if int(heads.max()) + 1 == len(heads):
            raise
        return _projections(call.k, products, groups, heads)


def _equal_heads(k: Tensor) -> Tensor:
    """Return a number for each head of keys [B, H, T, d], the same one for equal keys, as where grouped ones were
    repeated; [H] int64, from 0 without a gap."""
    return torch.unique(k[:1].detach(), dim=1, return_inverse=True)[1]
