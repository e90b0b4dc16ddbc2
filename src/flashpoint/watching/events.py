"""What happens in a watched loop, as frozen events, and the dispatcher that hands them to recorders.

The loop's calls, the interception of attention and the recorders themselves make events. A recorder lists the events
that it takes. No recorder's error reaches the loop: the dispatcher tells it in one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.form import Form
from flashpoint.runs.outcome import Verdict
from flashpoint.watching.notices import Notices

# Of the loop.


@dataclass(frozen=True, slots=True)
class StepStarted:
    """The loop is about to make a step."""

    step: int


@dataclass(frozen=True, slots=True)
class LossSeen:
    """The loop handed over the loss of a step: whatever it takes for one."""

    step: int
    loss: Any


@dataclass(frozen=True, slots=True)
class NormSeen:
    """The loop handed over a gradient norm, or it is time to compute one: then it is None."""

    step: int
    norm: Any


@dataclass(frozen=True, slots=True)
class BatchSeen:
    """The loop handed over the batch of a step."""

    step: int
    batch: Any


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The backward pass of a step is over, and its gradients are still there."""

    step: int


@dataclass(frozen=True, slots=True)
class NumbersSeen:
    """The loop handed over other numbers to log."""

    step: int
    numbers: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReadDue:
    """It is time to read the numbers that lie on a device."""


@dataclass(frozen=True, slots=True)
class CaptureAsked:
    """The loop asked for a capture of the next forward pass, and for δ of so many sequences after it."""

    step: int
    reason: str
    sequences: int


@dataclass(frozen=True, slots=True)
class LoopLeft:
    """No step follows, or none that this process is to observe: what was replaced is put back."""


@dataclass(frozen=True, slots=True)
class LastRead:
    """No step follows: every number is read now."""


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """All numbers are read; what is still to be written is written.

    Attributes:
        steps: number of the step that would have followed.
        made: whether the loop has made any.
        interrupted: what ended the loop; None if it ended by itself.
    """

    steps: int
    made: bool
    interrupted: str | None


# Of the interception. Tensors of a call: B sequences, H heads, T tokens, d features per head.


@dataclass(frozen=True, slots=True)
class ForwardStarted:
    """The watched model was called, in a forward pass of this number, with these arguments."""

    forward: int
    positional: Any
    options: Any


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRan:
    """An attention was called with gradients, whether the call is kept or left out. What becomes of it is shown next.

    Attributes:
        forward: number of the forward pass; 0 where its beginning was not seen.
        since: number of the graph's next node when the call began.
        positional, options: its arguments, and ``result`` is what it returned; they are let go of at once.
    """

    attention: str
    forward: int
    since: int
    positional: Sequence[Any]
    options: Mapping[str, Any]
    result: Any


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCalled:
    """An attention was called, and the call is kept.

    Attributes:
        forward: number of the forward pass; 0 where its beginning was not seen.
        q, k: as given, with their graph, by which projections are found.
        form: of the call, with copies of the tensors of some sequences.
        kept: copies of these sequences of q, k, v and out, [N, H, T, d]; empty in a layer that is not wanted.
        weights: where ``nn.MultiheadAttention`` called it: [3C, C] of W_Q, W_K and W_V, or these three.
        module: name in the model of the module that called it; empty where it is the model, or not known.
    """

    attention: str
    forward: int
    q: Tensor
    k: Tensor
    form: Form
    kept: Mapping[str, Tensor]
    weights: tuple[nn.Parameter, ...]
    module: str


@dataclass(frozen=True, slots=True)
class CallLeftOut:
    """An attention was called in a forward pass, and is not kept.

    Attributes:
        module: as of :class:`AttentionCalled`.
    """

    forward: int
    reason: str
    module: str


