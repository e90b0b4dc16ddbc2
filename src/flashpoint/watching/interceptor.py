"""Shows what each attention of somebody's model takes and gives in one forward and backward pass.

A hook of a tensor gets the sum of gradients over all of its uses, and layers may share keys and values. So the nodes of
the graph that the call made are hooked, where they lead to q, k or v. The graph stays as it is, with the order of its
sums.

Shapes: B sequences, H heads, H_kv heads of keys and values, T tokens, d features per head.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from flashpoint.diagnosis.call import WITH_FP16_INSIDE
from flashpoint.diagnosis.form import Form
from flashpoint.watching.events import (
    AttentionCalled,
    AttentionRan,
    BackwardReached,
    CallLeftOut,
    GradientSeen,
    GradientsUnknown,
    KeepingFailed,
    OtherGradientSeen,
    Publish,
)
from flashpoint.watching.functions import SeenCall, output_of
from flashpoint.watching.graph import (
    GradientInParts,
    beside,
    edges_of,
    edges_to,
    has_fp16_inside,
    meeting,
    next_node,
    origin_of,
    other_outputs,
)
from flashpoint.watching.left_out import (
    FROZEN,
    NESTED,
    SHARDED,
    TRANSFORMED,
    WITHOUT_GRADIENTS,
    LeftOut,
    is_dtensor,
    is_transformed,
    shapes_left_out,
)
from flashpoint.watching.notices import described
from flashpoint.watching.step_calls import CallEvent, StepCalls


class Hook:
    """A hook of a module that copies and files of the module have in name only."""

    def __init__(self, do: Callable[..., None] | None = None) -> None:
        self._do = do

    def __call__(self, *given: Any) -> None:
        if self._do is not None:
            self._do(*given)

    def __reduce__(self) -> Any:
        return Hook, ()


_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of a module's name that compilation, sharding and checkpoints add."""


def with_hooks(model: nn.Module) -> dict[nn.Module, str]:
    """Return the modules that take hooks: scripted ones take none, and call nothing that is Python's. Each has its name
    in the model, without what wrappers add."""
    named = dict(model.named_modules())
    parallel = {name for name, one in named.items() if isinstance(one, nn.DataParallel | DistributedDataParallel)}

    def own(name: str) -> str:
        parts = name.split(".")
        wrapped = (part == "module" and ".".join(parts[:at]) in parallel for at, part in enumerate(parts))
        return ".".join(part for part, is_so in zip(parts, wrapped, strict=True) if not is_so and part not in _WRAPPED)

    return {one: own(name) for name, one in named.items() if not isinstance(one, torch.jit.ScriptModule)}


