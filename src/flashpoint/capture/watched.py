"""A training loop that is watched: what is observed at which step, and what is kept when something goes wrong."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from flashpoint.capture.projections import ModuleOutputs, Projection, projections_of, spectral_norms
from flashpoint.capture.recorder import Recorder
from flashpoint.capture.run import WatchedRun
from flashpoint.capture.values import fingerprint, floats, measures_of
from flashpoint.config import DetectorConfig
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.errors import UserError, notify
from flashpoint.probes.sentinel import LOOKBACK, Sentinel
from flashpoint.training.detector import ExplosionDetector
from flashpoint.training.listeners import Listener

_CAPTURED = 16
"""Sequences of a capture: the bias of δ is judged by its spread over sequences."""


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
        steps: int,
        warmup_steps: int,
        intervals: tuple[int, int, int],
        sequences: int,
        functions: Sequence[str],
        listeners: Sequence[Listener],
    ) -> None:
        self._model = model
        self._interval, self._weights_interval, self._log_interval = intervals
        self._sequences, self._functions = sequences, functions
        self._detector, self._sentinel = ExplosionDetector(DetectorConfig()), Sentinel(warmup_steps)
        self.run: WatchedRun | None = None
        if os.environ.get("RANK", "0") == "0":
            device = next(model.parameters()).device
            parameters = sum(parameter.numel() for parameter in model.parameters())
            Recorder(sequences, functions)  # refuses functions that are not there before a folder is made
            name = name or time.strftime("%Y-%m-%d_%H-%M-%S_watched")
            self.run = WatchedRun(runs_dir, name, steps, warmup_steps, parameters, device, listeners)
        self._step = 0
        self._started = time.perf_counter()
        self._pending: list[tuple[int, Tensor | float, Tensor | float]] = []
        self._batches: deque[tuple[int, Any]] = deque(maxlen=self._log_interval)
        self._recorder: Recorder | None = None
        self._end_recording: Callable[[], None] | None = None
        self._projections: dict[str, list[Projection]] | None = None
        self._last_calls: list[AttentionCall] = []
        self._wanted: tuple[str, int | None] | None = None
        self._last_loss = math.nan

    def __enter__(self) -> Watch:
        self._observe_next()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if self.run is not None:
            self._guarded("reading the last losses", self._flush)
            seconds = time.perf_counter() - self._started
            self.run.close(self._detector.verdict, self._detector.onset_step, self._step, self._last_loss, seconds)

    def step(
        self, loss: Tensor | float, batch: Any = None, *, grad_norm: Tensor | float | None = None, **metrics: float
    ) -> None:
        """Take in one step of the optimiser; call it between the backward pass and ``zero_grad``.

        Args:
            loss: of the step, nats.
            batch: what the step trained on: tensors, or dicts and lists of them. Its fingerprint is recorded, and it is
                kept when something goes wrong.
            grad_norm: before clipping; None computes it from the gradients at every ``log_interval``-th step.
            metrics: other numbers to log, as ``lr=1e-3``. ``tokens_per_second`` gives the rate.
        """
        if self.run is not None:
            self._guarded("watching a step", lambda: self._take(loss, batch, grad_norm, metrics))
        self._step += 1
        self._observe_next()

    @property
    def verdict(self) -> str:
        """``stable``, ``exploded`` or ``nonfinite``, by the losses that have been read."""
        return self._detector.verdict

    def capture(self, reason: str = "asked for") -> None:
        """Observe the next forward pass, of this step or of the next one, and write the tensors of all its layers."""
        self._wanted = (reason, None)
        if self._recorder is not None:
            self._recorder.keep_at_least(_CAPTURED)
        self._observe_next()

    def _take(
        self, loss: Tensor | float, batch: Any, grad_norm: Tensor | float | None, metrics: dict[str, float]
    ) -> None:
        assert self.run is not None
        step = self._step
        due = (step + 1) % self._log_interval == 0
        if grad_norm is None:
            gradients = [p.grad for p in self._model.parameters() if p.grad is not None] if due else []
            grad_norm = nn.utils.get_total_norm(gradients) if gradients else 0.0
        self._pending.append((step, loss.detach() if isinstance(loss, Tensor) else loss, grad_norm))
        if batch is not None:
            self._batches.append((step, batch))
        if self._recorder is not None and (self._recorder.calls or self._wanted is None):
            self._observed(step)
        if self._projections and (step + 1) % self._weights_interval == 0:
            self._weigh(step)
        if metrics:
            self.run.log(step, metrics)
        if due:
            self._flush()

    def _observe_next(self) -> None:
        """Record the next forward pass, if it is to be observed."""
        if self._recorder is not None:
            return
        due = self._step == 0 or (self._step + 1) % self._interval == 0 or self._wanted is not None
        if self.run is not None and due:
            self._guarded("recording the attention", self._record_next)

    def _record_next(self) -> None:
        kept = self._sequences if self._wanted is None else max(self._sequences, _CAPTURED)
        self._recorder = recorder = Recorder(kept, self._functions)
        outputs = ModuleOutputs(self._model) if self._projections is None else None
        end = recorder.start()
        if outputs is not None:
            outputs.__enter__()

        def complete(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            """The first forward pass of the step is over: a step may have several."""
            if not recorder.calls:
                return
            recorder.stop()
            hook.remove()
            if outputs is not None:
                self._guarded("finding W_Q and W_K", lambda: self._find_projections(recorder, outputs))

        hook = self._model.register_forward_hook(complete)

        def leave() -> None:
            hook.remove()
            if outputs is not None:
                outputs.__exit__()
            end()

        self._end_recording = leave

    def _find_projections(self, recorder: Recorder, outputs: ModuleOutputs) -> None:
        outputs.__exit__()
        self._projections = projections_of(recorder.calls, outputs)
        outputs.by_node.clear()
        if len(self._projections) < 2:
            notify("watch: no matrix found that makes q or k of every layer: norms of W_Q and W_K are not logged")

    def _observed(self, step: int) -> None:
        assert self.run is not None
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        self._leave()
        found = [recorded.call(layer, step) for layer, recorded in enumerate(recorder.calls, 1)]
        calls = [call for call in found if call is not None]
        recorder.calls.clear()
        if not calls:
            why = "; ".join(sorted(recorder.missed)) or "none was called that is PyTorch's, Transformers' or named"
            notify(
                f"watch: step {step:,}: no attention was recorded ({why}); name yours with functions=['MODULE:NAME']"
            )
            return
        if not self._last_calls:
            self.run.describe(calls)
        self._last_calls = calls
        if len({call.q.shape for call in calls}) == 1:
            self.run.log(step, measures_of(calls))
        if self._wanted is not None:
            (reason, layer), self._wanted = self._wanted, None
            self._keep(reason, layer)

    def _weigh(self, step: int) -> None:
        assert self.run is not None
        assert self._projections is not None
        norms = {name: spectral_norms(some).cpu().double().numpy() for name, some in self._projections.items()}
        self.run.log(step, norms)
        if "w_q_spectral_norm" in norms and (warning := self._sentinel.update(step, norms["w_q_spectral_norm"])):
            self._wanted = (
                f"W_Q of layer {warning.layer}, head {warning.head} has grown ×{warning.growth:.1f} in {LOOKBACK} "
                f"steps, to {warning.norm:.1f}: an explosion may follow",
                warning.layer,
            )

    def _flush(self) -> None:
        """Read the losses since the last read, judge and log them."""
        assert self.run is not None
        pending, self._pending = self._pending, []
        if not pending:
            return
        losses, norms = (floats([row[at] for row in pending]) for at in (1, 2))
        for (step, _, _), loss, norm in zip(pending, losses, norms, strict=True):
            stable = self._detector.verdict == "stable"
            self._detector.update(step, loss, norm)
            logged = {"loss": loss, **({"grad_norm": norm} if norm else {})}
            self.run.log(step, logged)
            if stable and self._detector.verdict == "nonfinite":
                self._keep(f"loss {loss}, gradient norm {norm}", None, step)
            elif stable and self._detector.verdict == "exploded":
                hottest = self._sentinel.hottest(1)
                self._wanted = (f"the loss has exploded, since step {self._detector.onset_step:,}",
                                hottest[0].layer if hottest else None)  # fmt: skip
        self._last_loss = losses[-1]
        for step, batch in self._batches:
            self.run.note_batch(step, fingerprint(batch))
        if self._detector.verdict != "nonfinite":
            self._batches.clear()

    def _keep(self, reason: str, layer: int | None, step: int | None = None) -> None:
        """Write the last observation, and the batch of ``step`` or of the observation."""
        assert self.run is not None
        calls = [call for call in self._last_calls if layer is None or call.layer == layer]
        at = step if step is not None else (calls[0].step if calls else self._step)
        batch = next((batch for number, batch in self._batches if number == at), None)
        folder = self.run.keep(calls, batch, at, reason)
        if calls:
            notify(f"flashpoint diagnose {folder} says what its attention did")

    def _leave(self) -> None:
        if self._end_recording is not None:
            end, self._end_recording = self._end_recording, None
            end()

    def _guarded(self, what: str, do: Callable[[], None]) -> None:
        """Do something that may not stop the training."""
        try:
            do()
        except UserError:
            raise
        except Exception as error:  # whatever fails in watching, the training goes on
            self._recorder = None
            self._leave()
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            notify(f"watch: {what} failed at step {self._step:,} ({type(error).__name__}: {first}); training goes on")
