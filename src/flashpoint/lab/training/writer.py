"""The files that a run writes while it trains: tape, digest chain, metrics and checkpoints, in one hand."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Self

from torch import Tensor

from flashpoint.errors import notify
from flashpoint.files import atomic_write, write_json
from flashpoint.lab.data.tape import Tape, TapeHeader, TapeWriter
from flashpoint.lab.training.checkpoints import CheckpointWriter, State
from flashpoint.lab.training.prepared_run import PreparedRun
from flashpoint.lab.training.run_size import RunSize
from flashpoint.lab.training.snapshots import write_snapshot
from flashpoint.listeners import Listeners, Metrics
from flashpoint.runs.chain import ChainWriter
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.manifest import ProbeOff
from flashpoint.runs.metrics import MetricsFile
from flashpoint.runs.outcome import Outcome
from flashpoint.runs.subfolders import SIDECAR, TENSORS, by_step


class RunWriter:
    """The open files of one run. A context, at whose end they are closed whatever has happened.

    What the folder holds of steps after the one at which the run begins is dropped.

    Args:
        folder: where they are; a process that is not the first has one of its own that nobody reads, and keeps neither
            checkpoints nor weights.
        listeners: hear of the metrics too.

    Raises:
        UserError: tape or chain of the run to go on with are damaged or too short.
        OSError: a file cannot be written, here and from every method.
    """

    def __init__(self, prepared: PreparedRun, folder: RunFolder, listeners: Listeners) -> None:
        plan, first_step = prepared.plan, prepared.start.step
        kept = plan.config.checkpoints
        self._folder, self._listeners = folder, listeners
        self._weights_interval = kept.weights_interval if plan.ranks.first else 0
        self.tape = _tape_writer(folder, prepared.header, plan.tape, first_step)
        goes_on = first_step > 0 and folder.chain.exists()
        self.chain = ChainWriter(folder.chain, steps=first_step if goes_on else None)
        self._metrics = MetricsFile(folder.metrics, first_step)
        for states, suffix in ((folder.checkpoints, SIDECAR), (folder.weights, TENSORS)):
            for step, path in by_step(states, suffix).items():
                if step > first_step:  # a checkpoint without its sidecar does not count
                    path.unlink()
        self._checkpoints = None
        if kept.interval and plan.ranks.first:
            needed = RunSize.of_config(plan.config, plan.device.type, plan.ranks.world)
            self._checkpoints = CheckpointWriter(folder.checkpoints, kept, needed.state_bytes, notify)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What cannot be written a second time is not to hide the error that ends the run.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            self._close()

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step; steps count from 0."""
        self.log_all([(step, metrics)])

    def log_all(self, of_steps: Sequence[tuple[int, Metrics]]) -> None:
        """Log the metrics of several steps at once."""
        self._metrics.log_all(of_steps)
        for step, metrics in of_steps:
            self._listeners.logged(step, metrics)

    def checkpoint_due(self, steps: int, *, now: bool) -> bool:
        """Whether a checkpoint follows when ``steps`` are done; ``now`` where the run is about to end."""
        return self._checkpoints is not None and (now or self._checkpoints.due(steps))

    def save(self, tensors: Mapping[str, Tensor], state: State) -> None:
        """Write a checkpoint, in the background, once all that it counts on is on the disk."""
        assert self._checkpoints is not None
        for file in (self.tape, self.chain, self._metrics):
            file.sync()
        self._checkpoints.save(tensors, state)

    def snapshot_due(self, steps: int) -> bool:
        """Whether the weights are to be kept when ``steps`` are done."""
        return bool(self._weights_interval) and steps % self._weights_interval == 0

    def save_weights(self, steps: int, weights: Mapping[str, Tensor]) -> None:
        """Keep the weights after ``steps`` steps."""
        write_snapshot(self._folder.weights, steps, weights)

    def keep_before(self, onset: int) -> None:
        """Keep the checkpoints that precede an explosion at ``onset``."""
        if self._checkpoints:
            self._checkpoints.wait()
            self._checkpoints.pin(onset)

    def note_probe_off(self, probe: str, step: int, error: str) -> None:
        """Record in the manifest that a probe is off from this step on."""
        self._folder.note_probe_off(ProbeOff(probe=probe, step=step, error=error))

    def wait(self) -> None:
        """Wait until the checkpoint under way is on the disk."""
        if self._checkpoints:
            self._checkpoints.wait()

    def close(self, outcome: Outcome) -> None:
        """Close all files and write the verdict."""
        self._close()
        write_json(self._folder.outcome, outcome.to_dict())

    def _close(self) -> None:
        with contextlib.ExitStack() as all_of_them:
            for close in (self.tape.close, self.chain.close, self._metrics.close, self.wait):
                all_of_them.callback(close)  # each, also where another one cannot be written


def _tape_writer(folder: RunFolder, header: TapeHeader, tape: Tape | None, step: int) -> TapeWriter:
    """Return a writer that continues the folder's tape, or a new one for a branch or another number of processes."""
    if folder.begun and Tape.read(folder.tape, until_broken=True).header == header:
        return TapeWriter(folder.tape, header, steps=step)
    with atomic_write(folder.tape) as partial:
        writer = TapeWriter(partial, header)
        for windows in tape.records[:step] if tape else ():
            writer.append(windows)
    return writer
