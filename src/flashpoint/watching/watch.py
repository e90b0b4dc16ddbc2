"""Watches somebody's own training loop: three lines in it write a run folder of this package's.

with flashpoint.watch(model) as watched:
    for batch in batches:
        loss = …; loss.backward()
        watched.step(loss, batch)
        optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from flashpoint.errors import UserError
from flashpoint.listeners import Listener
from flashpoint.names import check_name
from flashpoint.watching.watched import Watch

_Wandb = Literal["disabled", "auto", "online", "offline"]


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
    functions: Sequence[str] = (),
    wandb: _Wandb = "disabled",
    project: str = "flashpoint",
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
        functions: attentions that are neither PyTorch's nor Transformers', ``MODULE:NAME`` each, with ``@bthd`` behind
            where they take [B, T, H, d].
        wandb: as ``tracking`` of own runs.
        project: of Weights & Biases.

    Raises:
        UserError: the model is none, a function is not there, or the run's folder and files cannot be made.
        ValueError: an option is of another kind, or ``name`` is none that a run can have.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"watch: {type(model).__name__} is no torch.nn.Module; give the model that is trained")
    intervals = (
        _count("interval", interval),
        _count("weights_interval", weights_interval),
        _count("log_interval", log_interval),
    )
    sequences, warmup_steps = _count("sequences", sequences), _count("warmup_steps", warmup_steps, least=0)
    first_step = _count("first_step", first_step, least=0)
    steps = None if steps is None else _count("steps", steps)
    if steps is not None and steps <= first_step:
        raise ValueError(f"steps={steps}: counts from 0, as first_step={first_step} does; give more than that")
    if isinstance(functions, str) or not isinstance(functions, Sequence):
        raise ValueError(f"functions={functions!r}: give a list of MODULE:NAME")
    if wandb not in get_args(_Wandb):
        raise ValueError(f"wandb={wandb!r}: give one of {', '.join(get_args(_Wandb))}")
    if not isinstance(runs_dir, str | os.PathLike):
        raise ValueError(f"runs_dir={runs_dir!r}: give a folder; the run's own is made in it")
    if name is not None:
        _check_name(name)
    listeners: list[Listener] = []
    if wandb != "disabled":
        from flashpoint.extras import from_lab

        listeners.append(from_lab("wandb_tracking.listener:tracking", f"wandb={wandb!r}")(wandb, project))
    try:
        return Watch(
            model, Path(runs_dir), name, first_step, steps, warmup_steps, intervals, sequences,
            functions, listeners,
        )  # fmt: skip
    except OSError as error:  # as on a full disk
        raise UserError(f"runs_dir={runs_dir}: {error.strerror}; choose one that can be written") from error


def _check_name(name: Any) -> None:
    """Raise ValueError for a name that no run can have."""
    if not isinstance(name, str):
        raise ValueError(f"name={name!r}: give the name of one folder; it is made in runs_dir")
    try:
        check_name(name, "name")
    except UserError as error:
        raise ValueError(str(error)) from None


def _count(option: str, value: Any, *, least: int = 1) -> int:
    """Return an option's whole number, also one of NumPy's."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{option}={value!r}: give a whole number, {least} or more")
    return int(value)
