"""What a run writes while it trains: tape, digest chain, metrics and checkpoints, in one hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flashpoint.config import Config, TrackingConfig
from flashpoint.data.tape import Tape, TapeHeader, TapeWriter
from flashpoint.errors import notify
from flashpoint.report.curves import draw_curves
from flashpoint.report.page import write_report
from flashpoint.report.series import RecordedRun
from flashpoint.run_folder import RunFolder, read_json, write_json
from flashpoint.tracking import Tracker
from flashpoint.training.chain import ChainWriter
from flashpoint.training.checkpoints import FlightRecorder
from flashpoint.training.outcome import Outcome
from flashpoint.training.parallel import Ranks


class Records:
    """The open records of one run.

    Args:
        folder: where they are; a process that is not the first has one of its own that nobody reads.
        tape: the recorded one of a run that is repeated or goes on, dealt to as many processes as here.
        first_step: where the run begins; what the folder holds of later steps is dropped.
        state_bytes: size of a checkpoint.

    Raises:
        UserError: tape or chain of the run to go on with are damaged or too short.
        OSError: a file cannot be written, here and from every method.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        header: TapeHeader,
        tape: Tape | None,
        first_step: int,
        ranks: Ranks,
        state_bytes: int,
    ) -> None:
        self._folder, self._ranks = folder, ranks
        self.tape = _tape_writer(folder, header, tape, first_step)
        goes_on = first_step > 0 and folder.chain.exists()
        self.chain = ChainWriter(folder.chain, steps=first_step if goes_on else None)
        tracking = _on_this_machine(config.tracking, folder) if ranks.first else TrackingConfig(wandb="disabled")
        self._tracker = Tracker(folder, tracking, run_config=config.to_dict(), notify=notify, first_step=first_step)
        self._recorder = None
        if config.checkpoints.interval and ranks.first:
            self._recorder = FlightRecorder(folder.checkpoints, config.checkpoints, state_bytes, notify)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, from 0."""
        self._tracker.log(step, metrics)

    def checkpoint_due(self, steps: int, *, now: bool) -> bool:
        """Whether a checkpoint follows when ``steps`` are done; ``now`` where the run is about to end."""
        return self._recorder is not None and (now or self._recorder.due(steps))

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint, in the background, once all that it counts on is on the disk."""
        assert self._recorder is not None
        for record in (self.tape, self.chain, self._tracker):
            record.sync()
        self._recorder.save(tensors, state)

    def keep_before(self, onset: int) -> None:
        """Of an explosion at ``onset``, keep the checkpoints that precede it."""
        if self._recorder:
            self._recorder.wait()
            self._recorder.pin(onset)

    def wait(self) -> None:
        """Until the checkpoint under way is on the disk."""
        if self._recorder:
            self._recorder.wait()

    def close(self, outcome: Outcome) -> None:
        """The verdict, the figure, and all that W&B is to hold of the run."""
        self.tape.close()
        self.chain.close()
        write_json(self._folder.outcome, outcome.to_dict())
        if self._ranks.first:
            draw_curves(self._folder)
        if not self._tracker.active:
            self._tracker.close(outcome.to_dict())
            return
        folder = self._folder
        page = write_report([RecordedRun(folder)], folder.path / "report")
        figures = sorted((page.parent / "figures").glob("*.png"))
        files = [folder.tape, folder.chain, folder.config, folder.manifest, page]
        self._tracker.close(outcome.to_dict(), figures, files)


def _on_this_machine(tracking: TrackingConfig, folder: RunFolder) -> TrackingConfig:
    """With the hardware as a tag, by which runs of several machines are told apart; W&B takes 64 characters."""
    return dataclasses.replace(tracking, tags=(*tracking.tags, str(read_json(folder.manifest)["hardware"])[:64]))


def _tape_writer(folder: RunFolder, header: TapeHeader, tape: Tape | None, step: int) -> TapeWriter:
    """Goes on with the folder's tape, or writes a new one: for a branch, or for another number of processes."""
    if folder.begun and Tape.read(folder.tape, until_broken=True).header == header:
        return TapeWriter(folder.tape, header, steps=step)
    partial = folder.tape.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    writer = TapeWriter(partial, header)
    for windows in tape.records[:step] if tape else ():
        writer.append(windows)
    writer.sync()
    partial.replace(folder.tape)
    return writer