@dataclass(frozen=True, slots=True)
class BackwardReached:
    """A gradient has come to the output of a call; the graph of its layer is still there.

    Attributes:
        differentiable: whether the gradient has a graph itself, as with ``create_graph=True``.
        backward: PyTorch's number of the backward pass.
    """

    call: AttentionCalled
    differentiable: bool
    backward: int


@dataclass(frozen=True, slots=True)
class GradientSeen:
    """A call's gradient by its output, q, k or v is whole: a copy, [N, H, T, d]."""

    call: AttentionCalled
    name: str
    gradient: Tensor


@dataclass(frozen=True, slots=True)
class OtherGradientSeen:
    """Another output of a call, as lse or weights, has a gradient that did not come through O: gradients of q and k are
    of both.

    Attributes:
        name: of the output.
        of_logsumexp: the gradient [N, H, T] by lse, where the output is that; else None.
        backward: PyTorch's number of the backward pass.
    """

    call: AttentionCalled
    name: str
    of_logsumexp: Tensor | None
    backward: int


@dataclass(frozen=True, slots=True)
class GradientsUnknown:
    """Some gradients of a call cannot be told from others."""

    reason: str


@dataclass(frozen=True, slots=True)
class KeepingFailed:
    """A part of a call could not be kept."""

    reason: str


# Between recorders.


@dataclass(frozen=True, slots=True)
class StepObserved:
    """The attention of a step was observed.

    Attributes:
        calls: of its layers; none where it showed no attention.
        seen: attentions that the step called.
        partial: whether some layers alone were observed.
        not_recorded: why attentions were left out, as far as they were.
    """

    step: int
    calls: Sequence[AttentionCall]
    seen: int
    partial: bool
    not_recorded: Sequence[str]


@dataclass(frozen=True, slots=True)
class LossesRead:
    """The losses up to a step have been judged.

    Attributes:
        losses: those since the last time, by step.
    """

    step: int
    verdict: Verdict
    losses: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The loss or the gradient norm of a step is no finite number, for the first time or one worth a capture."""

    step: int
    reason: str
    loop_goes_on: bool


@dataclass(frozen=True, slots=True)
class CaptureWanted:
    """Something has gone wrong, or may: a layer is to be captured; None is all."""

    reason: str
    layer: int | None


@dataclass(frozen=True, slots=True)
class CaptureWritten:
    """The tensors of a capture, if there are some, lie in the folder of a step."""

    step: int


@dataclass(frozen=True, slots=True)
class CaptureMade:
    """A capture of the step that was just observed is complete.

    Attributes:
        seen: attentions that the step called.
        sequences: of later steps, in which the error of δ is to be measured.
        replaces: whether measuring after an earlier capture ends.
    """

    folder: Path
    calls: Sequence[AttentionCall]
    seen: int
    sequences: int
    replaces: bool


Publish = Callable[[Any], None]
"""Hands an event to those who take it."""


@dataclass(frozen=True, slots=True)
class Handler:
    """What a recorder does at an event.

    Attributes:
        what: in words of the user: told where it fails.
    """

    event: type
    what: str
    take: Callable[[Any], None]


class Recorder(Protocol):
    """Takes some events; it states which."""

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""


class Dispatcher:
    """Hands each event to the recorders that take it, in the order in which they were added."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._handlers: dict[type, list[Handler]] = {}

    def add(self, *recorders: Recorder) -> None:
        """Add recorders."""
        for recorder in recorders:
            for handler in recorder.handlers:
                self._handlers.setdefault(handler.event, []).append(handler)

    def publish(self, event: Any) -> None:
        """Hand over an event. What fails in one recorder is told, and the others take it."""
        for handler in self._handlers.get(type(event), ()):
            try:  # as in the shield, which takes longer
                handler.take(event)
            except Exception as error:
                self._notices.failed(handler.what, error)

    @contextlib.contextmanager
    def shield(self, what: str) -> Iterator[None]:
        """Tell what fails in the block: whatever fails in watching, the training goes on."""
        try:
            yield
        except Exception as error:
            self._notices.failed(what, error)
