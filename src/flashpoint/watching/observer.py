"""Observes the attention of single steps of a model that somebody else trains, and decides which."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.runs.metric_table import W_K_NORM, W_Q_NORM
from flashpoint.watching.capture_recorder import CAPTURED, CaptureRecorder, DeltaRecorder
from flashpoint.watching.events import (
    AttentionCalled,
    BackwardReached,
    CaptureAsked,
    Dispatcher,
    ForwardStarted,
    Handler,
    LoopLeft,
    StepEnded,
    StepObserved,
    StepStarted,
)
from flashpoint.watching.functions import NamedFunction
from flashpoint.watching.interception import forget_ended, intercept
from flashpoint.watching.interceptor import Hook, Interceptor
from flashpoint.watching.latest_batches import LatestBatches, ModelInputs
from flashpoint.watching.left_out import (
    NOT_CALLED,
    UNKNOWN,
    is_sharded,
    numbers_of_heads,
    other_than_pytorchs,
    perhaps_exchanged,
    told_to_users_of,
)
from flashpoint.watching.notices import Notices
from flashpoint.watching.projections import ByMetric, Found, by_metric
from flashpoint.watching.step_calls import ShownCall

if TYPE_CHECKING:
    from flashpoint.watching.matrices import Products

_TOLD = 4
"""Calls that a line names."""
_PATIENCE = 100
"""Steps at most that a collection leaves out for another watched model that is to be observed. Also those that a model
waits for another one, which may be trained no more, before it ends the observation of that one."""


class Observer:
    """Observes one step's forward and backward pass at a time: begun before the step, finished after it.

    One observer works at a time: what an observation replaces is put back in reverse order.

    Args:
        sequences: of a batch that are kept.
        functions: to intercept beside those that the interceptor knows.

    Attributes:
        projections: the matrices of q and k of each layer, by metric; None until a step has shown them.
        since: the step at which the observation began.
        partial: whether the observation is of some layers alone.
        seen: attentions that the last observed step called.
        rows: sequences of the batch that they were given; 0 where that differs.
        not_recorded: why that step's attentions were left out, as far as they were.
    """

    _at_work: ClassVar[Observer | None] = None

    def __init__(
        self,
        model: nn.Module,
        sequences: int,
        functions: Sequence[NamedFunction],
        dispatcher: Dispatcher,
        notices: Notices,
    ) -> None:
        self._model, self._sequences, self._functions = model, sequences, functions
        self._publish, self._notices = dispatcher.publish, notices
        self.projections: ByMetric | None = None
        self.since = 0
        self.partial, self._keeps = False, True
        self.seen = self.rows = 0
        self.not_recorded: list[str] = []
        self._found: dict[AttentionCalled, Found] = {}
        self._interceptor: Interceptor | None = None
        self._products: Products | None = None
        self._inputs = ModelInputs(sequences)
        self._trained_pass = 0
        self._asked = False
        self._end_interception: Callable[[], None] | None = None

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does in the passes of an observed step."""
        return (
            Handler(ForwardStarted, "copying the inputs", self._copy_inputs),
            Handler(BackwardReached, "finding W_Q and W_K", self._find_weights),
        )

    @property
    def observing(self) -> bool:
        """Whether a step is being observed."""
        return self._interceptor is not None

    @property
    def has_begun(self) -> bool:
        """Whether the step that is observed has shown an attention, or a forward pass of training without one."""
        return self._interceptor is not None and (self._interceptor.trains or len(self._interceptor.calls) > 0)

    @property
    def must_wait(self) -> bool:
        """Whether another watched model is being observed."""
        return Observer._at_work not in (None, self)

    @staticmethod
    def interrupt() -> None:
        """End the observation of whichever model is being observed: its loop may have stopped training it."""
        if Observer._at_work is not None:
            Observer._at_work.drop()

    def keep_at_least(self, sequences: int) -> None:
        """Keep more sequences of what the observed step is still to show."""
        if self._interceptor is not None:
            self._interceptor.keep_at_least(sequences)
            self._inputs.keep_at_least(sequences)

    def identities(self, first: int) -> tuple[str, ...]:
        """Return the identities of the first sequences of the last observed step, by what the model was given; empty
        where that does not tell them."""
        return self._inputs.identities(self._trained_pass, self.rows, first)

    def begin(self, step: int, at_least: int, layers: Collection[int] | None = None) -> None:
        """Observe the next forward pass: at least so many sequences, and of some layers alone where they are given. Of
        none of them the calls are shown, and nothing is kept."""
        self._leave_out_sharded_weights()
        sequences = max(self._sequences, at_least)
        interceptor = Interceptor(sequences, layers, self._publish)
        products = None
        if self.projections is None:
            from flashpoint.watching.matrices import Products  # once in a loop

            products = Products(self._model, lambda: interceptor.listening)
        with contextlib.ExitStack() as entered:
            entered.callback(intercept(interceptor, self._functions))
            if products is not None:
                entered.enter_context(products)  # before the next line, by whose hooks a module has ended
            entered.callback(interceptor.only_inside(self._model))

            def begin_forward(_: nn.Module, positional: Any, options: Any) -> None:
                if (forward := interceptor.begin_forward()) is not None:
                    self._publish(ForwardStarted(forward, positional, options))

            begin = Hook(begin_forward)
            entered.callback(self._model.register_forward_pre_hook(begin, with_kwargs=True).remove)
            self._end_interception = entered.pop_all().close
        Observer._at_work = self
        self._interceptor, self.since, self.partial = interceptor, step, layers is not None
        self._keeps = layers is None or bool(layers)
        self._products, self._inputs = products, ModelInputs(sequences)

    def finish(self, step: int) -> list[AttentionCall]:
        """Return the calls of the step that was observed; none where it showed no attention, of which the reason is
        told."""
        interceptor, self._interceptor = self._interceptor, None
        assert interceptor is not None
        self.stop()
        trained = interceptor.calls.trained()
        self.seen = len(trained)
        rows = {len(call.called.q) for call in trained}
        self.rows = rows.pop() if len(rows) == 1 else 0
        self._trained_pass = trained[0].called.forward if trained else 0
        self._keep_weights(trained)
        found = [call.with_gradients(layer, step) for layer, call in enumerate(trained, 1)]
        calls = [call for call in found if call is not None]
        if self._keeps:
            self._tell_left_out(interceptor, calls, len(trained))
            self._ask_whether_exchanged(trained)
        interceptor.calls.clear()  # at once: they hold q and k of whole batches
        return calls

    def drop(self) -> None:
        """End the observation without its calls, if there is one."""
        interceptor, self._interceptor = self._interceptor, None
        self.stop()
        self._found.clear()
        if interceptor is not None:
            interceptor.calls.clear()

    def stop(self) -> None:
        """Put back what the observation replaced."""
        self._products = None
        if self._end_interception is not None:
            Observer._at_work = None
            end, self._end_interception = self._end_interception, None
            end()
        forget_ended()

    def _copy_inputs(self, event: ForwardStarted) -> None:
        self._inputs.take(event.forward, event.positional, event.options)

    def _find_weights(self, event: BackwardReached) -> None:
        """Find W_Q and W_K of a layer, whose graph is there."""
        interceptor, products, call = self._interceptor, self._products, event.call
        if interceptor is None or products is None or event.differentiable or call in self._found:
            return
        from flashpoint.watching.matrices import projections_of  # as above

        self._found[call] = {}  # if it fails
        with interceptor.ignoring_gradients():
            self._found[call] = projections_of(call, products)

    def _leave_out_sharded_weights(self) -> None:
        if self.projections is None and is_sharded(self._model):  # hooks would gather weights, which all have to ask
            self.projections = {}
            self._notices.warn(f"weights are sharded: {_unlogged(())}")

    def _keep_weights(self, trained: Sequence[ShownCall]) -> None:
        """Keep what was found, once it was looked for in all layers of a step."""
        found = [self._found.get(call.called, {}) for call in trained]
        self._found.clear()
        if self.projections is None and found:
            self.projections = by_metric(found)
            self._tell_not_found(found, [call.called.module for call in trained])
        known = max(map(len, (self.projections or {}).values()), default=0)
        if 0 < known < len(trained):
            self._notices.warn(
                f"{len(trained)} attentions are trained, and norms of W_Q and W_K are logged of the {known} that were "
                "trained at first: no early warning comes of the others; end this watch and begin another one"
            )

    def _tell_not_found(self, layers: Sequence[Found], modules: Sequence[str]) -> None:
        """Tell what makes no q or no k that is known, with the reason of the first layer."""
        for name, metric in (("q", W_Q_NORM), ("k", W_K_NORM)):
            lacking = [at for at, layer in enumerate(layers) if not isinstance(layer.get(metric.name), tuple)]
            if not lacking:
                continue
            where = f" ({modules[lacking[0]]})" if modules[lacking[0]] else ""
            why = f"{name} of layer {lacking[0] + 1}{where} {layers[lacking[0]].get(metric.name, 'failed')}"
            if metric.name not in (self.projections or ()):
                self._notices.warn(f"{_unlogged(self.projections or ())}: {why}")
                return  # which is told of both
            told = f"layer{'s' * (len(lacking) > 1)} {_first([str(at + 1) for at in lacking])}"
            self._notices.warn(f"W_Q of {told} is not known, and no early warning comes of it: {why}")

    def _tell_left_out(self, interceptor: Interceptor, calls: Sequence[AttentionCall], trained: int) -> None:
        """Tell and note why attentions and gradients are not recorded, as far as they are not."""
        shown = interceptor.calls
        lacking = {"no gradient came to them before watched.step"} if shown.is_incomplete else set()
        missed = shown.missed
        reasons = sorted(shown.failed | missed.keys() | lacking)
        if not calls:
            called = any(not call.is_differentiated_twice for call in shown)
            reasons = [one for one in reasons if one not in lacking or not called]
            reasons = self._why_none(reasons, called and not shown.failed, interceptor)
            reasons = [told_to_users_of(self._model, reason) for reason in reasons]
            lacks = "" if self.projections else f". Until a step shows one, {_unlogged(())}"
            self._notices.warn(f"no attention was recorded: {'; '.join(reasons)}{lacks}")
        elif reasons:
            total = trained + sum(map(len, missed.values()))
            reasons = [
                f"{told_to_users_of(self._model, reason)}{_at_calls(missed.get(reason, {}), total)}"
                for reason in reasons
            ]
            told = "; ".join(reasons)
            self._notices.warn(f"some attentions are not recorded ({told}); layers are counted without them")
        uncalled = [
            f"{one.word} was not called by its name in a module: it is not seen where it is an attribute or in a list"
            for one in self._functions
            if one.word not in interceptor.called
        ]
        for line in uncalled:
            self._notices.warn(line)
        incomplete = sorted(shown.incomplete)
        if incomplete:
            self._notices.warn(f"some gradients are not recorded ({'; '.join(incomplete)})")
        self.not_recorded = [*reasons, *uncalled, *incomplete]

    def _ask_whether_exchanged(self, trained: Sequence[ShownCall]) -> None:
        """Ask once, at the first step with attention: of a model with other attentions, too, one line is enough.
        And tell that something stands around PyTorch's."""
        if self._asked or not trained:
            return
        self._asked = True
        if (place := other_than_pytorchs()) and place not in [one.word for one in self._functions]:
            self._notices.warn(
                f"{place.replace(':', '.')} is not PyTorch's any more: the attention inside it is recorded, and what "
                f"it does beside is not judged; functions=['{place}'] records the whole"
            )
        heads, lengths = numbers_of_heads(self._model), self._inputs.lengths(self._trained_pass, self.rows)
        for called in (call.called for call in trained):
            if signs := perhaps_exchanged(called.q.shape, lengths, heads):
                self._notices.warn(
                    f"are heads and tokens exchanged? {signs}: attention takes [B, H, T, d], so give "
                    f"{called.attention} x.transpose(1, 2) of [B, T, H, d], and turn O back"
                )
                return

    def _why_none(self, reasons: list[str], called: bool, interceptor: Interceptor) -> list[str]:
        if called:
            return [
                "no gradient came to any attention before watched.step: call it after the backward pass, or the loss "
                "of this step uses none",
                *reasons,
            ]
        if interceptor.in_other_thread and not reasons:
            return ["the model was called in another thread than watched.step before; call both in one thread"]
        return reasons or [UNKNOWN if interceptor.was_called else NOT_CALLED]


