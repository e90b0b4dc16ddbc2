"""Where a run's steps begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flashpoint.config import Config
from flashpoint.errors import UserError, notify
from flashpoint.run_folder import RunFolder
from flashpoint.training.chain import Chain
from flashpoint.training.checkpoints import verified


@dataclass(frozen=True)
class Start:
    """Where a run's steps begin: at step 0, or at a checkpoint of this run or of the one it branches from."""

    step: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def starting_point(config: Config, resumed: RunFolder | None, original: RunFolder | None) -> Start:
    """The newest whole checkpoint of the run to resume, the one at or before ``from_step`` of the run to branch from,
    or the beginning.

    Raises:
        UserError: the run to branch from has no checkpoint that early, or the resumed run's chain is damaged.
    """
    if resumed:
        for checkpoint in verified(resumed.checkpoints, notify):
            tensors, state = checkpoint.load()
            digests = Chain.read(resumed.chain, until_broken=True).digests
            if len(digests) >= checkpoint.step and digests[checkpoint.step - 1].hex() == state["chain"]:
                return Start(checkpoint.step, tensors, state)
            notify(f"{checkpoint.path}: not of this run's digest chain; using the checkpoint before it")
        notify(f"{resumed.path}: no checkpoint to go on from; starting over at step 0")
    elif original and config.from_step is not None:
        steps = []
        for checkpoint in verified(original.checkpoints, notify):
            if checkpoint.step <= config.from_step:
                if checkpoint.step < config.from_step:
                    notify(f"from_step={config.from_step}: starting from the checkpoint before it, {checkpoint.step}")
                return Start(checkpoint.step, *checkpoint.load())
            steps.append(checkpoint.step)
        if config.from_step > 0:
            known = ", ".join(map(str, sorted(steps))) or "none"
            raise UserError(
                f"from_step={config.from_step}: {original.path} has no checkpoint that early (it has {known}); choose "
                "a later step, or replay it from the start"
            )
    return Start()
