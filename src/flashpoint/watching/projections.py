"""Which weights make the queries and keys of each head, their spectral norms, and the early warning by these.

Nobody tells which part of which matrix feeds a head: it is found once, in the graph of a layer. The one module with a
matrix through which q comes is the projection, and those of its output's features are a head's on which q of the head
depends.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flashpoint.early_warning import LOOKBACK, Sentinel, largest_eigenvalue
from flashpoint.runs.metric_table import W_K_NORM, W_Q_NORM
from flashpoint.watching.arrivals import Arrivals, Number
from flashpoint.watching.events import AttentionCalled, CaptureWanted, Handler, Publish, StepEnded
from flashpoint.watching.interceptor import Hook, with_hooks
from flashpoint.watching.notices import Notices
from flashpoint.watching.watched_run import WatchedRun


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


_DIGITS = 12
"""Powers of two by which heads are told apart in one backward pass: FP16 holds numbers near one times all of them."""


Output = tuple[nn.Module, GradientEdge, int]
"""A module, the edge of its output in the graph, and the output's features: the tensor itself would keep what
checkpoints give up."""


class ModuleOutputs:
    """While entered, remembers which modules with a matrix have an output in the graph, by its node.

    Args:
        wanted: whether a module's output now is one to remember.
    """

    def __init__(self, model: nn.Module, wanted: Callable[[], bool]) -> None:
        self._model, self._wanted = model, wanted
        self.by_node: dict[Any, Output] = {}

    def __enter__(self) -> ModuleOutputs:
        with_matrix = [module for module in with_hooks(self._model) if _matrix(module) is not None]
        self._hooks = [module.register_forward_hook(Hook(self._remember)) for module in with_matrix]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _remember(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() > 1 and output.grad_fn is not None and self._wanted():
            self.by_node[output.grad_fn] = module, get_gradient_edge(output), output.shape[-1]


def _matrix(module: nn.Module) -> nn.Parameter | None:
    """Return a module's own matrix: that of a module inside it makes a part of its output, as with adapters."""
    weight = module._parameters.get("weight")
    return weight if weight is not None and weight.dim() == 2 else None


