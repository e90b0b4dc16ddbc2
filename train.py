"""Train, record or replay one GPT-2: ``python train.py --help``."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashpoint.config import build_config, hydra_schema
from flashpoint.errors import UserError, one_line
from flashpoint.hardware import default_experiment

CONFIGS = Path(__file__).parent / "configs"
SWEEP = os.environ.setdefault("FLASHPOINT_SWEEP", time.strftime("sweep_%Y-%m-%d_%H-%M-%S"))
"""Group of the runs of one multirun in W&B; processes that it starts inherit it."""
WANTS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"


@hydra.main(config_path=str(CONFIGS), config_name="train", version_base="1.3")
def train(composed: DictConfig) -> None:
    # Imported late: --help must not wait for NumPy and PyTorch.
    values = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    with errors_as_one_line():
        if values["replay"] is not None:
            from flashpoint.replay import replayed_values

            values = replayed_values(values, list(HydraConfig.get().overrides.task))
        elif values["resume"] is not None:
            from flashpoint.replay import resumed_values

            values = resumed_values(values, list(HydraConfig.get().overrides.task))
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            values["tracking"]["group"] = values["tracking"]["group"] or SWEEP
        config = build_config(values, CONFIGS / "attn")
        from flashpoint.training.run import run

        outcome = run(config)
    if os.environ.get("RANK", "0") == "0":
        print(outcome.line(), flush=True)
    if outcome.interrupted:
        sys.exit(128 + signal.Signals[outcome.interrupted])


@contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Bad input ends the process with one line on stderr and status 2; HYDRA_FULL_ERROR=1 shows tracebacks."""
    try:
        yield
    except (UserError, HydraException, OmegaConfBaseException) as error:
        if WANTS_TRACEBACK:
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Run ``train`` with the preset for this hardware."""
    ConfigStore.instance().store(name="schema", node=hydra_schema())
    if not any(argument.split("=")[0] in ("experiment", "replay", "resume") for argument in sys.argv[1:]):
        # Beside the first override: argparse takes overrides in one run only, before or after the flags.
        first = (i for i, argument in enumerate(sys.argv[1:], 1) if "=" in argument and argument[0] != "-")
        sys.argv.insert(next(first, len(sys.argv)), f"experiment={default_experiment()}")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing several lines
    try:
        with errors_as_one_line():
            train()
    except KeyboardInterrupt:
        print("interrupted; what was prepared stays, and the same command goes on from there", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
