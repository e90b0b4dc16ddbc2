"""The training loop: batches in, optimiser steps, metrics, validation, tape and chain out."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from flashpoint.detector import ExplosionDetector
from flashpoint.errors import notify
from flashpoint.lab.config import Config
from flashpoint.lab.data.batches import gather_windows
from flashpoint.lab.data.tokens import TokenDataset
from flashpoint.lab.model import GPT
from flashpoint.lab.precision import autocast
from flashpoint.lab.probes.runner import Failed, ProbeRunner
from flashpoint.lab.probes.user_probes import ProbesState
from flashpoint.lab.progress_bar import progress_bar
from flashpoint.lab.training.checkpoints import Checkpoint, State
from flashpoint.lab.training.nonfinite import locate
from flashpoint.lab.training.prepared_run import PreparedRun
from flashpoint.lab.training.start import Start
from flashpoint.lab.training.step import learning_rate
from flashpoint.lab.training.writer import RunWriter
from flashpoint.runs.metric_table import (
    CLIP_FACTOR,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    MEMORY,
    TOKENS_PER_SECOND,
    UPDATE_NORM,
    VALIDATION_LOSS,
)

_HOTTEST = 3
"""Heads that the terminal shows."""


@dataclass(frozen=True)
class LoopResult:
    """How far the loop came."""

    steps: int
    """Optimiser steps done."""
    loss: float
    """Training loss of the last of them, nats."""
    val_loss: float | None
    """Loss of the last validation, nats."""
    val_step: int | None
    """Optimiser steps done then."""
    interrupted: bool
    """Whether a request to stop ended it early."""


class Trainer:
    """One run's model, optimiser and files.

    Args:
        files: take tape, chain, metrics and checkpoints.
        stop_requested: asked once a step; a True ends the run cleanly after that step.

    Attributes:
        detector: has the verdict.
        failed_probe: the probe whose failure ends a run with ``probes.strict``.
    """

    def __init__(self, prepared: PreparedRun, files: RunWriter, *, stop_requested: Callable[[], bool]) -> None:
        plan, self._optimizer_step = prepared.plan, prepared.optimizer_step
        self.model, self._tokens, self._order = prepared.optimizer_step.model, prepared.tokens, prepared.order
        self._config, self._device, self._ranks = plan.config, plan.device, plan.ranks
        self._files, self._probes, self._twin = files, prepared.probes, prepared.twin
        self._stop_requested = stop_requested
        self._first_step, self._last_loss = prepared.start.step, math.nan
        self._val_loss: float | None = None
        self._val_step: int | None = None
        self.detector = ExplosionDetector(plan.config.detector)
        self.failed_probe: Failed | None = None
        # Losses and gradient norms wait on the device, so that a step never waits for the host.
        self._pending = torch.zeros(
            plan.config.train.log_interval, len(prepared.optimizer_step.result), device=plan.device
        )
        self._pending_steps: list[int] = []
        self._pending_checksums: dict[int, Tensor] = {}
        # What was read, and is not in the files yet.
        self._unwritten: list[tuple[int, dict[str, float]]] = []
        self._unchained: list[tuple[float, float, int]] = []
        self._told_at, self._told_steps = 0.0, 0
        """When the rate was told last, by ``time.perf_counter``, and the steps done then."""
        self._ended = False
        """Whether the checkpoint to start from is of the run's last step."""
        if prepared.start.state:
            self._take_over(prepared.start)

    def run(self) -> LoopResult:
        """Train until ``train.steps``, the detector's last step, or a request to stop.

        Raises:
            OSError: a file could not be written.
        """
        train = self._config.train
        self._forget_earlier_runs()
        interrupted, step = False, self._first_step - 1
        with progress_bar(train.steps, "step", done=self._first_step) as bar:
            self._told_at, self._told_steps = time.perf_counter(), self._first_step
            for step in range(self._first_step, self._first_step if self._ended else train.steps):
                self._step(step)
                last = step + 1 == train.steps
                due = (step + 1) % train.log_interval == 0
                if self._ranks.world == 1 or due:  # several processes must stop at the same step
                    stop = self._stop_requested() or self.failed_probe is not None
                    interrupted = self._ranks.any(stop, self._device)
                if due or last or interrupted:
                    self._read_and_tell(step, bar)
                    # Not where a stop request made it read early: the run would end before it does undisturbed.
                    last = last or (due and self.detector.last_step is not None and step >= self.detector.last_step)
                if last or interrupted or not _computes_beside(self._device):
                    self._write_read()
                if self._probes:
                    self._log_probes(self._probes, step, last=last)
                if (step + 1) % train.eval_interval == 0 or last:
                    before = time.perf_counter()
                    self._log_validation(step)
                    self._told_at += time.perf_counter() - before  # the steps before it count for the rate, it does not
                self._look_at_weights(step + 1)
                if self._files.checkpoint_due(step + 1, now=interrupted):
                    self._checkpoint(step + 1)
                if last or interrupted:
                    break
        if self._ended and self._val_step != step + 1:  # its checkpoint is of a step that was not to be the last
            self._log_validation(step)
        self._files.wait()
        return LoopResult(step + 1, self._last_loss, self._val_loss, self._val_step, interrupted and not last)

    def what_was_not_finite(
        self, checkpoints_up_to: Callable[[int], Iterator[Checkpoint]], *, from_initial_weights: bool
    ) -> str | None:
        """Go back to before the step that was not finite, repeat the steps from there, and look at that step.

        Args:
            checkpoints_up_to: returns those up to a step, newest first.
            from_initial_weights: whether the run's first step was step 0, to which it can go back without a checkpoint.

        Returns:
            One sentence, or None. None where no step was NaN or infinite, or a branch has no checkpoint any more from
            before that step. Also where several processes share a batch, or a request to stop came in between.
        """
        onset = self.detector.onset_step
        if self.detector.verdict != "nonfinite" or onset is None or self._ranks.world > 1:
            return None
        before = next(checkpoints_up_to(onset), None)
        if before:
            self._optimizer_step.load_state(before.load_tensors(self._optimizer_step.forms(), None))
        elif from_initial_weights:
            self._optimizer_step.restart(self._config.seed)
        else:
            return None
        for step in range(before.step if before else 0, onset):
            if self._stop_requested():
                return None
            self._optimizer_step(self._batch(step), learning_rate(step, self._config.train))
        return locate(
            self.model,
            self._batch(onset).to(self._device),
            self._optimizer_step.seed_and_step,
            self._config.train.precision,
        )

    def _read_and_tell(self, step: int, bar: tqdm) -> None:
        """Read the losses up to a step, and tell the rate since the last time."""
        if self._pending_steps:
            self._read_pending()
        now, steps = time.perf_counter(), step + 1 - self._told_steps
        rate = steps * self._config.train.batch_size * self._config.model.context / (now - self._told_at)
        self._told_at, self._told_steps = now, step + 1
        self._unwritten.append((step, {TOKENS_PER_SECOND.name: rate, **self._memory()}))
        bar.set_postfix_str(self._status(rate), refresh=False)
        bar.update(steps)

    def _log_probes(self, probes: ProbeRunner, step: int, *, last: bool) -> None:
        if metrics := probes.after_step(step, last=last):
            self._files.log(step, metrics)
        self._note_failed_probes(step)

    def _take_over(self, start: Start) -> None:
        """Go on from a checkpoint, the run's own or of the run that it branches off."""
        tensors, state, train = start.take_tensors(), start.state, self._config.train
        assert state is not None
        self._optimizer_step.load_state(tensors)
        self.detector.load_state(state.detector)
        if self._probes:
            self._probes.load_state(tensors, state.probes, str(start.path))
            self._note_failed_probes(start.step)
        self._last_loss, last = state.loss, self.detector.last_step
        self._ended = start.step == train.steps
        if start.chain is None:  # a branch has not logged what the run before it validated, nor ended with it
            self._val_loss, self._val_step = state.val_loss, state.val_step
            self._ended |= last is not None and start.step > last and start.step % train.log_interval == 0
        if self.detector.onset_step is not None:
            self._files.keep_before(self.detector.onset_step)

    def _batch(self, step: int) -> Tensor:
        """Return this process's sequences of a step, [micro-batches, sequences, T + 1] int64, in host memory."""
        return self._sequences(self._order.windows(step))

    def _sequences(self, windows: NDArray[np.uint32]) -> Tensor:
        """Return this process's sequences of the windows [micro-batches, ranks, sequences], as :meth:`_batch` does."""
        batch = gather_windows(self._tokens.train, windows[:, self._ranks.rank], self._config.model.context)
        return batch.pin_memory() if self._device.type == "cuda" else batch

    def _look_at_weights(self, steps: int) -> None:
        """Keep the weights, and measure how far they are from the twin's, where either is due."""
        if self._files.snapshot_due(steps):
            self._files.save_weights(steps, dict(self.model.named_parameters()))
        if self._twin and steps in self._twin.steps:
            self._files.log(steps - 1, self._twin.measure(steps, dict(self.model.named_parameters())))

    def _checkpoint(self, steps: int) -> None:
        if self._pending_steps:
            self._read_pending()
        self._write_read()
        of_probes, probes = self._probes.state() if self._probes else ({}, ProbesState(attention={}, sentinel=None))
        state = State(
            step=steps,
            loss=self._last_loss,
            val_loss=self._val_loss,
            val_step=self._val_step,
            chain=self._files.chain.digest,
            detector=self.detector.state(),
            probes=probes,
        )
        if self._probes:
            self._note_failed_probes(steps - 1)
        self._files.save(self._optimizer_step.state() | of_probes, state)

    def _note_failed_probes(self, step: int) -> None:
        """Tell and record which probes are off from this step on; a strict run stops after the next step."""
        assert self._probes is not None
        for failed in self._probes.failed:
            self._files.note_probe_off(failed.probe, step, failed.error)
            if self._config.probes.strict:
                self.failed_probe = failed
            else:
                notify(f"step {step:,}: {failed.error}; probes.attention={failed.probe} is off, the run goes on")
        self._probes.failed.clear()

    def _log_validation(self, step: int) -> None:
        self._write_read()
        self._val_loss = validation_loss(
            self.model, self._tokens, self._config, self._device, self._optimizer_step.seed_and_step
        )
        self._val_step = step + 1
        self._files.log(step, {VALIDATION_LOSS.name: self._val_loss})

    def _step(self, step: int) -> None:
        windows = self._order.windows(step)
        self._files.tape.append(windows)
        batch = self._sequences(windows)
        if self._probes:
            self._probes.before_step(step, batch, self._optimizer_step.seed_and_step)
        self._optimizer_step(batch, learning_rate(step, self._config.train))
        self._pending[len(self._pending_steps)] = self._optimizer_step.result
        self._pending_steps.append(step)
        interval = self._config.train.checksum_interval
        if interval and (step + 1) % interval == 0:
            self._pending_checksums[step] = self._optimizer_step.checksum()
        self._write_read()

    def _read_pending(self) -> None:
        """Read and judge the steps since the last read."""
        values = self._pending.tolist()  # waits for the device
        for step, (loss, grad_norm, update_norm) in zip(self._pending_steps, values, strict=False):
            checksum = self._pending_checksums.pop(step, None)
            self._unchained.append((loss, grad_norm, int(checksum) % 2**64 if checksum is not None else 0))
            stable = self.detector.onset_step is None
            self.detector.update(step, loss, grad_norm)
            if stable and self.detector.onset_step is not None:
                self._files.keep_before(self.detector.onset_step)
                notify(f"step {step:,}: {self.detector.decision}")
            clip = self._config.train.grad_clip
            metrics = {
                LOSS.name: loss,
                GRAD_NORM.name: grad_norm,
                UPDATE_NORM.name: update_norm,
                CLIP_FACTOR.name: min(clip / (grad_norm + 1e-6), 1.0) if clip else 1.0,  # NaN of NaN
                LEARNING_RATE.name: learning_rate(step, self._config.train),
            }
            self._unwritten.append((step, metrics))
        self._last_loss = values[len(self._pending_steps) - 1][0]
        self._pending_steps.clear()

    def _write_read(self) -> None:
        """Chain and log what was read: on a GPU with the next step under way, which would wait for it."""
        if self._unwritten:
            self._files.chain.append_all(self._unchained)
            self._files.log_all(self._unwritten)
            self._unchained.clear()
            self._unwritten.clear()

    def _status(self, rate: float) -> str:
        """Return the loss, rate and the heads whose W_Q grows fastest, for the terminal."""
        hottest = self._probes.sentinel.hottest(_HOTTEST) if self._probes else []
        return ", ".join([f"loss {self._last_loss:.3f}", f"{rate:,.0f} tokens/s", *map(str, hottest)])

    def _forget_earlier_runs(self) -> None:
        """Give back what runs before this one in the process held, which would count as this one's memory."""
        if self._device.type == "cuda":
            gc.collect()  # a trainer is part of a cycle
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def _memory(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return {}
        return {MEMORY.name: torch.cuda.max_memory_reserved(self._device) / 2**30}


def _computes_beside(device: torch.device) -> bool:
    """Whether a step is queued, and computed while the host goes on."""
    return device.type == "cuda"


@torch.no_grad()
def validation_loss(
    model: GPT, tokens: TokenDataset, config: Config, device: torch.device, seed_and_step: Tensor
) -> float:
    """Return the mean loss, nats, over the first ``train.eval_sequences`` windows of the validation tokens.

    Args:
        seed_and_step: [2] int64, key of stochastic rounding; its count stays as it is.
    """
    context, batch = config.model.context, config.train.sequences
    count = min(config.train.eval_sequences, (len(tokens.val) - 1) // context)
    assert count >= 1, "refused before the run"
    total = 0.0
    for start in range(0, count, batch):
        windows = np.arange(start, min(start + batch, count), dtype=np.uint32)
        sequences = gather_windows(tokens.val, windows, context).to(device)
        with autocast(device, config.train.precision):
            # Uncompiled: a short last batch would compile once more.
            loss = model(sequences[:, :-1], sequences[:, 1:], seed_and_step)
        total += loss.item() * len(windows)
    return total / count
