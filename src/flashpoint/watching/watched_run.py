"""The run folder of somebody's own training: what ``flashpoint report``, ``watch`` and ``runs`` read."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

import flashpoint
from flashpoint.detector import DetectorConfig
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.errors import layer_told
from flashpoint.files import atomic_write, shown, write_json
from flashpoint.hardware import hardware_name
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.manifest import command_line
from flashpoint.runs.metrics import MetricsFile
from flashpoint.runs.outcome import NonfiniteOrigin, Outcome, Verdict
from flashpoint.watching.notices import tell, without_numbers

if TYPE_CHECKING:  # most loops have no listener
    from flashpoint.listeners import Listener, Listeners, Metrics


_COUNTS = {
    "first_step": 0, "steps": 1, "warmup_steps": 0, "interval": 1, "weights_interval": 1, "log_interval": 1,
    "sequences": 1, "logits_interval": 1,
}  # fmt: skip
"""Options that are whole numbers, and the least that each may be."""
_POSITIVE = ("margin", "max_logit")
_MAY_BE_LEFT_OUT = ("steps", "margin", "logits_interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Those of :func:`flashpoint.watch`, but for what is called: numbers may be NumPy's.

    Raises:
        TypeError: an option is of another kind.
        ValueError: an option has a value that cannot be meant.
    """

    runs_dir: Path
    name: str | None
    first_step: int
    steps: int | None
    warmup_steps: int
    interval: int
    weights_interval: int
    log_interval: int
    sequences: int
    margin: float | None
    logits_interval: int | None
    max_logit: float
    save_batch: bool

    def __post_init__(self) -> None:
        if not isinstance(self.save_batch, bool):
            raise TypeError(f"save_batch={self.save_batch!r}: give True or False")
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r}: give the name of one folder; it is made in runs_dir")
        for option in (*_COUNTS, *_POSITIVE):
            if (value := getattr(self, option)) is not None or option not in _MAY_BE_LEFT_OUT:
                plain = _count(option, value) if option in _COUNTS else _positive(option, value)
                object.__setattr__(self, option, plain)
        if self.steps is not None and self.steps <= self.first_step:
            raise ValueError(
                f"steps={self.steps}: counts from 0, as first_step={self.first_step} does; give more than that"
            )


def _count(option: str, value: Any) -> int:
    is_count = isinstance(value, Integral) and not isinstance(value, bool)
    if is_count and int(value) >= _COUNTS[option]:
        return int(value)
    raise (ValueError if is_count else TypeError)(f"{option}={value!r}: give a whole number, {_COUNTS[option]} or more")


def _positive(option: str, value: Any) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and 0 < float(value) < math.inf:
        return float(value)
    raise (ValueError if is_number else TypeError)(f"{option}={value!r}: give a number above 0")


