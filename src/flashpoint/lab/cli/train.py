"""``flashpoint train``: train, record or replay one GPT-2 or Llama. Hydra takes everything after ``train``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from flashpoint.cli.process import importing_pytorch, make_stdout_lasting, own_process
from flashpoint.errors import UserError, exit_in_one_line, is_first_process, notify, tell
from flashpoint.files import CONFIGS
from flashpoint.hardware import cuda_devices, refuse_another_gpu, refuse_unusable_gpu
from flashpoint.lab.build_config import build_config
from flashpoint.lab.cli.arguments import check, parsed
from flashpoint.lab.cli.composition import CONFIG, print_keys, store_schema
from flashpoint.lab.cli.hydra_help import help_as_text
from flashpoint.lab.cli.refusals import refusal
from flashpoint.lab.cli.unnamed import refuse_unnamed
from flashpoint.lab.config import Config, DataConfig, HardwareConfig, TrackingConfig, sets_hardware
from flashpoint.lab.training.admission import admit
from flashpoint.runs.folder import RunFolder

if TYPE_CHECKING:
    from flashpoint.listeners import Listener
    from flashpoint.runs.outcome import Outcome

SWEEP = os.environ.setdefault("FLASHPOINT_SWEEP", time.strftime("sweep_%Y-%m-%d_%H-%M-%S"))
"""Group of the runs of one multirun in W&B; processes that it starts inherit it."""
WANTS_TRACEBACK = os.environ.setdefault("FLASHPOINT_TRACEBACK", os.environ.get("HYDRA_FULL_ERROR", "0")) == "1"
"""Whether the user wants them; processes that this one starts inherit both, and ``main`` sets the latter for Hydra."""


@hydra.main(config_path=str(CONFIGS), config_name=CONFIG, version_base="1.3")
def train(composed: DictConfig) -> None:
    if composed.help:
        print_keys(composed)
        return
    multirun = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        # The launcher of a sweep takes a run's error as it is, and goes on with the next run.
        with contextlib.nullcontext() if multirun or WANTS_TRACEBACK else exit_in_one_line():
            if not multirun and (launcher := HydraConfig.get().runtime.choices["hydra/launcher"]) != "sequential":
                raise UserError(f"hydra/launcher={launcher}: launches the runs of a sweep, and one run is none; add -m")
            config = configured(composed, group=SWEEP if multirun else None)
            outcome = _run(config)
    except Exception:
        if multirun or WANTS_TRACEBACK:
            raise
        traceback.print_exc()  # an error of ours, which is not to be told as bad input
        sys.exit(1)
    if is_first_process():
        from flashpoint.lab.cli.endings import tell_of_run

        tell_of_run(RunFolder(Path(outcome.run)), HydraConfig.get().overrides.task, of_sweep=multirun)
    if outcome.interrupted:
        notify(
            f"stopped; flashpoint train {RunFolder(Path(outcome.run)).resume_setting}{config.to_go_on} goes on with it"
        )
    if is_first_process():
        print(outcome.line(), flush=True)
    if outcome.interrupted:
        sys.exit(128 + signal.Signals[outcome.interrupted])


def configured(composed: DictConfig, group: str | None) -> Config:
    """Return the configuration of the run that Hydra composed, judged against this machine.

    Args:
        group: of the run in W&B unless the configuration names one.

    Raises:
        UserError: it is not one of a run, or this machine cannot do the run.
    """
    try:
        values = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
        del values["help"]
        refuse_another_gpu(HardwareConfig(**values.pop("hardware")).gpu)  # where, and not what: no part of the run
        given = HydraConfig.get().overrides.task
        overrides = [override for override in given if not sets_hardware(override)]
        if values.get("replay") is not None:
            from flashpoint.lab.replay import replayed_values

            values = replayed_values(values, overrides)
        elif values.get("resume") is not None:
            from flashpoint.lab.replay import resumed_values

            values = resumed_values(values, overrides)
        config = build_config(values, CONFIGS / "attn")
        refuse_unnamed(config, overrides)
        tracking = replace(config.tracking, group=config.tracking.group or group)
        config = replace(config, tracking=tracking)
        admit(config)
    except Exception as error:
        if WANTS_TRACEBACK:
            raise
        raise refusal(error) from error
    return config


def _run(config: Config) -> Outcome:
    with _data_begun(config) as data:
        with importing_pytorch():  # late: neither --help nor bad input is to wait for it
            from flashpoint.lab.training.execution import run

        refuse_unusable_gpu(config.train.device)
        return run(config, _listeners(config.tracking), data)


def _data_begun(config: Config) -> contextlib.AbstractContextManager[Callable[[], DataConfig] | None]:
    """Have another process prepare the data of a run of its own batches, while this one imports and compiles. A run
    that compiles nothing does both before the other process has begun."""
    on_gpu = config.train.device != "cpu" and cuda_devices()
    if config.replay or config.resume or not config.train.compiles("cuda" if on_gpu else "cpu"):
        return contextlib.nullcontext()
    from flashpoint.lab.data.prepare import preparing

    return preparing(config.data, fallback=True, beside=True)


def _listeners(tracking: TrackingConfig) -> list[Listener]:
    """Return who hears of a run: drawings first, then W&B, which uploads the drawings."""
    from flashpoint.lab.report.ending import EndOfRunDrawing
    from flashpoint.lab.wandb_tracking.listener import WandbListener

    return [EndOfRunDrawing(), *([] if tracking.wandb == "disabled" else [WandbListener(tracking)])]


def main(arguments: Sequence[str]) -> None:
    """Run ``train`` with the preset for this hardware.

    Args:
        arguments: for Hydra.
    """
    make_stdout_lasting()
    store_schema()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing several lines
    warnings.filterwarnings("error", category=UserWarning, module="hydra")
    try:
        with contextlib.nullcontext() if WANTS_TRACEBACK else exit_in_one_line():
            _call_hydra(arguments)
    except KeyboardInterrupt as interrupt:
        how = str(interrupt) or "what was prepared stays, and the same command goes on from there"
        tell(f"interrupted; {how}")
        sys.exit(128 + signal.SIGINT)


def _call_hydra(arguments: Sequence[str]) -> None:
    try:
        given = parsed(arguments)
        check(given)
        # The launcher of a sweep starts this file with the arguments of a run.
        sys.argv = [__file__, *given.for_hydra()]
        with help_as_text():
            train()
    except Exception as error:  # errors of ours end the process in train()
        if WANTS_TRACEBACK:
            raise
        raise refusal(error) from error


@click.command(
    "train",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Train, record or replay a model; KEY=VALUE sets its configuration."""
    main(arguments)


if __name__ == "__main__":
    with own_process():
        main(sys.argv[1:])