def _at_calls(modules: Mapping[int, str], total: int) -> str:
    """Return which calls of a forward pass these are, by the modules that called them or else by their numbers; empty
    without any."""
    names = list(dict.fromkeys(modules.values()))
    if names and all(names):
        return f", in module{'s' * (len(names) > 1)} {_first(names)}"
    return f", in call{'s' * (len(modules) > 1)} {_first([*map(str, modules)])} of {total}" if modules else ""


def _first(told: Sequence[str]) -> str:
    return ", ".join([*told[:_TOLD], *["…"] * (len(told) > _TOLD)])


def _unlogged(metrics: Collection[str]) -> str:
    """Return what is not logged where these norms alone are."""
    lacking = [matrix for matrix, norm in (("W_Q", W_Q_NORM), ("W_K", W_K_NORM)) if norm.name not in metrics]
    warning = ", and no early warning comes" if "W_Q" in lacking else ""
    return f"norms of {' and '.join(lacking)} are not logged{warning}"


class ObservationSchedule:
    """Has steps observed at an interval, for captures, and to measure δ after a capture.

    Args:
        observer: does it.
        captures, deltas: may want a step.
        batches: tell the sequences of a step apart, where the model's inputs do not.
        interval: steps between observations.
        search_interval: steps after which attention that no step has shown yet is first looked for again.
        first_step: of the loop; it is observed.
        called: whether the calls of a step are to be seen, and no tensors kept of it.
    """

    _awaited: ClassVar[int] = 0
    """Steps for which collections still give way: each would begin again before any other watched model could."""

    def __init__(
        self,
        observer: Observer,
        captures: CaptureRecorder,
        deltas: DeltaRecorder,
        batches: LatestBatches,
        interval: int,
        search_interval: int,
        first_step: int,
        called: Callable[[int], bool],
        dispatcher: Dispatcher,
    ) -> None:
        self._observer, self._captures, self._deltas, self._batches = observer, captures, deltas, batches
        self._interval, self._search_interval = interval, search_interval
        self._first_step = self._search_again = first_step
        self._called, self._dispatcher = called, dispatcher
        self._shown = False  # whether a step has shown attention
        self._postponed = 0  # steps for which another watched model has been observed when this one was due

    @property
    def handlers(self) -> Sequence[Handler]:
        """What it does, by event."""
        begin, end = "observing the attention", "measuring the attention"
        return (
            Handler(StepStarted, begin, lambda event: self._begin(event.step)),
            Handler(CaptureAsked, begin, lambda event: self._begin_asked(event.step)),
            Handler(StepEnded, end, lambda event: self._end(event.step)),
            Handler(LoopLeft, "putting the attention back", lambda _: self._stop()),
        )

    def _begin(self, step: int) -> None:
        """Observe the next forward pass, if the step is to be observed."""
        observer, wanted = self._observer, self._captures.wanted
        if observer.observing:
            return
        due = (step + 1) % self._interval == 0 or wanted
        due = due or self._postponed > 0 or (not self._shown and step == self._search_again)
        self._postponed = self._postponed + 1 if due and observer.must_wait else 0
        if self._postponed > _PATIENCE:
            observer.interrupt()
            self._postponed = 0
        elif self._postponed:
            ObservationSchedule._awaited = _PATIENCE
        measured = self._deltas.layers
        if observer.must_wait or not (due or measured or self._called(step)):
            return
        if not due and ObservationSchedule._awaited:
            ObservationSchedule._awaited -= 1
            return
        if due:
            ObservationSchedule._awaited = 0
        observer.begin(step, CAPTURED if wanted or measured else 0, None if due else measured)

    def _begin_asked(self, step: int) -> None:
        """Observe all layers of the next forward pass, of this step if it is still to come."""
        if self._observer.partial:  # it does not observe all layers
            self._observer.drop()
        self._observer.keep_at_least(CAPTURED)
        self._begin(step)

    def _end(self, step: int) -> None:
        """Take in the step that was observed, if one was; one whose capture came after the forward pass waits."""
        observer = self._observer
        if not observer.observing or not (observer.has_begun or not self._captures.wanted or observer.since < step):
            return
        calls = self._identified(step, observer.finish(step))
        if not observer.partial:
            if calls:
                self._shown = True
            else:  # look again soon, at ever longer distances
                self._search_again = self._first_step + max(2 * (step - self._first_step), self._search_interval)
        self._dispatcher.publish(StepObserved(step, calls, observer.seen, observer.partial, observer.not_recorded))

    def _identified(self, step: int, calls: list[AttentionCall]) -> list[AttentionCall]:
        """Return calls that know their sequences by what the model was given or by the batch, where one shows them."""
        if not calls:
            return calls
        count = len(calls[0].q)
        with self._dispatcher.shield("telling the sequences of a batch apart"):
            found = self._observer.identities(count) or self._batches.identities(step, self._observer.rows, count)
            return [dataclasses.replace(call, identities=tuple(found)) for call in calls]
        return calls

    def _stop(self) -> None:
        """Put back what observing replaced: the loop has ended."""
        self._observer.drop()
        if self._postponed:
            ObservationSchedule._awaited = 0
