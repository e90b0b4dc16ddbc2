"""The configuration of a run as Hydra composes it: in ``flashpoint train`` and, by its Compose API, elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from flashpoint.files import CONFIGS
from flashpoint.lab.build_config import hydra_schema

CONFIG = "train"
"""The configuration of a run, ``configs/train.yaml``."""
VERSION = "1.3"
"""Of Hydra's behaviour."""


@functools.cache
def store_schema() -> None:
    """Give Hydra every key of a run with its type and default."""
    ConfigStore.instance().store(name="schema", node=hydra_schema())


def composed_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what overrides compose as plain values: those of ``Config``, and ``hardware`` and ``help``.

    Raises:
        Exception: Hydra refuses an override (:func:`flashpoint.lab.cli.refusals.refusal`).
    """
    store_schema()
    with initialize_config_dir(str(Path(CONFIGS).resolve()), version_base=VERSION):
        return cast(dict[str, Any], OmegaConf.to_container(compose(CONFIG, list(overrides)), resolve=True))
