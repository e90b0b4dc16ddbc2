"""What is not finite in a step of a watched loop, and the largest magnitudes that tell it.

Of a tensor one number is taken, its largest magnitude: it is NaN or infinite where the tensor holds either. It stays on
the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from flashpoint.watching.events import AttentionCalled, AttentionRan, CallLeftOut
from flashpoint.watching.functions import output_of, queries_keys_values
from flashpoint.watching.graph import edges_of
from flashpoint.watching.left_out import is_foreign

_IN_ORDER = ("scaled_dot_product_attention", "flashpoint.attention")
"""Attentions whose tensors are [B, H, T, d], and which compute softmax(QKᵀ)V in this order."""
Groups = Sequence[tuple[Sequence[int], Tensor]]
"""The largest magnitudes of some tensors: places in the list of all, and as many numbers, by device and dtype."""


@dataclass(slots=True, eq=False)
class SeenCall:
    """An attention that an observed step called.

    Attributes:
        number: in its forward pass, from 1.
        layer: of the calls that are kept, from 1; None where it is left out.
        left_out: why; empty where it is kept.
        adds: whether it is given another tensor of floating point than q, k and v, as a mask.
    """

    number: int
    attention: str
    dtype: torch.dtype
    layer: int | None = None
    left_out: str = ""
    adds: bool = False


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What is not finite in a step, as far as it is known.

    Attributes:
        loss: None where it could not be read.
        weights, gradients: NaN or infinity by the name of the parameter that holds it; weights are those of the forward
            pass.
        finite_gradients: names of parameters whose gradients are finite.
        lacks_gradients: whether there were none, or zeros alone, as after ``zero_grad``.
        began: of the weights, when the forward pass began; None where that was not seen.
        moved: whether weights differed from then.
        by_head: heads in whose rows the gradient of W_Q ("dQ") or W_K ("dK") is not finite, by layer. And layers in
            which it is not in the other features of the same weight ("other"). Of layers whose matrices are known.
        calls: the attentions that the step called; none where it was not observed.
        tensors: of these the ones that are not finite, in the order of time, with their heads from 1, which may not be
            known.
        batch: whether the batch holds NaN or infinity; looked at where the loss is not finite.
    """

    step: int
    loss: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    finite_gradients: Sequence[str] = ()
    lacks_gradients: bool = False
    began: Mapping[str, float] | None = None
    moved: bool = False
    by_head: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    heads: int = 0
    calls: Sequence[SeenCall] = ()
    tensors: Sequence[tuple[SeenCall, str, tuple[int, ...]]] = ()
    batch: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """Numbers of a step that are on their way; those of projections and calls are behind those of parameters.

    Attributes:
        began: as ``weights``, when the forward pass began; none where that was not seen.
    """

    step: int
    began: Sequence[Sequence[int]]
    weights: Sequence[Sequence[int]]
    gradients: Sequence[Sequence[int]]
    names: Sequence[str]
    projected: Sequence[str]
    seen: Sequence[tuple[SeenCall, str]]

    @property
    def count(self) -> int:
        return sum(map(len, (self.began, self.weights, self.gradients, self.projected, self.seen)))


class CallMagnitudes:
    """Takes the largest magnitudes of what attentions are given and give, and of the gradients of both, as they come.

    Args:
        by_token: names of functions whose tensors are [B, T, H, d].
    """

    def __init__(self, by_token: Collection[str]) -> None:
        self._by_token = by_token
        self._seen: list[tuple[SeenCall, str, Tensor]] = []
        self._counts: dict[int, int] = {}  # calls by forward pass
        self._kept: dict[int, int] = {}  # those that are kept
        self._call: SeenCall | None = None
        self._hooks: list[RemovableHandle] = []

    def look(self, event: AttentionRan) -> None:
        """Take in a call. Gradients come by the edges of the call alone, as another use of q has a gradient, too."""
        tensors, out = _tensors_of(event), output_of(event.result)
        number = self._counts[event.forward] = self._counts.get(event.forward, 0) + 1
        if out is None or not out.is_floating_point():
            self._call = None
            return
        known = set(map(id, tensors.values()))
        given = [x for x in (*event.positional, *event.options.values()) if isinstance(x, Tensor)]
        adds = any(x.is_floating_point() and id(x) not in known for x in given)
        self._call = call = SeenCall(number, event.attention, out.dtype, adds=adds)
        in_order = event.attention in _IN_ORDER
        at = 2 if event.attention in self._by_token else 1
        at_out = at if in_order or ":" in event.attention else 2  # Transformers' attentions return [B, T, H, d]
        seen = self._seen

        def see(name: str, tensor: Tensor | None, at: int) -> None:
            if tensor is not None and seen is self._seen:  # not of a step that has ended
                seen.append((call, name, _by_heads(tensor, at)))

        def seeing(name: str, place: int) -> Callable[..., None]:
            return lambda given, _: see(name, given[place], at)

        for name, tensor in tensors.items():
            see(name, tensor, at)
        see("O", out, at_out)
        if out.requires_grad:
            self._hooks.append(out.register_hook(lambda gradient: see("dO", gradient, at_out)))
            for name, edges in edges_of(tensors, out, event.since, in_order).items():
                self._hooks += [node.register_hook(seeing(f"d{name.upper()}", place)) for node, place in edges]

    def keep(self, event: AttentionCalled) -> None:
        """The call that was seen last is kept: give it its layer."""
        self._kept[event.forward] = self._kept.get(event.forward, 0) + 1
        if self._call is not None:
            self._call.layer = self._kept[event.forward]

    def leave_out(self, event: CallLeftOut) -> None:
        """The call that was seen last is left out."""
        if self._call is not None:
            self._call.left_out = event.reason

    def taken(self) -> list[tuple[SeenCall, str, Tensor]]:
        """Return what a step has shown, and begin another one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._counts.clear()
        self._kept.clear()
        self._call = None
        seen, self._seen = self._seen, []
        return seen


def _tensors_of(event: AttentionRan) -> dict[str, Tensor]:
    """Return q, k and v of a call; none where its arguments do not tell them."""
    positional = [one for one in event.positional if isinstance(one, Tensor)]
    given = {**dict(zip(("query", "key", "value"), positional, strict=False)), **event.options}
    found = queries_keys_values(given, positional)
    return {} if found is None else dict(zip("qkv", found, strict=True))


def largest_magnitudes(tensors: Sequence[Tensor | None]) -> Groups:
    """Return the largest magnitudes of tensors; of those that are None, empty, of whole numbers or quantised none."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    held: dict[int, Tensor] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None and (one := _readable(tensor)) is not None:
            held[place] = one
            groups.setdefault((one.device, one.dtype), []).append(place)
    return [
        (places, torch.stack(torch._foreach_norm([held[place] for place in places], math.inf)))
        for places in groups.values()
    ]


def _readable(tensor: Tensor) -> Tensor | None:
    if is_foreign(tensor):
        return None
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or tensor.itemsize < 2 or tensor.is_meta or not tensor.numel():
        return None
    return tensor


def _by_heads(tensor: Tensor, at: int) -> Tensor:
    """Return the largest magnitude of each head [H], or of all where no dimension is that of heads, [1].

    Args:
        at: the dimension of heads, of four; [T, H, d] has what [B, T, H, d] has.
    """
    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        x = tensor.detach()
        if not x.numel():
            return x.new_zeros(1)
        x = x[None] if x.dim() == 3 and at == 2 else x
        if x.dim() != 4:
            return torch.linalg.vector_norm(x, math.inf).reshape(1)
        return torch.linalg.vector_norm(x, math.inf, dim=[dim for dim in range(4) if dim != at])
