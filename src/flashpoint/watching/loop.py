"""Watches somebody's own training loop: three lines in it write a run folder of this package's.

with flashpoint.watch(model) as watched:
    for batch in batches:
        loss = …; loss.backward()
        watched.step(loss, batch)
        optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import current_process
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor, nn

from flashpoint.diagnosis.measure_table import SEQUENCES
from flashpoint.errors import UserError, is_first_process, is_full
from flashpoint.watching.events import (
    BatchSeen,
    CaptureAsked,
    LastRead,
    LoopEnded,
    LoopLeft,
    LossSeen,
    NormSeen,
    NumbersSeen,
    ReadDue,
    StepEnded,
    StepStarted,
)
from flashpoint.watching.functions import NamedFunction
from flashpoint.watching.notices import tell
from flashpoint.watching.recording import NullRecorder, Recorder, RecorderOfAnImport, Recording
from flashpoint.watching.watched_run import Options, WatchedRun

if TYPE_CHECKING:  # most loops have no listener
    from flashpoint.listeners import Listener

_Wandb = Literal["disabled", "offline", "online"]
_KILLING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""They end a process without a word; Ctrl-C (SIGINT) raises KeyboardInterrupt, which leaves the loop's block."""


def watch(
    model: nn.Module,
    *,
    runs_dir: str | Path = "runs",
    name: str | None = None,
    first_step: int = 0,
    steps: int | None = None,
    warmup_steps: int = 0,
    interval: int = 500,
    weights_interval: int = 50,
    log_interval: int = 10,
    sequences: int = 4,
    margin: float | None = None,
    logits_interval: int | None = None,
    max_logit: float = 100.0,
    save_batch: bool = True,
    functions: Sequence[str] = (),
    wandb: _Wandb = "disabled",
    project: str = "flashpoint",
    wandb_paths: bool = False,
) -> Watch:
    """Watch a training loop; use it as a context and call :meth:`Watch.step` once an optimiser step.

    Args:
        model: what the loop trains, compiled or not, wrapped in DistributedDataParallel or not.
        runs_dir: folder of runs; the run gets a folder of its own there.
        name: of the run; None is the time.
        first_step: number of the optimiser step that comes next, of a loop that goes on from a checkpoint: so many
            were made before. All steps of the run count from there, those of the two options that follow, too.
        steps: the number of steps at which the loop ends, for the time left; None leaves it out.
        warmup_steps: of the learning rate. The early warning passes over them: norms of every head grow there.
        interval: steps between observations of the attention. An observed step runs uncompiled.
        weights_interval: steps between norms of the weights.
        log_interval: steps between reads of the losses from the device.
        sequences: of the batch that are observed. A capture has 16, if the batch does; the steps after it are measured
            for the error of δ, until it is known of 256 sequences.
        margin: of an explosion, in the loss's unit: the mean of 100 losses stays so much above its minimum for 50
            steps. None takes it from the loss's noise (:class:`flashpoint.detector.NoiseScaledDetector`); ``flashpoint
            train`` has 0.3 nats.
        logits_interval: steps between measurements of the max attention logits: the largest |score| of each head, nats,
            as the softmax takes it, over the keys that a query sees. None measures none. Such a step runs uncompiled.
        max_logit: nats; a larger one is warned of once.
        save_batch: write the batch of a captured step beside its tensors. It holds what the loop handed over, as the
            text that the user trains on.
        functions: attentions that are neither PyTorch's nor Transformers', ``MODULE:NAME`` each, with ``@bthd`` behind
            where they take [B, T, H, d].
        wandb: as ``tracking`` of own runs.
        project: of Weights & Biases.
        wandb_paths: as ``tracking.paths`` of own runs.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: an argument has a value that cannot be meant. It names a function that is not there, a model without
            parameters, a ``runs_dir`` in which no run can be made, or ``wandb`` without its packages.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch: {type(model).__name__} is no torch.nn.Module; give the model that is trained")
    if isinstance(functions, str) or not isinstance(functions, Sequence):
        raise TypeError(f"functions={functions!r}: give a list of MODULE:NAME")
    if wandb not in get_args(_Wandb):
        raise ValueError(f"wandb={wandb!r}: give one of {', '.join(get_args(_Wandb))}")
    if not isinstance(runs_dir, str | os.PathLike):
        raise TypeError(f"runs_dir={runs_dir!r}: give a folder; the run's own is made in it")
    if not isinstance(wandb_paths, bool):
        raise TypeError(f"wandb_paths={wandb_paths!r}: give True or False")
    options = Options(
        runs_dir=Path(runs_dir), name=name, first_step=first_step, steps=steps, warmup_steps=warmup_steps,
        interval=interval, weights_interval=weights_interval, log_interval=log_interval, sequences=sequences,
        margin=margin, logits_interval=logits_interval, max_logit=max_logit, save_batch=save_batch,
    )  # fmt: skip
    listeners: list[Listener] = []
    try:
        if wandb != "disabled":
            from flashpoint.extras import from_lab

            tracking = from_lab("wandb_tracking.listener:tracking", f"wandb={wandb!r}")
            listeners.append(tracking(wandb, project, wandb_paths, tell))
        if name is not None:
            from flashpoint.runs.subfolders import check_name

            check_name(name, "name")
        return Watch(_recorder(model, options, functions, listeners), options)
    except UserError as error:
        raise ValueError(str(error)) from None  # a user's mistake, told whole: what led to it is ours
    except OSError as error:  # as on a full disk
        how = "free space, or choose another one" if is_full(error) else "choose one that can be written"
        raise ValueError(f"runs_dir={runs_dir}: {error.strerror}; {how}") from error


def _recorder(model: nn.Module, options: Options, functions: Sequence[str], listeners: Sequence[Listener]) -> Recorder:
    """Return what records a loop in this process."""
    if getattr(current_process(), "_inheriting", False):  # by this sign multiprocessing refuses to start more
        return RecorderOfAnImport()
    if not is_first_process():
        return NullRecorder()
    if next(model.parameters(), None) is None:
        raise UserError(f"watch: {type(model).__name__} has no parameters; give the module that is trained")
    if any(map(nn.parameter.is_lazy, model.parameters())):
        raise UserError(
            f"watch: parameters of {type(model).__name__} have no shape yet, as of LazyLinear: call it once"
        )
    found = [NamedFunction.of(word) for word in functions]  # may refuse: before a folder is made
    return Recording(model, options, found, listeners)


class Watch:
    """A training loop that is watched; :func:`watch` makes it.

    What it is told becomes events, which a recorder takes. What fails in watching is told in one line and switched off.
    It does not stop the training.
    """

    def __init__(self, recorder: Recorder, options: Options) -> None:
        self._recorder = recorder
        self._log_interval = options.log_interval
        self._first_step = self._step = options.first_step
        self._entered = False
        self._termination = Termination(self._end)
        self._process = os.getpid()

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        """Return this watch: a copy of a model that holds it, as of a moving average, is no second run."""
        return self

    def __enter__(self) -> Watch:
        if self._entered or self._made:
            raise UserError("watch: a run is entered once; call flashpoint.watch again for another one")
        self._entered = True
        if self._recorder.run is not None:
            if not self._termination.install():
                self._recorder.warn(
                    "entered in another thread than the main one, which alone can take signals: SIGTERM or SIGHUP "
                    "kills the run without an outcome"
                )
            atexit.register(self._end_with_process)  # where the block is never left, as by a callback that enters it
        try:
            self._recorder.take(StepStarted(self._step))
        except BaseException as error:  # Ctrl-C: the block is not begun, and so is not left
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with signals_wait():
            self._end(None if kind is None else _named(kind))
            self._termination.remove()

    def _end_with_process(self) -> None:
        if os.getpid() == self._process:  # not one that was forked from it
            kind = getattr(sys, "last_type", None)  # of the error that ends the process, if one does
            self._end("exit" if kind is None else _named(kind))

    def _end(self, interrupted: str | None) -> None:
        """End the run, once."""
        if not self._entered:
            return
        self._entered = False
        atexit.unregister(self._end_with_process)
        self._recorder.take(LoopLeft())
        if not self._made and interrupted is None:
            self._recorder.warn("watched.step was never called: nothing is recorded; call it once an optimiser step")
        self._recorder.take(LastRead())
        self._recorder.take(LoopEnded(self._step, bool(self._made), interrupted))

    def step(
        self, loss: Tensor | float, batch: Any = None, *, grad_norm: Tensor | float | None = None, **metrics: float
    ) -> None:
        """Take in one step of the optimiser; call it between the backward pass and ``zero_grad``.

        Args:
            loss: of the step, a mean, as of its tokens: an explosion is judged by it. Its unit does not matter.
            batch: what the step trained on: tensors, or dicts and lists of them. Its fingerprint is recorded, and it is
                kept when something goes wrong, but with ``save_batch=False``.
            grad_norm: before clipping; None computes it from the gradients at every ``log_interval``-th step. That of
                sharded gradients is not computed: all processes would have to.
            metrics: other numbers to log, as ``lr=1e-3``, by names that the watch does not log itself.
                ``tokens_per_second`` gives the rate.
        """
        if not self._entered:
            self._recorder.warn(
                "step outside of the block is not recorded; with flashpoint.watch(model) as watched: begins it"
            )
            return
        with self._termination.waits():
            self._take_step(loss, batch, grad_norm, metrics)

    def _take_step(self, loss: Any, batch: Any, grad_norm: Any, metrics: dict[str, float]) -> None:
        take, step = self._recorder.take, self._step
        due = (step + 1) % self._log_interval == 0
        take(LossSeen(step, loss))
        if grad_norm is not None or due:
            take(NormSeen(step, grad_norm))
        if batch is not None:
            take(BatchSeen(step, batch))
        take(StepEnded(step))
        if metrics:
            take(NumbersSeen(step, metrics))
        if due:
            take(ReadDue())
        self._step += 1
        take(StepStarted(self._step))

    def capture(self, reason: str = "asked for", *, sequences: int = SEQUENCES) -> None:
        """Observe the next forward pass, of this step or of the next one, and write the tensors of all its layers.

        Args:
            reason: is told with it.
            sequences: of the steps that follow, of which the error of δ alone is measured and written. 0 is none.
        """
        if not self._entered:
            self._recorder.warn("a capture outside of the block is not made; call it between watched.step and another")
            return
        if isinstance(sequences, bool) or not isinstance(sequences, int) or sequences < 0:
            self._recorder.warn(f"capture(sequences={sequences!r}): give 0 or more; none are measured")
            sequences = 0
        self._recorder.take(CaptureAsked(self._step, reason, sequences))

    @property
    def run(self) -> WatchedRun | None:
        """The run's folder and files; None in processes other than the first."""
        return self._recorder.run

    @property
    def verdict(self) -> str:
        """``stable``, ``exploded`` or ``nonfinite``, by the losses that have been read: those of a GPU are read when
        they are up to twice ``log_interval`` steps old."""
        return self._recorder.verdict

    @property
    def busy(self) -> bool:
        """Whether a capture, or sequences of the steps after it, are still to come, by what has been read: a loop that
        stops loses them."""
        return self._recorder.busy

    @property
    def _made(self) -> int:
        """Steps that the loop has handed over."""
        return self._step - self._first_step


