"""Watches somebody's own training loop: three lines in it write a run folder of this package's.

with flashpoint.watch(model) as watched:
    for batch in batches:
        loss = …; loss.backward()
        watched.step(loss, batch)
        optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torch import nn

from flashpoint.capture.watched import Watch
from flashpoint.config import TrackingConfig
from flashpoint.errors import UserError
from flashpoint.training.listeners import Listener


def watch(
    model: nn.Module,
    *,
    runs_dir: str | Path = "runs",
    name: str | None = None,
    steps: int | None = None,
    warmup_steps: int = 0,
    interval: int = 500,
    weights_interval: int = 50,
    log_interval: int = 10,
    sequences: int = 4,
    functions: Sequence[str] = (),
    wandb: Literal["disabled", "auto", "online", "offline"] = "disabled",
    project: str = "flashpoint",
) -> Watch:
    """Watch a training loop; use it as a context and call :meth:`Watch.step` once an optimiser step.

    Args:
        model: what the loop trains, compiled or not, wrapped in DistributedDataParallel or not.
        runs_dir: folder of runs; the run gets a folder of its own there.
        name: of the run; None is the time.
        steps: that the loop is to make, for the time left; None leaves it out.
        warmup_steps: of the learning rate. The early warning passes over them: norms of every head grow there.
        interval: steps between observations of the attention. An observed step runs uncompiled.
        weights_interval: steps between norms of the weights.
        log_interval: steps between reads of the losses from the device.
        sequences: of the batch that are observed. A capture has 16, if the batch does; the steps after it are measured
            for the error of δ, until it is known of 256 sequences.
        functions: attentions that are neither PyTorch's nor Transformers', ``MODULE:NAME`` each, with ``@bthd`` behind
            where they take [B, T, H, d].
        wandb: as ``tracking`` of own runs.
        project: of Weights & Biases.

    Raises:
        UserError: a function is not there, or the run's folder and files cannot be made.
        ValueError: an interval is not positive, or ``functions`` is no list.
    """
    for option, value in {"interval": interval, "weights_interval": weights_interval, "log_interval": log_interval,
                          "sequences": sequences, "steps": steps}.items():  # fmt: skip
        if value is not None and value < 1:
            raise ValueError(f"{option}={value}: give 1 or more")
    if isinstance(functions, str):
        raise ValueError(f"functions={functions!r}: give a list of MODULE:NAME")
    listeners: list[Listener] = []
    if wandb != "disabled":
        from flashpoint.wandb_tracking.listener import WandbListener

        listeners.append(WandbListener(TrackingConfig(wandb=wandb, project=project)))
    try:
        return Watch(
            model, Path(runs_dir), name, steps, warmup_steps, (interval, weights_interval, log_interval), sequences,
            functions, listeners,
        )  # fmt: skip
    except OSError as error:  # as on a full disk
        raise UserError(f"runs_dir={runs_dir}: {error.strerror}; choose one that can be written") from error
