"""Full checkpoints, dense near the present, written while training goes on.

A checkpoint is a safetensors file with the loop's state as JSON in its metadata, and a sidecar that names
its size and SHA-256. The sidecar is written last, atomically: without a matching one a file does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from flashpoint.detector import DetectorState
from flashpoint.errors import UserError, one_line
from flashpoint.files import atomic_write, file_sha256, open_tensors, write_json
from flashpoint.hardware import is_of_full_memory
from flashpoint.lab.config import CheckpointsConfig
from flashpoint.lab.probes.user_probes import ProbesState
from flashpoint.lab.training.run_size import capacity
from flashpoint.lab.training.tensor_files import Forms, check_finite, read_tensors
from flashpoint.runs import migrations
from flashpoint.runs.chain import Chain
from flashpoint.runs.subfolders import SIDECAR, TENSORS, by_step, files_of_steps, of_step
from flashpoint.schema import Kind, Number, Step, read_record, understood

_STATE = "state"
"""Key of a checkpoint's metadata that holds the loop's state."""
_OF_PROBES = "probes/"
"""What names of tensors begin with that probes keep: a branch may have other probes."""
REMEDY = "restore the file; without it, the checkpoint before it is used"
"""What to do about a checkpoint with tensors that are not the run's."""


class _Sidecar(Kind):
    """What the sidecar holds."""

    step: Step
    size: Step
    """Of the checkpoint, bytes."""
    sha256: str


class State(Kind):
    """The loop's state."""

    step: Step
    """Steps done."""
    loss: Number
    val_loss: Number | None
    """Of the last validation; None before the first one, and in checkpoints of earlier versions."""
    val_step: Step | None
    """Steps done then."""
    chain: str
    """Hex digest of all steps."""
    detector: DetectorState
    probes: ProbesState


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk, of the state after ``step`` steps."""

    path: Path
    step: int

    def load_state(self) -> State:
        """Return the loop's state."""
        with open_tensors(self.path) as file:
            text = file.metadata()[_STATE]
        return understood(text, State, f"{self.path}: state", migration=migrations.loop_state)

    def load_tensors(self, forms: Forms, finite_until: Chain | None) -> dict[str, Tensor]:
        """Return the tensors in host memory: those of the forms, and those of probes.

        Args:
            finite_until: the run's digest chain. Up to the first step whose loss or gradient norm was NaN or infinite
                no tensor may hold one. None where that is not asked.

        Raises:
            UserError: the file has others. A hash beside it that matches does not make them the run's.
        """
        tensors = read_tensors(self.path, forms, REMEDY, _OF_PROBES)
        for name, tensor in tensors.items():  # which the chain's checksum leaves out
            if name.startswith("step/") and tensor.item() != min(self.step, 2**24):  # float32 counts no further
                raise UserError(f"{self.path}: {name} is {tensor.item():g} after {self.step:,} steps; {REMEDY}")
        if finite_until is not None and finite_until.is_finite(self.step):
            check_finite(self.path, tensors, forms, REMEDY)
        return tensors


def verified(folder: Path, notify: Callable[[str], None], up_to: int | None = None) -> Iterator[Checkpoint]:
    """Return the checkpoints of a run that are whole, newest first; each damaged one that is passed over is told.

    Args:
        up_to: the last step that counts; None is any. A later checkpoint is not read: it can be large.
    """
    for named, sidecar in reversed(by_step(folder, SIDECAR).items()):
        if up_to is not None and named > up_to:
            continue
        path = sidecar.with_suffix(TENSORS)
        reason = "damaged or cut short"
        try:
            expected = read_record(sidecar, _Sidecar, remedy="")
            with open_tensors(path) as file:
                text = (file.metadata() or {}).get(_STATE, "")
            step = understood(text, State, "its state", "", migrations.loop_state).step
            intact = path.stat().st_size == expected.size and file_sha256(path) == expected.sha256
            if intact and sidecar == of_step(folder, step, SIDECAR):
                yield Checkpoint(path, step)
                continue
        except UserError as error:
            reason = str(error).removesuffix("; ")
        except (OSError, SafetensorError):
            pass
        notify(f"{path}: {reason}; using the checkpoint before it")