def _named(kind: type[BaseException]) -> str:
    """Return what ended a loop, as ``interrupted`` of an outcome says it."""
    return "SIGINT" if issubclass(kind, KeyboardInterrupt) else kind.__name__


class Termination:
    """Has a run ended by a signal that kills the process, and lets it be killed then.

    A handler of the host program stays in its place, and so does a signal that is ignored. A second signal kills at
    once: what is to be read may lie on a device that hangs.

    Args:
        end: ends the run; it gets the name of the signal.
    """

    def __init__(self, end: Callable[[str], None]) -> None:
        self._end = end
        self._process = os.getpid()
        self._waits, self._came = False, 0

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Hold back the first signal until the block's end, so that what it writes is whole."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            if self._came:
                self._take(self._came, None)

    def install(self) -> bool:
        """Take the signals that nobody handles; return whether it could, as Python lets the main thread alone."""
        if not _in_main_thread():
            return False
        self._process = os.getpid()
        for number in _KILLING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._take)
        return True

    def remove(self) -> None:
        """Give them back, as far as nobody else has taken them since."""
        if _in_main_thread():
            for number in _KILLING:
                if signal.getsignal(number) == self._take:
                    signal.signal(number, signal.SIG_DFL)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self._waits and not self._came:
            self._came = number
            return
        signal.signal(number, signal.SIG_DFL)
        if self._waits:
            os.kill(os.getpid(), number)
            return
        try:
            if os.getpid() == self._process:  # not one that was forked from it
                self._end(signal.Signals(number).name)
        finally:
            os.kill(os.getpid(), number)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Hold back signals that would end the block, until its end: launchers send a second Ctrl-C after the terminal's.
    A second one in the block does not wait."""
    came: list[int] = []
    handlers: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            restore()
            signal.raise_signal(number)

    if _in_main_thread():
        for number in (signal.SIGINT, *_KILLING):
            if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN):
                handlers[number] = handler
                signal.signal(number, note)
    try:
        yield
    finally:
        restore()
        if len(came) == 1:
            signal.raise_signal(came[0])


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
