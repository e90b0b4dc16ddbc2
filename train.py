"""Train, record or replay one GPT-2: ``python train.py --help``."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashpoint.config import build_config, hydra_schema
from flashpoint.errors import exit_in_one_line
from flashpoint.hardware import default_experiment, refuse_unusable_gpu

if TYPE_CHECKING:
    from flashpoint.training.outcome import Outcome

CONFIGS = Path(__file__).parent / "configs"
SWEEP = os.environ.setdefault("FLASHPOINT_SWEEP", time.strftime("sweep_%Y-%m-%d_%H-%M-%S"))
"""Group of the runs of one multirun in W&B; processes that it starts inherit it."""
WANTS_TRACEBACK = os.environ.setdefault("FLASHPOINT_TRACEBACK", os.environ.get("HYDRA_FULL_ERROR", "0")) == "1"
"""Whether the user wants them; processes that this one starts inherit both, and ``main`` sets the latter for Hydra."""

HYDRAS_OWN = (HydraException, OmegaConfBaseException)
"""Errors by which Hydra and OmegaConf tell of bad input."""


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
    """The run that Hydra composed; ``group`` is its group in W&B unless the configuration names one."""
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
    from flashpoint.training.run import run

    refuse_unusable_gpu(config.train.device)
    return run(config)


def main() -> None:
    """Run ``train`` with the preset for this hardware."""
    ConfigStore.instance().store(name="schema", node=hydra_schema())
    given = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    if not given.keys() & {"experiment", "replay", "resume"}:
        experiment = default_experiment(given.get("train.device", "auto"))
        # Beside the first override: argparse takes overrides in one run only, before or after the flags.
        first = (i for i, argument in enumerate(sys.argv[1:], 1) if "=" in argument and argument[0] != "-")
        sys.argv.insert(next(first, len(sys.argv)), f"experiment={experiment}")
    # The same for a -m among them.
    flags = [argument for argument in sys.argv if argument in ("-m", "--multirun")]
    sys.argv = [argument for argument in sys.argv if argument not in flags] + flags[:1]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing several lines
    try:
        with nullcontext() if WANTS_TRACEBACK else exit_in_one_line(*HYDRAS_OWN):
            train()
    except KeyboardInterrupt:
        print("interrupted; what was prepared stays, and the same command goes on from there", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