class WatchedRun:
    """The open files of a run that is watched.

    Args:
        detector: by which the losses are judged.
        parameters: of the model, their count.
        listeners: hear of the metrics too.

    Raises:
        UserError: the folder cannot be made.
        OSError: a file in it cannot be written.
    """

    def __init__(
        self,
        options: Options,
        detector: DetectorConfig,
        parameters: int,
        device: torch.device,
        listeners: Sequence[Listener],
    ) -> None:
        name = options.name or time.strftime("%Y-%m-%d_%H-%M-%S_watched")
        made = RunFolder.create(options.runs_dir, name)
        self.folder = RunFolder(made.path.absolute())  # the loop may change its working directory
        if made.path != options.runs_dir / name:
            tell(f"watch {self.name}: {options.runs_dir / name} is there already: this run is {made.path}")
        self._listeners: Listeners | None = None
        if listeners:  # few loops have any
            from flashpoint.listeners import Listeners

            self._listeners = Listeners(listeners)
        self._manifest: dict[str, Any] = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "hardware": hardware_name(device),
            "environment": {
                "flashpoint": flashpoint.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "command": command_line(),
            },
            "data": {},
            "initial_weights": self.folder.path.name,  # nobody's but its own
            "parameters": parameters,
            "parent": None,
            "twin": None,
            "watched": True,
            "first_step": options.first_step,
            "not_recorded": [],  # why attentions were left out, each reason once
        }
        self._config = _config(options, detector)
        try:
            write_json(self.folder.manifest, self._manifest)
            write_json(self.folder.config, self._config)  # makes the folder a run
            self._metrics = MetricsFile(self.folder.metrics)
        except BaseException:  # as of a full disk: half a run would keep its name, and be listed
            shutil.rmtree(self.folder.path, ignore_errors=True)
            raise
        self._batches: TextIO | None = None
        self._nonfinite: list[NonfiniteOrigin] = []
        self._told_removed = False
        self._modules: list[str] = []
        if self._listeners is not None:
            self._listeners.begun(self.folder, options.first_step)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.path.name

    def _is_there(self) -> bool:
        """Return whether the run's folder still is where it was made. If not, tell so once: its open files take what is
        written, which somebody finds only where the folder was moved."""
        there = self.folder.manifest.is_file()
        if not there and not self._told_removed:
            self._told_removed = True
            tell(
                f"watch {self.name}: {shown(self.folder.path)} has been removed or moved: nothing is recorded there "
                "any more but captures; training goes on",
                logging.WARNING,
            )
        return there

    def describe(self, calls: Sequence[AttentionCall]) -> None:
        """Write down the model's shape and its attention, once they have been seen."""
        first = calls[0]
        names = dict.fromkeys(call.attention for call in calls)
        _, heads, length, size = first.q.shape
        self._config["attn"] = {"name": " and ".join(names)}
        self._modules = [call.module for call in calls]
        shape = {"n_layer": len(calls), "n_head": heads, "d_model": heads * size, "context": length}
        self._config["model"] = {**shape, "modules": self._modules}
        if self._is_there():
            write_json(self.folder.config, self._config)

    def layer_told(self, layer: int) -> str:
        """Return how people are told of a layer, from 1, as it was first seen."""
        return layer_told(layer, self._modules[layer - 1] if layer <= len(self._modules) else "")

    def note_not_recorded(self, reasons: Sequence[str]) -> None:
        """Write down why attentions were left out, for whoever asks later why there is no capture of them."""
        told = self._manifest["not_recorded"]
        known = set(map(without_numbers, told))  # another length of a batch is no other reason
        if new := [reason for reason in reasons if without_numbers(reason) not in known]:
            self._manifest["not_recorded"] = [*told, *new]
            if self._is_there():
                write_json(self.folder.manifest, self._manifest)

    def note_nonfinite(self, origin: NonfiniteOrigin) -> None:
        """Write down where NaN or infinity came from."""
        self._nonfinite.append(origin)
        if self._is_there():
            with self.folder.nonfinite.open("a", encoding="utf-8") as file:
                file.write(origin.model_dump_json() + "\n")

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step; steps count from 0."""
        self.log_all([(step, metrics)])

    def log_all(self, of_steps: Sequence[tuple[int, Metrics]]) -> None:
        """Log the metrics of several steps."""
        self._is_there()
        self._metrics.log_all(of_steps)
        if self._listeners is not None:
            for step, metrics in of_steps:
                self._listeners.logged(step, metrics)

    def note_batches(self, fingerprints: Sequence[tuple[int, int]]) -> None:
        """Record which batches steps trained on, by their fingerprints."""
        if fingerprints and self._is_there():
            if self._batches is None:
                self._batches = self.folder.batches.open("a", buffering=1, encoding="utf-8")
            self._batches.write("".join(f"{step},{of_batch:016x}\n" for step, of_batch in fingerprints))

    def keep(self, calls: Sequence[AttentionCall], step: int) -> Path:
        """Write captures of layers; return their folder, which is there if there are some."""
        capture = self.folder.capture(step)
        if calls:
            capture.path.mkdir(parents=True, exist_ok=True)
        layers = tuple(call.layer for call in calls)
        for call in calls:
            dataclasses.replace(call, together=layers).write(capture.layer(call.layer))
        return capture.path

    def keep_batch(self, batch: Any, step: int) -> None:
        """Write the batch of a step, plain containers of tensors on the CPU, beside its captures."""
        capture = self.folder.capture(step)
        capture.path.mkdir(parents=True, exist_ok=True)
        with atomic_write(capture.batch, durable=False) as partial:
            torch.save(batch, partial)

    def has_capture(self, step: int) -> bool:
        """Whether tensors of a step are written."""
        return bool(self.folder.capture(step).layers)

    def _origin(self, onset: int | None) -> str | None:
        """Return where NaN or infinity came from: the first one that lasted, or else that of the onset. Others were of
        steps that the verdict leaves out."""
        lasting = (one for one in self._nonfinite if one.lasting)
        since = (one for one in self._nonfinite if onset is not None and one.step >= onset)
        found = next(lasting, None) or next(since, None)
        return None if found is None else found.text

    def close(
        self, verdict: Verdict, onset: int | None, steps: int, loss: float, seconds: float, interrupted: str | None
    ) -> Outcome:
        """Write the verdict, also where the disk has no room for what is left of the metrics."""
        outcome = Outcome(
            outcome=verdict,
            step=steps,
            onset_step=onset,
            nonfinite=self._origin(onset) if verdict == "nonfinite" else None,
            loss=loss,
            val_loss=None,
            val_step=None,
            digest="none",
            chain_digest="none",
            weights_digest="none",
            tape_digest="none",
            tape_steps=0,
            interrupted=interrupted,
            seconds=round(seconds, 3),
            run=os.fspath(self.folder.path),
        )
        try:
            self._metrics.close()
            if self._batches is not None:
                self._batches.close()
        finally:
            if self._is_there():
                write_json(self.folder.outcome, outcome.to_dict())
            if self._listeners is not None:
                self._listeners.ended(self.folder, outcome)
        return outcome


def _config(options: Options, detector: DetectorConfig) -> dict[str, Any]:
    """Return what is known of the loop's configuration: the rest is its own affair, and no default of this package is
    true of it."""
    train: dict[str, Any] = {"warmup_steps": options.warmup_steps}
    judged: dict[str, Any] = {"window": detector.window, "hold_steps": detector.hold_steps}
    if options.steps is not None:
        train["steps"] = options.steps
    if options.margin is not None:  # else it follows the noise of the losses
        judged["margin"] = detector.margin
    return {"train": train, "detector": judged}
