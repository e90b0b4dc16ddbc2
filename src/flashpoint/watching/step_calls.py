"""The attention calls of one step, put together from what the interception shows of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.watching.events import (
    AttentionCalled,
    BackwardReached,
    CallLeftOut,
    GradientSeen,
    GradientsUnknown,
    KeepingFailed,
    OtherGradientSeen,
)
from flashpoint.watching.left_out import TWICE, WITHOUT_GRADIENTS

CallEvent = (
    AttentionCalled
    | CallLeftOut
    | BackwardReached
    | GradientSeen
    | OtherGradientSeen
    | GradientsUnknown
    | KeepingFailed
)


@dataclass(eq=False)
class ShownCall:
    """One call, whose backward pass may be still to come.

    Attributes:
        gradients: copies by "out", "q", "k" and "v", [N, H, T, d], as far as they have come.
        has_derivative: whether the gradient that came last can be differentiated, as with ``create_graph=True``.
        is_differentiated_twice: whether another one came after that: it is not of the call alone.
        backward: PyTorch's number of the pass of the gradient that came last.
        others: outputs beside O that have gradients of their own, of any pass.
    """

    called: AttentionCalled
    gradients: dict[str, Tensor] = field(default_factory=dict)
    has_derivative: bool = False
    is_differentiated_twice: bool = False
    backward: int = -1
    others: list[OtherGradientSeen] = field(default_factory=list)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient came to its output."""
        return "out" in self.gradients

    def with_gradients(self, layer: int, step: int) -> AttentionCall | None:
        """Return the call; None if no gradient came to its output, or none that can be recorded."""
        if not self.has_gradient or self.is_differentiated_twice:
            return None
        called, tensors = self.called, self.called.kept
        others = [one for one in self.others if one.backward == self.backward]
        of_logsumexp = others[0].of_logsumexp if len(others) == 1 else None
        return AttentionCall(
            q=tensors["q"],
            k=tensors["k"],
            v=tensors["v"],
            grad_out=self.gradients["out"],
            out=tensors["out"],
            grad_q=self.gradients.get("q"),
            grad_k=self.gradients.get("k"),
            grad_v=self.gradients.get("v"),
            form=called.form,
            layer=layer,
            step=step,
            attention=called.attention,
            module=called.module,
            grad_logsumexp=of_logsumexp,
            other_gradients="" if of_logsumexp is not None else ", ".join(one.name for one in others),
        )


class StepCalls:
    """Takes the events of calls, of all forward passes before the first backward pass.

    Attributes:
        failed: what went wrong in keeping calls, each once.
        incomplete: which gradients of calls were not kept, and why, each once.
    """

    def __init__(self) -> None:
        self._shown: dict[AttentionCalled, ShownCall] = {}
        self._missed: dict[tuple[int, str], dict[int, str]] = {}  # by forward pass and reason: modules by call's number
        self._evaluations: set[int] = set()  # forward passes that began without gradients
        self.failed: set[str] = set()
        self.incomplete: set[str] = set()

    def __iter__(self) -> Iterator[ShownCall]:
        """Yield the calls in their order."""
        yield from self._shown.values()

    def __len__(self) -> int:
        return len(self._shown)

    def of_pass(self, forward: int) -> int:
        """Return how many calls of a forward pass are kept so far."""
        return sum(call.called.forward == forward for call in self)

    def begin_evaluation(self, forward: int) -> None:
        """Note that a forward pass begins without gradients."""
        self._evaluations.add(forward)

    def take(self, event: CallEvent) -> None:
        """Take in what was seen of a call."""
        match event:
            case AttentionCalled():
                self._shown[event] = ShownCall(event)
            case CallLeftOut(forward, reason, module):
                self._miss(forward, reason, module)
            case BackwardReached(called, differentiable, backward):
                if (call := self._shown.get(called)) is not None:
                    self._begin_backward(call, differentiable)
                    call.backward = backward
            case OtherGradientSeen(called):
                if (call := self._shown.get(called)) is not None:
                    call.others.append(event)
            case GradientSeen(called, name, gradient):
                if (call := self._shown.get(called)) is not None:
                    call.gradients[name] = gradient
            case GradientsUnknown(reason):
                self.incomplete.add(reason)
            case KeepingFailed(reason):
                self.failed.add(reason)

    def trained(self) -> list[ShownCall]:
        """Return the calls of the first forward pass whose outputs have got gradients; empty without one.

        Where the beginning of none was seen, as where a loop calls a model's parts, calls without gradients are those
        of an evaluation.
        """
        trained = self._trained_pass
        calls = [call for call in self if call.called.forward == trained]
        return [call for call in calls if call.has_gradient] if trained == 0 else calls

    @property
    def is_incomplete(self) -> bool:
        """Whether gradients came to some calls of the forward pass that is trained, and to others none."""
        return any(not call.has_gradient for call in self.trained() if call.called.kept)

    @property
    def missed(self) -> dict[str, dict[int, str]]:
        """Why calls were not kept, and which modules called them, by their numbers in the forward pass, from 1.

        They are those of the pass that is trained, or where none is of all but evaluations. Where the beginning of that
        pass was not seen, there are no numbers.
        """
        trained, passes = self._trained_pass, {forward for forward, _ in self._missed}
        asked = (passes - self._evaluations or passes) if trained is None else {trained}
        reasons = {reason: numbers for (forward, reason), numbers in self._missed.items() if forward in asked}
        # Such a pass, as where a loop calls a model's parts, has an evaluation's calls, too.
        return {reason: {} for reason in reasons if reason != WITHOUT_GRADIENTS} if trained == 0 else reasons

    def clear(self) -> None:
        """Let go of the calls, which hold q and k of whole batches."""
        self._shown.clear()

    @property
    def _trained_pass(self) -> int | None:
        shown = (call.called.forward for call in self if call.has_gradient and not call.is_differentiated_twice)
        return min(shown, default=None)

    def _miss(self, forward: int, reason: str, module: str) -> None:
        earlier = self.of_pass(forward)
        earlier += sum(len(numbers) for (number, _), numbers in self._missed.items() if number == forward)
        self._missed.setdefault((forward, reason), {})[1 + earlier] = module

    def _begin_backward(self, call: ShownCall, differentiable: bool) -> None:
        """Take what comes from here on as of another backward pass."""
        if call.has_derivative:  # what comes now is of the graph of the gradients, too
            call.is_differentiated_twice = True
            self._missed.setdefault((call.called.forward, TWICE), {})
        call.has_derivative = differentiable
        for name in ("q", "k", "v"):
            call.gradients.pop(name, None)
