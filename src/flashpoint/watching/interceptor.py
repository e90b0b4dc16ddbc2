"""Keeps what each attention of somebody's model takes and gives in one forward and backward pass.

Shapes: B sequences, H heads, H_kv heads of keys and values, T tokens, d features per head.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flashpoint.watching.functions import output_of
from flashpoint.watching.guard import described
from flashpoint.watching.intercepted_call import Hook, InterceptedCall, with_hooks
from flashpoint.watching.left_out import FROZEN, TRANSFORMED, TWICE, WITHOUT_GRADIENTS, is_transformed, shapes_left_out
from flashpoint.watching.own_gradients import GradientInParts, edges_of, next_node
from flashpoint.watching.sharding import SHARDED, is_dtensor


class Interceptor:
    """Keeps calls of attentions, which :func:`~flashpoint.watching.interception.intercept` has come to it.

    Args:
        sequences: of a batch that are kept, the first ones.
        layers: whose tensors are kept, from 1; None is all.

    Attributes:
        called: names of the attentions that were called at all, kept or not.
        calls: in their order, of all forward passes before the first backward pass.
        failed: what else went wrong in keeping them, each once.
        incomplete: which gradients of calls were not kept, and why, each once.
        in_other_thread: whether a forward pass began in another thread than the one that observes: PyTorch shows calls
            to the thread alone that asks for them.
        at_gradient: called with each call to whose output a gradient comes, before its graph is freed.
    """

    def __init__(self, sequences: int, layers: Collection[int] | None = None) -> None:
        self._sequences, self._layers = sequences, layers
        self._inside = False
        self.called: set[str] = set()
        self.calls: list[InterceptedCall] = []
        self._missed: dict[tuple[int, str], list[int]] = {}  # by forward pass and reason, the numbers of the calls
        self.failed: set[str] = set()
        self.incomplete: set[str] = set()
        self.at_gradient: Callable[[InterceptedCall], object] = lambda _call: self.stop()
        self._forward = self._since = 0
        self._evaluations: set[int] = set()  # forward passes that began without gradients
        self._depth: int | None = None
        self._taking = self._keeping = True
        self._thread, self.in_other_thread = threading.current_thread(), False
        self._gradient_hooks: list[RemovableHandle] = []

    def only_inside(self, model: nn.Module) -> Callable[[], None]:
        """Take only what the model's modules call, until what is returned is called: a loop may have other models."""
        self._depth = 0

        def move(by: int) -> None:
            self._depth = (self._depth or 0) + by

        with contextlib.ExitStack() as entered:
            for module in with_hooks(model):
                entered.callback(module.register_forward_pre_hook(Hook(lambda *_: move(1))).remove)
                hook = module.register_forward_hook(Hook(lambda *_: move(-1)), always_call=True)
                entered.callback(hook.remove)
            return entered.pop_all().close
        raise AssertionError("unreachable")

    def keep_at_least(self, sequences: int) -> None:
        """Keep more sequences of the calls to come."""
        self._sequences = max(self._sequences, sequences)

    def begin_forward(self) -> int | None:
        """Take calls from here on as those of another forward pass; in the place of one whose backward pass has left
        out gradients, as an error does that the loop passes over.

        Returns:
            the number of the pass; None where its calls are not taken, or have no gradients.
        """
        if _in_backward():  # a checkpoint of the whole model
            return None
        if self._depth and torch.is_grad_enabled():  # without, the model may call itself
            self._depth = 1  # a KeyboardInterrupt leaves modules without their hooks
        if not self._taking and self.is_incomplete:
            self.calls.clear()
            self.remove_hooks()
            self._taking = True
        self._forward += 1
        if not torch.is_grad_enabled():
            self._evaluations.add(self._forward)
        self.in_other_thread |= threading.current_thread() is not self._thread
        return self._forward if self._taking and torch.is_grad_enabled() else None

    def stop(self) -> None:
        """Take no more calls. Gradients of its calls are still kept."""
        self._taking = False

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """In the block, gradients are not those of the training."""
        self._keeping = False
        try:
            yield
        finally:
            self._keeping = True

    def trained(self) -> list[InterceptedCall]:
        """Return the calls of the first forward pass whose outputs have got gradients; empty without one.

        Where the beginning of none was seen, as where a loop calls a model's parts, calls without gradients are those
        of an evaluation.
        """
        trained = self._trained_pass
        calls = [call for call in self.calls if call.forward == trained]
        return [call for call in calls if "grad_out" in call.kept] if trained == 0 else calls

    @property
    def _trained_pass(self) -> int | None:
        shown = (call.forward for call in self.calls if "grad_out" in call.kept and not call.is_differentiated_twice)
        return min(shown, default=None)

    @property
    def is_incomplete(self) -> bool:
        """Whether gradients came to some calls of the forward pass that is trained, and to others none."""
        return any("grad_out" not in call.kept for call in self.trained() if call.kept)

    def miss(self, reason: str) -> None:
        """Note why a call of the current forward pass is not kept."""
        earlier = sum(call.forward == self._forward for call in self.calls)
        earlier += sum(len(numbers) for (of, _), numbers in self._missed.items() if of == self._forward)
        self._missed.setdefault((self._forward, reason), []).append(1 + earlier)

    @property
    def missed(self) -> dict[str, list[int]]:
        """Why calls were not kept, and their numbers in the forward pass, from 1: those of the pass that is trained, or
        where none is of all but evaluations. Where the beginning of that pass was not seen, there are no numbers."""
        trained, passes = self._trained_pass, {of for of, _ in self._missed}
        asked = (passes - self._evaluations or passes) if trained is None else {trained}
        reasons = {reason: numbers for (of, reason), numbers in self._missed.items() if of in asked}
        # Such a pass, as where a loop calls a model's parts, has an evaluation's calls, too.
        return {reason: [] for reason in reasons if reason != WITHOUT_GRADIENTS} if trained == 0 else reasons

    def keep(
        self,
        name: str,
        tensors: dict[str, Tensor],
        is_causal: bool,
        scale: float | None,
        *,
        by_token: Sequence[str] = (),
        in_order: bool = False,
    ) -> None:
        """Keep the call that :meth:`call` has made, and have its gradients kept.

        Args:
            tensors: q, k, v and out, [B, H, T, d] and for keys [B, H_kv, T, d].
            by_token: names of those that are [B, T, H, d].
            in_order: as of :func:`edges_of`.
        """
        if not tensors["out"].requires_grad:
            self.miss(FROZEN)
            return
        by_head = {of: x.transpose(1, 2) if of in by_token and x.dim() == 4 else x for of, x in tensors.items()}
        if reason := shapes_left_out(by_head):
            self.miss(f"{name}: {reason}")
            return
        q, k = by_head["q"], by_head["k"]
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        call = InterceptedCall(name, q, k, is_causal, scale, forward=self._forward)
        layer = 1 + sum(before.forward == self._forward for before in self.calls)
        if self._layers is None or layer in self._layers or not self._forward:  # else its number may be another
            self._copy(call, tensors, by_token, in_order)
        self.calls.append(call)  # at last: one that cannot be kept is none

    def _copy(self, call: InterceptedCall, tensors: dict[str, Tensor], by_token: Sequence[str], in_order: bool) -> None:
        """Copy what a call was given and gave, and have its gradients copied."""

        def copy(tensor: Tensor, of: str) -> Tensor:
            few = tensor.detach()[: self._sequences]
            return (few.transpose(1, 2) if of in by_token else few).clone(memory_format=torch.contiguous_format)

        device = call.q.device.type
        cast = torch.is_autocast_enabled(device)
        for of, tensor in tensors.items():
            kept = copy(tensor, of)
            # Autocast casts what the attention is given; the copies are what it computes with.
            call.kept[of] = kept.to(torch.get_autocast_dtype(device)) if cast and of != "out" else kept
        self._copy_gradients(call, tensors, copy, in_order)

    def _copy_gradients(
        self,
        call: InterceptedCall,
        tensors: dict[str, Tensor],
        copy: Callable[[Tensor, str], Tensor],
        in_order: bool,
    ) -> None:
        inputs = {of: tensor for of, tensor in tensors.items() if of != "out"}
        edges = edges_of(inputs, tensors["out"], self._since, in_order)
        gradients = {of: GradientInParts(len(found)) for of, found in edges.items()}
        if unknown := [of for of, found in edges.items() if not found]:
            self.incomplete.add(
                f"{call.attention}: gradients of {', '.join(unknown)}, not to be told from others of the same tensor"
            )

        def attempt(do: Callable[[], object]) -> None:
            if self._keeping:
                self._attempt(f"{call.attention}: gradients", do)

        def keep_out(gradient: Tensor | None) -> None:
            if gradient is None or not self._keeping:  # None at a part of a chunked tensor that nothing asks for
                return
            if call.has_derivative:  # what comes now is of the graph of the gradients, too
                call.is_differentiated_twice = True
                self._missed.setdefault((call.forward, TWICE), [])
            call.has_derivative = gradient.requires_grad
            for of, one in gradients.items():
                one.begin()
                call.kept.pop(f"grad_{of}", None)
            attempt(lambda: call.kept.update(grad_out=copy(gradient, "out")))
            if not call.has_derivative:  # else the training's own backward pass may follow
                self._attempt("the end of the forward pass", lambda: self.at_gradient(call))

        def keeping(of: str, at: int) -> Callable[..., None]:
            def keep(from_node: Sequence[Tensor | None], _to_node: object) -> None:
                def add() -> None:
                    part = from_node[at]
                    if (whole := gradients[of].add(None if part is None else copy(part, of))) is not None:
                        call.kept[f"grad_{of}"] = whole

                attempt(add)

            return keep

        self._gradient_hooks.append(tensors["out"].register_hook(keep_out))
        for of, found in edges.items():
            self._gradient_hooks += [node.register_hook(keeping(of, at)) for node, at in found]

    def remove_hooks(self) -> None:
        """Part the graph of the model from what is kept of it: Python cannot collect a cycle through a hook."""
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks.clear()

    def _attempt(self, name: str, do: Callable[[], object]) -> None:
        """Keep a part of a call. Where that fails, the reason is told later; the training's pass goes on."""
        try:
            do()
        except torch.OutOfMemoryError:  # its message has other numbers each time
            self.failed.add(f"{name}: no memory for its copies; give a smaller sequences=, or train on fewer at once")
        except Exception as error:  # whatever fails in watching, the training goes on
            self.failed.add(f"{name}: keeping it failed ({described(error)})")

    @property
    def listening(self) -> bool:
        """Whether a call now is of the forward pass, and of no other attention that is intercepted."""
        return self._taking and not self._inside and self._depth != 0 and not _in_backward()

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        positional: Sequence[Any],
        options: Mapping[str, Any],
        keep: Callable[[Any], None],
    ) -> Any:
        """Call an attention, and return what it returns.

        Args:
            name: is told where the call is not kept.
            keep: is given what the function returned, if the call is to be kept. Calls inside it are not kept. Nor is a
                call with a tensor of which each process has a part: to look at it is to wait for the others.
        """
        self.called.add(name)
        wanted, before, self._inside = self.listening, self._inside, True
        if wanted:
            self._since = next_node()
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
        elif wanted:
            self._attempt(name, lambda: keep(result))
        return result


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
