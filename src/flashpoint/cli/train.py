"""``flashpoint train``: train, record or replay one GPT-2. Hydra takes everything after ``train``."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import click
import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashpoint.config import build_config, hydra_schema
from flashpoint.errors import exit_in_one_line
from flashpoint.files import CONFIGS
from flashpoint.hardware import default_experiment, refuse_unusable_gpu

if TYPE_CHECKING:
    from flashpoint.runs.outcome import Outcome

SWEEP = os.environ.setdefault("FLASHPOINT_SWEEP", time.strftime("sweep_%Y-%m-%d_%H-%M-%S"))
"""Group of the runs of one multirun in W&B; processes that it starts inherit it."""
WANTS_TRACEBACK = os.environ.setdefault("FLASHPOINT_TRACEBACK", os.environ.get("HYDRA_FULL_ERROR", "0")) == "1"
"""Whether the user wants them; processes that this one starts inherit both, and ``main`` sets the latter for Hydra."""

HYDRAS_OWN = (HydraException, OmegaConfBaseException)
"""Errors by which Hydra and OmegaConf tell of bad input."""
_TAKE_A_VALUE = frozenset(
    ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--package", "-p", "--cfg", "-c")
)
"""Hydra's flags whose value may be an argument of its own."""


@hydra.main(config_path=str(CONFIGS), config_name="train", version_base="1.3")
def train(composed: DictConfig) -> None:
    multirun = HydraConfig.get().mode == RunMode.MULTIRUN
    # The launcher of a sweep takes a run's error as it is, and goes on with the next run.
    with nullcontext() if multirun or WANTS_TRACEBACK else exit_in_one_line(*HYDRAS_OWN):
        outcome = run_composed(composed, group=SWEEP if multirun else None)
    if os.environ.get("RANK", "0") == "0":
        print(outcome.line(), flush=True)
    if outcome.interrupted:
        sys.exit(128 + signal.Signals[outcome.interrupted])


def run_composed(composed: DictConfig, group: str | None) -> Outcome:
    """Return the run that Hydra composed; ``group`` is its group in W&B unless the configuration names one."""
    # Imported late: --help must not wait for NumPy and PyTorch.
    values = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    overrides = list(HydraConfig.get().overrides.task)
    if values["replay"] is not None:
        from flashpoint.replay import replayed_values

        values = replayed_values(values, overrides)
    elif values["resume"] is not None:
        from flashpoint.replay import resumed_values

        values = resumed_values(values, overrides)
    values["tracking"]["group"] = values["tracking"]["group"] or group
    config = build_config(values, CONFIGS / "attn")
    from flashpoint.cli.listeners import default_listeners
    from flashpoint.training.run import run

    refuse_unusable_gpu(config.train.device)
    return run(config, default_listeners(config.tracking))


def main(arguments: Sequence[str]) -> None:
    """Run ``train`` with the preset for this hardware.

    Args:
        arguments: for Hydra.
    """
    ConfigStore.instance().store(name="schema", node=hydra_schema())
    # The launcher of a sweep starts this file with the arguments of a run.
    sys.argv = [__file__, *_with_experiment(arguments)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing several lines
    try:
        with nullcontext() if WANTS_TRACEBACK else exit_in_one_line(*HYDRAS_OWN):
            train()
    except KeyboardInterrupt:
        print("interrupted; what was prepared stays, and the same command goes on from there", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _with_experiment(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the preset for this hardware, unless they name a preset or a run.

    argparse takes overrides in one run only, before or after the flags: the overrides go before them.
    """
    overrides: list[str] = []
    flags: list[str] = []
    for argument, before in zip(arguments, ["", *arguments], strict=False):
        is_flag = argument.startswith("-") or before in _TAKE_A_VALUE
        (flags if is_flag else overrides).append(argument)
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    if not given.keys() & {"experiment", "replay", "resume"}:
        overrides.insert(0, f"experiment={default_experiment(given.get('train.device', 'auto'))}")
    return overrides + flags


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
    main(sys.argv[1:])
