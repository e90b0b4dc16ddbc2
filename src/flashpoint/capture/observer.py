"""Records the attention of single steps of a model that somebody else trains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from torch import nn

from flashpoint.capture.guard import Guard
from flashpoint.capture.projections import ModuleOutputs, Projection, projections_of
from flashpoint.capture.recorded import Hook
from flashpoint.capture.recorder import WITHOUT_GRADIENTS, Recorder
from flashpoint.diagnosis.call import AttentionCall


class Observer:
    """Records one step's forward and backward pass at a time: begun before the step, finished after it.

    One observer records at a time: what a recording replaces is put back in reverse order.

    Args:
        sequences: of a batch that are kept.
        functions: to record beside those that the recorder knows.

    Attributes:
        projections: the matrices of q and k of each layer, by metric; None until a step has shown them.
        since: the step at which the recording began.
        partial: whether the recording is of some layers alone.
        seen: attentions that the last recorded step called.
        not_recorded: why that step's attentions were left out, as far as they were.

    Raises:
        UserError: one of the functions is not there.
    """

    _at_work: ClassVar[Observer | None] = None

    def __init__(self, model: nn.Module, sequences: int, functions: Sequence[str], guard: Guard) -> None:
        self._model, self._sequences, self._functions, self._guard = model, sequences, functions, guard
        self.projections: dict[str, list[Projection]] | None = None
        self.since = 0
        self.partial = False
        self.seen = 0
        self.not_recorded: list[str] = []
        self._recorder: Recorder | None = None
        self._end_recording: Callable[[], None] | None = None
        Recorder(sequences, functions)  # refuses functions that are not there

    @property
    def recording(self) -> bool:
        return self._recorder is not None

    @property
    def has_calls(self) -> bool:
        """Whether the step that is recorded has shown an attention."""
        return self._recorder is not None and bool(self._recorder.calls)

    @property
    def must_wait(self) -> bool:
        """Whether another watched model is being recorded."""
        return Observer._at_work not in (None, self)

    @staticmethod
    def interrupt() -> None:
        """End the recording of whichever model is being recorded: its loop may have stopped training it."""
        if Observer._at_work is not None:
            Observer._at_work.drop()

    def keep_at_least(self, sequences: int) -> None:
        if self._recorder is not None:
            self._recorder.keep_at_least(sequences)

    def begin(self, step: int, at_least: int, layers: Collection[int] | None = None) -> None:
        """Record the next forward pass: at least so many sequences, and of some layers alone if any are given."""
        recorder = Recorder(max(self._sequences, at_least), self._functions, layers)
        outputs = ModuleOutputs(self._model) if self.projections is None else None
        with contextlib.ExitStack() as entered:
            entered.callback(recorder.start())
            entered.callback(recorder.only_inside(self._model))
            if outputs is not None:
                entered.enter_context(outputs)

            def complete() -> None:
                """The graph of a forward pass is there; the gradients are still to come."""
                if outputs is not None and recorder.calls and self.projections is None:
                    self._guard.do("finding W_Q and W_K", lambda: self._find_projections(recorder, outputs))

            def at_gradient() -> None:
                """The step's first forward pass is over, also of a model whose parts are called one by one."""
                if recorder.stop():
                    complete()

            recorder.at_gradient = at_gradient

            begin, end = Hook(lambda *_: recorder.begin_forward()), Hook(lambda *_: complete())
            entered.callback(self._model.register_forward_pre_hook(begin).remove)
            entered.callback(self._model.register_forward_hook(end).remove)
            self._end_recording = entered.pop_all().close
        Observer._at_work = self
        self._recorder, self.since, self.partial = recorder, step, layers is not None

    def finish(self, step: int) -> list[AttentionCall]:
        """Return the calls of the step that was recorded; none where it showed no attention, of which the reason is
        told."""
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        self.stop()
        trained = recorder.trained()
        self.seen = len(trained)
        found = [recorded.call(layer, step) for layer, recorded in enumerate(trained, 1)]
        calls = [call for call in found if call is not None]
        reasons = sorted(recorder.failed | recorder.missed - ({WITHOUT_GRADIENTS} if calls else set()))
        if not calls:
            reasons = self._why_none(reasons, bool(recorder.calls) and not recorder.failed)
            self._guard.tell(f"no attention was recorded: {'; '.join(reasons)}")
        elif reasons:
            told = "; ".join(reasons)
            self._guard.tell(f"some attentions are not recorded ({told}); layers are counted without them")
        self.not_recorded = reasons
        recorder.calls.clear()  # at once: they hold q and k of whole batches
        return calls

    def drop(self) -> None:
        """End the recording without its calls, if there is one."""
        recorder, self._recorder = self._recorder, None
        self.stop()
        if recorder is not None:
            recorder.calls.clear()

    def stop(self) -> None:
        """Put back what recording replaced."""
        if self._end_recording is not None:
            Observer._at_work = None
            end, self._end_recording = self._end_recording, None
            end()

    def _find_projections(self, recorder: Recorder, outputs: ModuleOutputs) -> None:
        outputs.__exit__()
        self.projections = {}  # what fails once is not tried again
        with recorder.deaf():
            self.projections = projections_of(recorder.latest(), outputs)
        outputs.by_node.clear()
        if len(self.projections) < 2:
            self._guard.tell("no matrix found that makes q or k of every layer: norms of W_Q and W_K are not logged")

    def _why_none(self, reasons: list[str], called: bool) -> list[str]:
        if called:
            return ["no gradient came to any attention before watched.step; call it after the backward pass"]
        unknown = "the watched model called none that is PyTorch's, Transformers' or named by functions=['MODULE:NAME']"
        if self._functions:
            unknown += "; a function is seen where it is called by its name in a module, not by an attribute or a list"
        return reasons or [unknown]
