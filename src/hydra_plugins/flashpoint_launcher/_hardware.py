"""Which hardware each run of a sweep is to have."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from flashpoint.lab.surroundings import of_hardware


class Hardware:
    """Reads the group ``hardware`` of each run, which may be an axis of the sweep."""

    def __init__(self, hydra_context: HydraContext, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config
        self._composed = lru_cache(self._compose)  # few kinds, many runs

    def of(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the values of :class:`flashpoint.lab.surroundings.HardwareConfig` for a run with these overrides."""
        return self._composed(tuple(filter(of_hardware, overrides)))

    def _compose(self, own: tuple[str, ...]) -> dict[str, Any]:
        config = self._config
        if own:
            config = self._context.config_loader.load_sweep_config(config, list(own))
        values = OmegaConf.to_container(config.hardware, resolve=True)
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}
