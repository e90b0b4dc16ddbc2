"""A training loop that is watched: what it hands over is recorded, and judged for what goes wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from torch import Tensor, nn

from flashpoint.detector import DetectorConfig
from flashpoint.early_warning import LOOKBACK, Sentinel
from flashpoint.errors import UserError, is_first_process
from flashpoint.listeners import Listener
from flashpoint.runs.outcome import NO_LOSS
from flashpoint.watching.arrivals import Arrivals, Number
from flashpoint.watching.batches import LatestBatches, Sums
from flashpoint.watching.delta_collection import SEQUENCES
from flashpoint.watching.guard import Guard
from flashpoint.watching.losses import Losses
from flashpoint.watching.observation_schedule import ObservationSchedule
from flashpoint.watching.observer import Observer
from flashpoint.watching.projections import spectral_norms
from flashpoint.watching.run import WatchedRun
from flashpoint.watching.sharding import is_sharded
from flashpoint.watching.updates import Updates
from flashpoint.watching.values import LOGGED, gradient_norm, one_number


class Watch:
    """A training loop that is watched; :func:`watch` makes it.

    What fails in watching is told in one line and switched off. It does not stop the training.

    Attributes:
        run: the run's folder and files; None in processes other than the first.
    """

    def __init__(
        self,
        model: nn.Module,
        runs_dir: Path,
        name: str | None,
        first_step: int,
        steps: int | None,
        warmup_steps: int,
        intervals: tuple[int, int, int],
        sequences: int,
        functions: Sequence[str],
        listeners: Sequence[Listener],
    ) -> None:
        self._model, self._parameters = model, list[nn.Parameter]()
        self._sharded = False
        interval, self._weights_interval, self._log_interval = intervals
        self._first_step = self._step = first_step
        self._guard = Guard(lambda: self._step)
        self._arrivals = Arrivals(self._guard)
        self._updates = Updates(self._guard, self._arrivals)
        self._batches = LatestBatches(2 * self._log_interval)  # so old is a batch when the loss of its step is known
        detector = DetectorConfig()
        self._sentinel = Sentinel(warmup_steps)
        self.run: WatchedRun | None = None
        if is_first_process():
            parameters = list(model.parameters())
            if not parameters:
                raise UserError(f"watch: {type(model).__name__} has no parameters; give the module that is trained")
            self._observer = Observer(model, sequences, functions, self._guard)  # may refuse: before a folder is made
            name = name or time.strftime("%Y-%m-%d_%H-%M-%S_watched")
            self.run = WatchedRun(
                runs_dir, name, first_step, steps, warmup_steps, detector, sum(one.numel() for one in parameters),
                parameters[0].device, listeners,
            )  # fmt: skip
            self._schedule = ObservationSchedule(
                self._observer, self.run, self._batches, self._guard, interval, self._log_interval, first_step
            )
            self._losses = Losses(
                self.run, self._schedule, self._batches, self._sentinel, self._arrivals, self._guard, detector
            )
        self._entered = False
        self._process = os.getpid()
        self._started = time.perf_counter()
        self._pending_sums: list[tuple[int, Sums]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        """Return this watch: a copy of a model that holds it, as of a moving average, is no second run."""
        return self

    def __enter__(self) -> Watch:
        if self._entered or self._made:
            raise UserError("watch: a run is entered once; call flashpoint.watch again for another one")
        self._entered = True
        self._observe_next()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        if self.run is None or self._leave_to_parent():
            return
        self._schedule.stop()
        self._losses.loop_goes_on = False
        if not self._made and kind is None:
            self._guard.tell("watched.step was never called: nothing is recorded; call it once an optimiser step")
        self._guard.do("reading the last losses", self._flush)
        self._arrivals.end()
        interrupted = None if kind is None else _named(kind)
        if self._losses.none_read:
            interrupted = interrupted or NO_LOSS
            if self._made:
                self._guard.tell(f"{NO_LOSS}, and nothing is judged: the run counts as stopped")
        if (undecided := self._losses.undecided) is not None:
            self._schedule.want_next(undecided, None)  # of the last observation: no other one comes
        self._guard.do("writing a capture", self._schedule.end)
        self._guard.do("writing the verdict", lambda: self._close(interrupted))

    def step(
        self, loss: Tensor | float, batch: Any = None, *, grad_norm: Tensor | float | None = None, **metrics: float
    ) -> None:
        """Take in one step of the optimiser; call it between the backward pass and ``zero_grad``.

        Args:
            loss: of the step, the mean of its tokens, nats: an explosion is judged by it.
            batch: what the step trained on: tensors, or dicts and lists of them. Its fingerprint is recorded, and it is
                kept when something goes wrong.
            grad_norm: before clipping; None computes it from the gradients at every ``log_interval``-th step. That of
                sharded gradients is not computed: all processes would have to.
            metrics: other numbers to log, as ``lr=1e-3``, by names that the watch does not log itself.
                ``tokens_per_second`` gives the rate.
        """
        if not self._entered:
            self._guard.tell(
                "step outside of the block is not recorded; with flashpoint.watch(model) as watched: begins it"
            )
            return
        if self._leave_to_parent():
            return
        if self.run is not None:
            self._take(loss, batch, grad_norm, metrics)
        self._step += 1
        self._observe_next()

    @property
    def _made(self) -> int:
        """Steps that the loop has handed over."""
        return self._step - self._first_step

    @property
    def verdict(self) -> str:
        """``stable``, ``exploded`` or ``nonfinite``, by the losses that have been read: those of a GPU are read when
        they are up to twice ``log_interval`` steps old."""
        return "stable" if self.run is None else self._losses.verdict

    @property
    def busy(self) -> bool:
        """Whether a capture, or sequences of the steps after it, are still to come, by what has been read: a loop that
        stops loses them."""
        return self.run is not None and self._schedule.unfinished

    def capture(self, reason: str = "asked for", *, sequences: int = SEQUENCES) -> None:
        """Observe the next forward pass, of this step or of the next one, and write the tensors of all its layers.

        Args:
            reason: is told with it.
            sequences: of the steps that follow, of which the error of δ alone is measured and written. 0 is none.
        """
        if not self._entered:
            self._guard.tell("a capture outside of the block is not made; call it between watched.step and another")
            return
        if self._leave_to_parent():
            return
        if isinstance(sequences, bool) or not isinstance(sequences, int) or sequences < 0:
            self._guard.tell(f"capture(sequences={sequences!r}): give 0 or more; none are measured")
            sequences = 0
        if self.run is not None:
            self._schedule.want(self._step, reason, sequences)

    def _leave_to_parent(self) -> bool:
        """Return whether this process was forked from the one that watches, which alone writes the run. If so, tell it
        once, and observe no more."""
        forked = self.run is not None and os.getpid() != self._process
        if forked:
            self._guard.tell(
                f"process {os.getpid()} was forked from the one that watches, {self._process}: what it does is not "
                "recorded; call flashpoint.watch in the process that trains"
            )
            self._schedule.stop()
        return forked

    def _close(self, interrupted: str | None) -> None:
        assert self.run is not None
        seconds = time.perf_counter() - self._started
        losses = self._losses
        self.run.close(losses.verdict, losses.onset_step, self._step, losses.last, seconds, interrupted)

    def _take(
        self, loss: Tensor | float, batch: Any, grad_norm: Tensor | float | None, metrics: dict[str, float]
    ) -> None:
        """Each part by itself: where one fails, the others are recorded."""
        step = self._step
        due = (step + 1) % self._log_interval == 0
        self._guard.do("reading the loss", lambda: self._losses.add(step, loss))
        self._guard.do("reading the gradient norm", lambda: self._note_norm(step, grad_norm, due))
        if batch is not None:
            self._guard.do("reading the batch", lambda: self._note_batch(step, batch))
        self._guard.do("comparing weights", lambda: self._updates.take(self._model))
        self._schedule.take(step)
        if self._observer.projections and (step + 1) % self._weights_interval == 0:
            self._guard.do("measuring W_Q and W_K", lambda: self._weigh(step))
        if metrics:
            self._guard.do("logging metrics", lambda: self._log(step, metrics))
        if due:
            self._guard.do("logging the losses", self._flush)

    def _note_norm(self, step: int, grad_norm: Tensor | float | None, due: bool) -> None:
        if grad_norm is None and due:
            grad_norm = self._gradient_norm(step)
        if grad_norm is not None:
            self._losses.add_norm(step, grad_norm)

    def _gradient_norm(self, step: int) -> Tensor | None:
        """Return the norm of the gradients; None where there are none, or processes share them."""
        if not self._parameters or (step + 1) % self._weights_interval == 0:
            self._parameters = list(self._model.parameters())  # takes longer than their norm
            self._sharded = is_sharded(self._model)
        if self._sharded:
            self._guard.tell(
                "the norm of sharded gradients is not measured: all processes would have to; hand over what they "
                "computed together: watched.step(…, grad_norm=…)"
            )
            return None
        norm = gradient_norm(self._parameters)
        if norm is None:
            self._guard.tell("no gradients at watched.step; call it after the backward pass and before zero_grad")
        return norm

    def _note_batch(self, step: int, batch: Any) -> None:
        if (summed := self._batches.add(step, batch)) is not None:
            self._pending_sums.append((step, summed))
        else:
            self._guard.tell(
                f"a batch that is {type(batch).__name__} shows no tensors: it is not kept, and branches are not "
                "checked against it; hand over tensors, or dicts and lists of them"
            )

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        run = self.run
        assert run is not None
        if taken := sorted(LOGGED & metrics.keys()):
            raise ValueError(f"the watch itself logs {', '.join(taken)}: give the metric another name")
        given = [one_number(value, name) for name, value in metrics.items()]
        self._arrivals.ask(
            "logging metrics", given, lambda read: run.log(step, dict(zip(metrics, map(float, read), strict=True)))
        )

    def _observe_next(self) -> None:
        if self.run is not None:
            self._schedule.begin(self._step)

    def _weigh(self, step: int) -> None:
        projections = self._observer.projections
        assert projections is not None
        norms = [spectral_norms(some) for some in projections.values()]
        self._arrivals.ask("measuring W_Q and W_K", norms, partial(self._weighed, step, tuple(projections)))

    def _weighed(self, step: int, names: Sequence[str], read: Sequence[Number]) -> None:
        assert self.run is not None
        norms = {name: cast(Tensor, one).cpu().double().numpy() for name, one in zip(names, read, strict=True)}
        self.run.log(step, norms)
        if "w_q_spectral_norm" in norms and (warning := self._sentinel.update(step, norms["w_q_spectral_norm"])):
            self._schedule.want_next(
                f"W_Q of layer {warning.layer}, head {warning.head} has grown ×{warning.growth:.1f} in {LOOKBACK} "
                f"steps, to {warning.norm:.1f}: an explosion may follow",
                warning.layer,
            )

    def _flush(self) -> None:
        """Have what was handed over since the last time read, judged and logged."""
        self._losses.flush()
        of_batches, self._pending_sums = self._pending_sums, []
        if of_batches:
            summed = [one for _, of_batch in of_batches for one in of_batch.tensors]
            self._arrivals.ask("recording the batches", summed, partial(self._note_fingerprints, of_batches))
        self._arrivals.turn()

    def _note_fingerprints(self, of_batches: Sequence[tuple[int, Sums]], read: Sequence[Number]) -> None:
        assert self.run is not None
        numbers = iter(cast(Sequence[Tensor], read))
        self.run.note_batches(
            [(step, summed.fingerprint(next(numbers) for _ in summed.tensors)) for step, summed in of_batches]
        )


def _named(kind: type[BaseException]) -> str:
    """Return what ended a loop, as ``interrupted`` of an outcome says it."""
    return "SIGINT" if issubclass(kind, KeyboardInterrupt) else kind.__name__