def projection(q: Tensor, outputs: ModuleOutputs, groups: int, copies: int = 1) -> Projection | None:
    """Return what makes ``q`` [B, H, T, d], or keys that ``groups`` heads share, each of them ``copies`` times there;
    None where no module with a matrix does, or several do, as with adapters."""
    found = _made_by(q, outputs)
    if found is None:
        return None
    module, edge, width = found
    weight = _matrix(module)
    by_column = not isinstance(module, nn.Linear) and type(module).__name__ == "Conv1D"  # GPT-2's, in Transformers
    if weight is None or weight.shape[1 if by_column else 0] != width:
        return None
    heads = _heads_of_features(q, edge, copies)
    if heads is None:
        return None
    features = [(heads == head).nonzero().flatten() for head in range(q.shape[1] // copies)]
    if len({len(of_head) for of_head in features}) > 1 or not len(features[0]):
        return None
    return Projection(weight, by_column, torch.stack(features).repeat_interleave(groups * copies, 0).to(weight.device))


def _made_by(q: Tensor, outputs: ModuleOutputs) -> Output | None:
    """Return the one module through whose output q comes; None where it comes through another one or a matrix of no
    module, too."""
    found: list[Output] = []
    seen, left = set[Any](), [_source(q)[0]]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in outputs.by_node:
            found.append(outputs.by_node[node])
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf.numel() > q.shape[1] * q.shape[-1]:  # a bias or a norm has one number a feature
            return None
        left += [parent for parent, _ in node.next_functions]
    return found[0] if len(found) == 1 else None


def _source(q: Tensor) -> tuple[Any, int]:
    """Return the edge by which q comes; before the cast to FP16 that it shares with k and v."""
    node: Any = q.grad_fn
    stabilizers = sys.modules.get("flashpoint.numerics.stabilizers")  # loaded, where a graph has such a cast
    if stabilizers is not None and stabilizers.enters_fp16(node):
        return cast("tuple[Any, int]", node.next_functions[q.output_nr])
    return node, q.output_nr


def _heads_of_features(q: Tensor, edge: GradientEdge, copies: int) -> Tensor | None:
    """Return of which head's queries each feature of a projection's output is, [features] int64, from 0, and −1 where
    it is of none. None where a feature is of several heads. Of copies in a row the first is asked: they count as one.

    Gradients are linear: where those that come to a head are twice as large, those of its features are, too, to the
    bit. So a few backward passes tell all heads apart: a checkpoint computes its layer anew in each of them.
    """
    places = torch.arange(q.shape[1], device=q.device)
    heads = places // copies
    generator = torch.Generator(q.device).manual_seed(0)
    asked = torch.randn(q.shape, generator=generator, device=q.device, dtype=torch.float32)
    asked *= (places % copies == 0)[:, None, None]
    devices, source = [q.device] if q.device.type == "cuda" else [], GradientEdge(*_source(q))

    def answer(exponents: Tensor) -> Tensor:
        times = torch.exp2(exponents.float())[:, None, None]
        with torch.random.fork_rng(devices):  # what is computed anew may draw dropout: the same each time
            (of_output,) = torch.autograd.grad(source, edge, (asked * times).to(q.dtype), retain_graph=True)
        return of_output.flatten(0, -2).float()

    base = answer(torch.zeros_like(heads))
    size = base.abs()
    clear = size > size.amax(0) / 1024  # smaller ones may have lost bits
    largest = size.argmax(0, keepdim=True)
    found = torch.zeros(base.shape[-1], dtype=torch.int64, device=q.device)
    for place in range(_digits(len(heads))):
        digit = heads // _DIGITS**place % _DIGITS
        other = answer(digit - _DIGITS // 2)
        times = (other.gather(0, largest) / base.gather(0, largest)).flatten()
        exponent = torch.log2(times.abs()).nan_to_num(0.0, 0.0, 0.0).round()
        expected = base * torch.exp2(exponent)
        if not ((other - expected).abs() <= expected.abs() / 8)[clear].all():
            return None
        found += (exponent.long() + _DIGITS // 2) * _DIGITS**place
    return torch.where(size.amax(0) > 0, found, -1)


def _digits(heads: int) -> int:
    return max(1, math.ceil(math.log(heads, _DIGITS)))


def _of_multihead(call: AttentionCalled, part: int) -> Projection | None:
    """Return the projection of ``nn.MultiheadAttention``: part 0 makes q, 1 makes k."""
    heads, width = call.q.shape[1], call.q.shape[1] * call.q.shape[-1]
    if not call.weights:
        return None
    packed = len(call.weights) == 1
    weight = call.weights[0 if packed else part]
    first = part * width if packed else 0
    return Projection(weight, False, torch.arange(first, first + width, device=weight.device).view(heads, -1))


Found = tuple[Projection | None, Projection | None]
"""What makes q, and what makes k."""


def projections_of(call: AttentionCalled, outputs: ModuleOutputs) -> Found:
    """Return the projections of a layer, whose graph is there."""
    groups = call.q.shape[1] // call.k.shape[1]
    of_k = _of_multihead(call, 1) or projection(call.k, outputs, groups)
    if of_k is None and (copies := _copies_of_heads(call.k)) > 1:
        of_k = projection(call.k, outputs, groups, copies)
    return _of_multihead(call, 0) or projection(call.q, outputs, 1), of_k


def _copies_of_heads(k: Tensor) -> int:
    """Return how often in a row each head of keys [B, H, T, d] is there, as where grouped ones were repeated."""
    different = torch.unique_consecutive(k[:1].detach(), dim=1).shape[1]
    copies, rest = divmod(k.shape[1], different)
    same = k[:1].unflatten(1, (different, copies)) if not rest else k[:1, :, None]
    return copies if not rest and torch.equal(same, same[:, :, :1].expand_as(same)) else 1


def by_metric(layers: list[Found]) -> dict[str, list[Projection]]:
    """Return the projections of all layers by metric; without those that one of the layers lacks."""
    found = {metric.name: [layer[part] for layer in layers] for part, metric in enumerate((W_Q_NORM, W_K_NORM))}
    return {name: [one for one in parts if one] for name, parts in found.items() if all(parts)}


class ProjectedGradients:
    """The largest magnitudes of the gradients of W_Q and W_K by head, where all layers have such matrices alike.

    Attributes:
        of: the matrices.
    """

    def __init__(self, of: Mapping[str, list[Projection]]) -> None:
        self.of = of
        self._weights: dict[str, list[Projection]] = {}
        self._features: dict[str, Tensor] = {}
        parts = {"dQ": of[W_Q_NORM.name], "dK": of[W_K_NORM.name]}
        for name, some in parts.items():
            if len({(one.weight.shape, one.features.shape, one.weight.device, one.by_column) for one in some}) == 1:
                self._weights[name] = some
                self._features[name] = torch.stack([one.features.to(one.weight.device) for one in some])
        if len(self._weights) == 2 and all(q.weight is k.weight for q, k in zip(*parts.values(), strict=True)):
            self._add_others(parts["dQ"])

    def _add_others(self, fused: list[Projection]) -> None:
        """Add the features of a fused weight that make neither q nor k: those of v, and of whatever is beside it."""
        count = fused[0].weight.shape[1 if fused[0].by_column else 0]
        known = torch.cat([self._features[name].flatten(1) for name in ("dQ", "dK")], 1).cpu()
        others = [sorted(set(range(count)) - set(row.tolist())) for row in known]
        if len(set(map(len, others))) == 1 and others[0]:
            self._weights["other"] = fused
            self._features["other"] = torch.tensor(others, device=fused[0].weight.device)[:, None]

    def largest(self) -> dict[str, Tensor]:
        """Return them for q and k, [layers, H] each, and for the other features of a fused weight, [layers, 1]; nothing
        of those that lack a gradient."""
        rows: dict[int, Tensor] = {}
        found: dict[str, Tensor] = {}
        for name, some in self._weights.items():
            for one in some:
                if one.weight.grad is None or one.weight.grad.layout != torch.strided:
                    return {}
                if id(one.weight) not in rows:
                    dim = 0 if one.by_column else 1
                    rows[id(one.weight)] = torch.linalg.vector_norm(one.weight.grad, math.inf, dim=dim)
            features = self._features[name]
            by_feature = torch.stack([rows[id(one.weight)] for one in some])
            found[name] = by_feature.gather(1, features.flatten(1)).view(features.shape).amax(-1)
        return found


@torch.no_grad()
def spectral_norms(projections: list[Projection]) -> Tensor:
    """Return the largest singular value of each head's matrix, [layers, H] float32; NaN behind the heads of a layer
    that has fewer."""
    grams = [_gram(one.matrices()) for one in projections]
    if len({gram.shape for gram in grams}) == 1:  # at once: one by one they are a thousand kernels on a GPU
        return _roots(torch.stack(grams))
    return nn.utils.rnn.pad_sequence([_roots(gram) for gram in grams], batch_first=True, padding_value=math.nan)


def _gram(matrices: Tensor) -> Tensor:
    """Return the smaller one of M·Mᵀ and Mᵀ·M of each matrix, float64."""
    double = matrices.double()
    return double @ double.mT if double.shape[-2] <= double.shape[-1] else double.mT @ double


def _roots(grams: Tensor) -> Tensor:
    """Return the square root of each matrix's largest eigenvalue, float32."""
    return largest_eigenvalue(grams, torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)).sqrt().float()


@dataclass(frozen=True, slots=True)
class _NormsArrived:
    """Norms of a step can be read: of each metric [layers, H] float32.

    Attributes:
        alike: whether all layers have as many heads.
    """

    step: int
    names: Sequence[str]
    alike: bool
    numbers: Sequence[Number]


class WeightNorms:
    """Logs the spectral norms of W_Q and W_K at an interval, and has a head captured that grows as before an explosion.

    Args:
        found: returns the matrices by metric, once a step has shown them.
        sentinel: judges the norms.
    """

    def __init__(
        self,
        found: Callable[[], Mapping[str, list[Projection]] | None],
        interval: int,
        run: WatchedRun,
        sentinel: Sentinel,
        arrivals: Arrivals,
        publish: Publish,
        notices: Notices,
    ) -> None:
        self._found, self._interval, self._run = found, interval, run
        self._sentinel, self._arrivals, self._publish, self._notices = sentinel, arrivals, publish, notices

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        what = "measuring W_Q and W_K"
        return Handler(StepEnded, what, self._measure), Handler(_NormsArrived, what, self._log)

    def _measure(self, event: StepEnded) -> None:
        projections = self._found()
        if projections and (event.step + 1) % self._interval == 0:
            norms = [spectral_norms(some) for some in projections.values()]
            alike = len({len(one.features) for some in projections.values() for one in some}) == 1
            self._arrivals.ask(_NormsArrived(event.step, tuple(projections), alike, norms))

    def _log(self, event: _NormsArrived) -> None:
        read = zip(event.names, event.numbers, strict=True)
        norms = {name: cast(Tensor, one).cpu().double().numpy() for name, one in read}
        if event.alike:
            self._run.log(event.step, norms)
        else:
            self._notices.warn("layers have different numbers of heads: norms of W_Q and W_K are judged for the early "
                       "warning, and not logged")  # fmt: skip
        if W_Q_NORM.name in norms and (warning := self._sentinel.update(event.step, norms[W_Q_NORM.name])):
            where = f"{self._run.layer_told(warning.layer)}, head {warning.head}"
            reason = (
                f"W_Q of {where} has grown ×{warning.growth:.1f} in {LOOKBACK} steps, to {warning.norm:.1f}: an "
                "explosion may follow"
            )
            self._publish(CaptureWanted(reason, warning.layer))