class Interceptor:
    """Makes events of the calls of attentions, which :func:`flashpoint.watching.interception.intercept` has come to it.

    Args:
        sequences: of a batch that are kept, the first ones.
        layers: whose tensors are kept, from 1; None is all. Of none of them the calls of a forward pass are shown.
        publish: takes each event, after :attr:`calls` has it.

    Attributes:
        calls: what the events show.
        called: names of the attentions that were called at all, kept or not.
        weights: of the module inside which attentions are called, if they are known.
        trains: whether a forward pass with gradients has begun.
        in_other_thread: whether a forward pass began in another thread than the one that observes: PyTorch shows calls
            to the thread alone that asks for them.
    """

    def __init__(
        self, sequences: int, layers: Collection[int] | None = None, publish: Publish = lambda _event: None
    ) -> None:
        self._sequences, self._layers, self._publish = sequences, layers, publish
        self.calls = StepCalls()
        self.called: set[str] = set()
        self.weights: tuple[nn.Parameter, ...] = ()
        self._inside = self.trains = False
        self._forward = self._since = 0
        self._running: list[str] | None = None  # names of modules whose forward runs, the inmost one last
        self._taking = self._keeping = True
        self._thread, self.in_other_thread = threading.current_thread(), False
        self._gradient_hooks: list[RemovableHandle] = []
        self._dropped: list[tuple[tuple[int, ...], float, Tensor]] | None = None
        self._generator: Tensor | None = None
        self._read: dict[Any, Any] = {}

    def only_inside(self, model: nn.Module) -> Callable[[], None]:
        """Take only what the model's modules call, until what is returned is called: a loop may have other models."""
        self._running = running = list[str]()

        def enter(name: str) -> Callable[..., None]:
            return lambda *_: running.append(name)

        def leave(*_: object) -> None:
            if running:  # else it began before
                running.pop()

        with contextlib.ExitStack() as entered:
            for module, name in with_hooks(model).items():
                entered.callback(module.register_forward_pre_hook(Hook(enter(name))).remove)
                entered.callback(module.register_forward_hook(Hook(leave), always_call=True).remove)
            return entered.pop_all().close
        raise AssertionError("unreachable")

    @property
    def was_called(self) -> bool:
        """Whether a forward pass of the model has begun."""
        return self._forward > 0

    def keep_at_least(self, sequences: int) -> None:
        """Keep more sequences of the calls to come."""
        self._sequences = max(self._sequences, sequences)

    def begin_forward(self) -> int | None:
        """Take calls from here on as those of another forward pass. It takes the place of one whose backward pass has
        left out gradients, as an error does that the loop passes over.

        Returns:
            the number of the pass; None where its calls are not taken, or have no gradients.
        """
        if _in_backward():  # a checkpoint of the whole model
            return None
        if self._running and torch.is_grad_enabled():  # without, the model may call itself
            del self._running[:-1]  # a KeyboardInterrupt leaves modules without their hooks
        if not self._taking and self.calls.is_incomplete:
            self.calls.clear()
            self.remove_hooks()
            self._taking = True
        if self._layers is not None and not self._layers and len(self.calls):
            self.stop()  # no backward pass is awaited: the first forward pass is over
        self._forward += 1
        if torch.is_grad_enabled():
            self.trains = True
        else:
            self.calls.begin_evaluation(self._forward)
        self.in_other_thread |= threading.current_thread() is not self._thread
        return self._forward if self._taking and torch.is_grad_enabled() else None

    def stop(self) -> None:
        """Take no more calls. Gradients of its calls are still kept."""
        self._taking = False

    @contextlib.contextmanager
    def ignoring_gradients(self) -> Iterator[None]:
        """In the block, gradients are not those of the training."""
        self._keeping = False
        try:
            yield
        finally:
            self._keeping = True

    @contextlib.contextmanager
    def calls_with(self, weights: tuple[nn.Parameter, ...]) -> Iterator[None]:
        """In the block, attentions are called with these weights."""
        self.weights = weights
        try:
            yield
        finally:
            self.weights = ()

    @property
    def listening(self) -> bool:
        """Whether a call now is of the forward pass, and of no other attention that is intercepted."""
        return self._taking and not self._inside and self._running != [] and not _in_backward()

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        positional: Sequence[Any],
        options: Mapping[str, Any],
        keep: Callable[[Any], None],
        *,
        draws: bool = False,
    ) -> Any:
        """Call an attention, and return what it returns.

        Args:
            name: is told where the call is not kept.
            draws: whether the call may draw what it drops from the CPU's generator.
            keep: may raise :class:`LeftOut`. It is given what the function returned, if the call is to be kept. Calls
                inside it are not kept. Nor is a call with a tensor of which each process has a part: to look at it is
                to wait for the others.
        """
        self.called.add(name)
        wanted, before, self._inside = self.listening, self._inside, True
        if wanted:
            self._since, self._dropped = next_node(), []
            self._generator = torch.get_rng_state() if draws else None
        try:
            result = function(*positional, **options)
        finally:
            self._inside = before
        if wanted and not torch.is_grad_enabled():
            self.miss(WITHOUT_GRADIENTS)
        elif wanted and any(map(is_transformed, (*positional, *options.values(), output_of(result)))):
            self.miss(f"{name}: {TRANSFORMED}")
        elif wanted and any(map(is_dtensor, (*positional, *options.values(), output_of(result)))):
            self.miss(f"{name}: {SHARDED}")
        elif wanted and any(isinstance(one, Tensor) and one.is_nested for one in (*positional, *options.values())):
            self.miss(f"{name}: {NESTED}")
        elif wanted:
            self._publish(AttentionRan(name, self._forward, self._since, positional, options, result))
            with self._attempt(name):
                try:
                    keep(result)
                except LeftOut as why:
                    self.miss(f"{name}: {why}")
        if wanted:
            self._dropped = None
        return result

    @property
    def _module(self) -> str:
        """The name of the module that calls; empty where it is the model, or not known."""
        return self._running[-1] if self._running else ""

    def see_dropout(self, given: Mapping[str, Any], result: Tensor) -> None:
        """Note what ``F.dropout`` kept, by its arguments; weights are some of what is dropped inside a call."""
        before, p = given.get("input"), given.get("p", 0.5)
        if self._dropped is None or not p or not given.get("training", True) or not isinstance(before, Tensor):
            return
        with self._attempt("dropout"):
            kept = result.detach() != 0
            if result is not before:  # a weight that is 0 is neither kept nor dropped
                kept |= before.detach() == 0
            self._dropped.append((tuple(before.shape), float(p), kept))

    def miss(self, reason: str) -> None:
        """Show that a call of the current forward pass is not kept, and why."""
        self._show(CallLeftOut(self._forward, reason, self._module))

    def keep(
        self,
        name: str,
        tensors: dict[str, Tensor],
        read: Callable[[SeenCall], Form],
        *,
        by_token: Sequence[str] = (),
        in_order: bool = False,
        result: Any = None,
    ) -> None:
        """Show the call that :meth:`call` has made, and later its gradients.

        Args:
            tensors: q, k, v and out, [B, H, T, d] and for keys [B, H_kv, T, d].
            read: returns the call's form.
            by_token: names of those that are [B, T, H, d], or [T, H, d] of packed sequences.
            in_order: as of :func:`edges_of`.
            result: what the attention returned; its tensors beside O can have gradients of their own.
        """
        if not tensors["out"].requires_grad:
            self.miss(FROZEN)
            return
        by_head = {role: _by_head(x) if role in by_token else x for role, x in tensors.items()}
        if reason := shapes_left_out(by_head):
            raise LeftOut(reason)
        q, k = by_head["q"], by_head["k"]
        few = {role: x.detach()[: self._sequences] for role, x in by_head.items()}
        form = read(
            SeenCall(**few, batch=len(q), dropped=self._dropped or (), generator=self._generator, read=self._read)
        )
        name += WITH_FP16_INSIDE * has_fp16_inside(tensors["q"], tensors["out"], self._since)
        layer = 1 + self.calls.of_pass(self._forward)
        wanted = self._layers is None or layer in self._layers or not self._forward  # else its number may be another
        kept = self._copies(tensors, by_token) if wanted else {}
        call = AttentionCalled(name, self._forward, q, k, form, kept, self.weights, self._module)
        if wanted:
            self._hook_gradients(call, tensors, by_token, in_order)
            for which, other in other_outputs(result):
                self._hook_other(call, which, other, tensors)
        self._show(call)  # at last: one that cannot be kept is none

    def remove_hooks(self) -> None:
        """Part the graph of the model from what is kept of it: Python cannot collect a cycle through a hook."""
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks.clear()

    def _show(self, event: CallEvent) -> None:
        self.calls.take(event)
        self._publish(event)

    def _copies(self, tensors: Mapping[str, Tensor], by_token: Sequence[str]) -> dict[str, Tensor]:
        """Return copies of what a call was given and gave."""
        device = tensors["q"].device.type
        cast = torch.is_autocast_enabled(device)
        kept = {}
        for role, tensor in tensors.items():
            copy = self._copy(tensor, role in by_token)
            # Autocast casts what the attention is given; the copies are what it computes with.
            kept[role] = copy.to(torch.get_autocast_dtype(device)) if cast and role != "out" else copy
        return kept

    def _copy(self, tensor: Tensor, by_token: bool) -> Tensor:
        x = tensor.detach()
        few = (_by_head(x) if by_token else x)[: self._sequences]
        return few.clone(memory_format=torch.contiguous_format)

    def _hook_gradients(
        self, call: AttentionCalled, tensors: dict[str, Tensor], by_token: Sequence[str], in_order: bool
    ) -> None:
        """Have the gradients of a call shown when they come."""
        inputs = {role: tensor for role, tensor in tensors.items() if role != "out"}
        edges = edges_of(inputs, tensors["out"], self._since, in_order)
        sums = {role: GradientInParts(len(found)) for role, found in edges.items()}
        if unknown := [role for role, found in edges.items() if not found]:
            told = f"gradients of {', '.join(unknown)}, not to be told from others of the same tensor"
            self._show(GradientsUnknown(f"{call.attention}: {told}"))

        def keep_out(gradient: Tensor | None) -> None:
            if gradient is None or not self._keeping:  # None at a part of a chunked tensor that nothing asks for
                return
            for one in sums.values():
                one.begin()
            differentiable = gradient.requires_grad
            self.calls.take(reached := BackwardReached(call, differentiable, torch._C._current_graph_task_id()))
            with self._attempt(f"{call.attention}: gradients"):
                self._show(GradientSeen(call, "out", self._copy(gradient, "out" in by_token)))
            if not differentiable:  # else the training's own backward pass may follow
                self.stop()  # the step's first forward pass is over
            self._publish(reached)

        def keeping(role: str, at: int) -> Callable[..., None]:
            def keep(from_node: Sequence[Tensor | None], _to_node: object) -> None:
                if not self._keeping:
                    return
                with self._attempt(f"{call.attention}: gradients"):
                    part = from_node[at]
                    copy = None if part is None else self._copy(part, role in by_token)
                    if (whole := sums[role].add(copy)) is not None:
                        self._show(GradientSeen(call, role, whole))

            return keep

        self._gradient_hooks.append(tensors["out"].register_hook(keep_out))
        for role, found in edges.items():
            self._gradient_hooks += [node.register_hook(keeping(role, at)) for node, at in found]

    def _hook_other(self, call: AttentionCalled, name: str, other: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Have what comes to another output of a call, and not through O, shown when it comes."""
        origin, out = origin_of(other), tensors["out"]
        meets, wholly = meeting(other, out, [tensors[role] for role in ("q", "k", "v")], self._since)
        if not meets:
            return
        small = other.numel() * call.q.shape[-1] == call.q.numel()  # weights are not
        values = other.detach() if small and wholly else None
        inner = edges_to([origin], out, self._since)[origin]  # O may be made of it
        through: list[Tensor] = []

        def keeping(at: int) -> Callable[..., None]:
            def keep(from_node: Sequence[Tensor | None], _to_node: object) -> None:
                if self._keeping and (part := from_node[at]) is not None:
                    through.append(part)

            return keep

        def keep_other(gradient: Tensor | None) -> None:
            if gradient is None or not self._keeping:
                return
            with self._attempt(f"{call.attention}: gradients"):
                parts = [part.detach() for part in through]
                through.clear()
                own = beside(gradient.detach(), sum(parts[1:], parts[0]) if parts else None, len(parts))
                if own is not None:
                    backward, of_rows = torch._C._current_graph_task_id(), None
                    if values is not None:
                        from flashpoint.watching.agreement import gradient_of_logsumexp  # few loops use one

                        of_rows = gradient_of_logsumexp(own, values, call.kept, call.form)
                    self._show(OtherGradientSeen(call, name, of_rows, backward))

        self._gradient_hooks.append(other.register_hook(keep_other))
        self._gradient_hooks += [node.register_hook(keeping(at)) for node, at in inner]

    @contextlib.contextmanager
    def _attempt(self, name: str) -> Iterator[None]:
        """Keep a part of a call. Where that fails, the reason is told later; the training's pass goes on."""
        try:
            yield
        except torch.OutOfMemoryError:  # its message has other numbers each time
            told = "no memory for its copies; give a smaller sequences=, or train on fewer at once"
            self._show(KeepingFailed(f"{name}: {told}"))
        except Exception as error:  # whatever fails in watching, the training goes on
            self._show(KeepingFailed(f"{name}: keeping it failed ({described(error)})"))


def _by_head(x: Tensor) -> Tensor:
    """Return [B, H, T, d] of [B, T, H, d], and [1, H, T, d] of [T, H, d]; any other tensor as it is."""
    return x.transpose(0, 1)[None] if x.dim() == 3 else x.transpose(1, 2) if x.dim() == 4 else x


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