def retained(steps: Sequence[int], interval: int, capacity: int, pinned: set[int]) -> set[int]:
    """Choose ``capacity`` checkpoints to keep: the pinned, the newest, the two newest at each spacing of 2ʲ intervals,
    and then the newest of the others.

    An age of a intervals then has one between a and 4a intervals old, as far back as the oldest of them. Where none is
    pinned that one is at least 2 to the power of ``capacity`` − 2 intervals old, or a quarter as old as the run.
    """
    chosen: set[int] = set()
    spacing = interval
    while spacing <= max(steps, default=0):
        chosen.update(sorted(step for step in steps if step % spacing == 0)[-2:])
        spacing *= 2
    kept = pinned & set(steps)
    for step in [*sorted(steps, reverse=True)[:1], *sorted(chosen, reverse=True), *sorted(steps, reverse=True)]:
        if len(kept) < capacity:
            kept.add(step)
    return kept


class CheckpointWriter:
    """Writes checkpoints into ``folder`` within a disk budget.

    Args:
        state_bytes: bytes of the tensors of one checkpoint.
        notify: takes a line when a checkpoint could not be written; training goes on.
    """

    def __init__(
        self, folder: Path, config: CheckpointsConfig, state_bytes: int, notify: Callable[[str], None]
    ) -> None:
        self._folder = folder.absolute()  # a thread writes, while code of the user's may change the working directory
        self._config, self._notify = config, notify
        self._capacity = capacity(config, state_bytes)
        folder.mkdir(exist_ok=True)
        self._pinned: set[int] = set()
        self._writer: threading.Thread | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint follows the step that makes it ``step`` steps."""
        return step % self._config.interval == 0

    def pin(self, onset: int) -> None:
        """Keep the newest checkpoint before ``onset`` and the newest before its precursors."""
        for limit in (onset, onset - self._config.precursor_steps):
            before = [step for step in self._steps() if step <= limit]
            self._pinned |= {max(before)} if before else set()

    def save(self, tensors: Mapping[str, Tensor], state: State) -> None:
        """Copy the tensors and write them in the background."""
        self.wait()
        with self._unwritten_is_told(state.step):
            copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            copied = torch.cuda.Event() if any(tensor.is_cuda for tensor in copies.values()) else None
            if copied:
                copied.record()
            self._writer = threading.Thread(target=self._write, args=(copies, copied, state))
            self._writer.start()

    def wait(self) -> None:
        """Wait until the checkpoint under way is on the disk."""
        if self._writer:
            self._writer.join()

    def _write(self, copies: dict[str, Tensor], copied: torch.cuda.Event | None, state: State) -> None:
        step = state.step
        path = of_step(self._folder, step, TENSORS)
        with self._unwritten_is_told(step):
            self._make_room(step)
            with atomic_write(path) as partial:
                save_file(_to_host(copies, copied), partial, metadata={_STATE: json.dumps(state.model_dump())})
                sidecar = {"step": step, "size": partial.stat().st_size, "sha256": file_sha256(partial)}
            write_json(path.with_suffix(SIDECAR), sidecar)
            _sync_folder(self._folder)

    @contextlib.contextmanager
    def _unwritten_is_told(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, MemoryError, RuntimeError) as error:
            if not (isinstance(error, OSError) or is_of_full_memory(error)):
                raise
            path = of_step(self._folder, step, TENSORS)
            self._notify(f"{path}: checkpoint not written ({one_line(error)}); the run goes on without it")

    def _make_room(self, step: int) -> None:
        """Delete before writing, so that the budget holds all the time; what a kill left unfinished goes, too."""
        steps = self._steps()
        kept = set(steps) & retained([*steps, step], self._config.interval, self._capacity, self._pinned)
        kept_files = {of_step(self._folder, old, suffix) for old in kept for suffix in (SIDECAR, TENSORS)}
        for path in files_of_steps(self._folder):  # a sidecar before its checkpoint
            if path not in kept_files:
                path.unlink(missing_ok=True)

    def _steps(self) -> list[int]:
        """Return the steps of the checkpoints that have their sidecars."""
        sidecars = by_step(self._folder, SIDECAR).items()
        return [step for step, path in sidecars if path.with_suffix(TENSORS).exists()]


def _to_host(tensors: dict[str, Tensor], ready: torch.cuda.Event | None) -> dict[str, Tensor]:
    if ready is None:
        return tensors
    stream = torch.cuda.Stream()  # beside the training, not behind it
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        on_host = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
    stream.synchronize()
    return on_host


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
