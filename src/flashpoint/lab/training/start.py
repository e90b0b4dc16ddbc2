"""Where a run's steps begin."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from flashpoint.errors import UserError, notify
from flashpoint.lab.config import Config
from flashpoint.lab.training.checkpoints import REMEDY, Checkpoint, State, verified
from flashpoint.lab.training.step import state_checksum, summed
from flashpoint.lab.training.tensor_files import Forms
from flashpoint.runs.chain import Chain
from flashpoint.runs.folder import CHAIN_FILE, RunFolder
from flashpoint.runs.subfolders import SIDECAR, by_step


@dataclass(frozen=True)
class Start:
    """The state that a run starts from: step 0, or a checkpoint of this run or of the run it branches from."""

    step: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    state: State | None = None
    """The loop's; None at step 0."""
    path: Path | None = None
    """The checkpoint; None at step 0."""
    chain: Path | None = None
    """At a checkpoint of another run, the digest chain that this one's begins with."""

    def take_tensors(self) -> dict[str, Tensor]:
        """Hand the tensors over, once: who keeps the start does not keep a whole checkpoint in host memory."""
        taken = dict(self.tensors)
        self.tensors.clear()
        return taken


def starting_point(
    config: Config, forms: Forms, resumed: RunFolder | None, original: RunFolder | None, taped: int | None = None
) -> Start:
    """Return the newest whole checkpoint of the run to resume, or else where that began; the one at or before
    ``from_step`` of the run to branch from; or step 0.

    Args:
        forms: of the tensors that the next step depends on.
        taped: whole steps of the tape of the run to resume; None is enough.

    Raises:
        UserError: the run to branch from has no checkpoint that early, or not any more. Or the run that the checkpoint
            is of has no digest chain, or ``train.steps`` is less than the steps done there. Or the checkpoint holds
            other tensors than the run had. A chain or a tape that is damaged costs the checkpoints from there on.
    """
    start, source = Start(), resumed or original
    if resumed:
        if taped is not None and max(by_step(resumed.checkpoints, SIDECAR), default=0) > taped:
            notify(f"{resumed.tape}: damaged after {taped:,} steps; using a checkpoint before")
        start = _newest(resumed, forms, taped) or _beginning(resumed, forms, config.runs_dir)
    elif original and config.from_step is not None:
        start = _branching_point(original, forms, config.from_step)
    if source and start.step > config.train.steps:
        raise UserError(
            f"train.steps={config.train.steps}: {source.path} has done {start.step:,}; give {start.step:,} or more"
        )
    return start


def _newest(run: RunFolder, forms: Forms, up_to: int | None) -> Start | None:
    """Return the newest state up to a step that the run itself was in, as its digest chain says."""
    for checkpoint in verified(run.checkpoints, notify, up_to):
        state, chain = checkpoint.load_state(), Chain.read(run.chain, until_broken=True)
        if chain.steps >= checkpoint.step and chain.digests[checkpoint.step - 1].hex() == state.chain:
            tensors = checkpoint.load_tensors(forms, chain)
            _check_state(checkpoint, summed(tensors, forms), chain)
            return Start(checkpoint.step, tensors, state, checkpoint.path)
        notify(f"{checkpoint.path}: not of this run's digest chain; using the checkpoint before it")
    return None


def _check_state(checkpoint: Checkpoint, tensors: Iterable[Tensor], chain: Chain) -> None:
    """Refuse weights and moments other than those that the chain has a checksum of, where it has one."""
    recorded = int(chain.records["state"][checkpoint.step - 1])
    if recorded and recorded != int(state_checksum(tensors)) % 2**64:
        raise UserError(
            f"{checkpoint.path}: other weights or moments than the run had after {checkpoint.step:,} steps, by the "
            f"checksum in its {CHAIN_FILE}; {REMEDY}"
        )


def _beginning(resumed: RunFolder, forms: Forms, runs_dir: str) -> Start:
    """Return where the run itself began: step 0, or the checkpoint that it branched off."""
    name, step = resumed.origin or ("", 0)
    notify(f"{resumed.path}: no checkpoint to go on from; starting over at step {step:,}")
    if not step:
        return Start()
    original = RunFolder.open(name, runs_dir)
    if (start := _newest(original, forms, step)) and start.step == step:
        return dataclasses.replace(start, chain=original.chain)
    raise UserError(
        f"{resumed.path}: branched off at step {step:,}, of which {original.path} no longer has a whole checkpoint; "
        f"restore it, or branch off elsewhere with {original.replay_setting} from_step=STEP"
    )


def checkpoints_before(run: RunFolder, step: int, runs_dir: str) -> Iterator[Checkpoint]:
    """Return the run's whole checkpoints up to a step, newest first, and of a branch the one that it began with."""
    yield from verified(run.checkpoints, notify, up_to=step)
    name, first_step = run.origin or ("", 0)
    if first_step:
        with contextlib.suppress(UserError):  # the run that it branched off need not be there any more
            newest = next(verified(RunFolder.open(name, runs_dir).checkpoints, notify, up_to=first_step), None)
            if newest and newest.step == first_step:
                yield newest


def _branching_point(original: RunFolder, forms: Forms, from_step: int) -> Start:
    if from_step == 0:
        return Start()
    if start := _newest(original, forms, from_step):
        if start.step < from_step:
            notify(f"from_step={from_step}: starting from the checkpoint before it, {start.step}")
        if start.state is not None and (onset := start.state.detector.onset_step) is not None:
            notify(
                f"from_step={from_step}: {original.path} has exploded before, at {onset:,}, and its branch keeps that "
                "verdict; begin earlier to see whether an attention holds"
            )
        return dataclasses.replace(start, chain=original.chain)
    later = [step for step in by_step(original.checkpoints, SIDECAR) if step > from_step]
    if not later:
        raise UserError(f"from_step={from_step}: {original.path} has no checkpoint; replay it from the start")
    raise UserError(
        f"from_step={from_step}: {original.path} has no checkpoint that early (it has "
        f"{', '.join(map(str, later))}); choose a later step, or replay it from the start"
    )
