"""``hydra/sweeper=product``, the default: every combination of the values that are swept.

Hydra's own sweeper lists the values of a range before it counts them, composes every combination before the first run,
and leaves a folder behind where the sweep is refused.

No postponed annotations here, as in ``gpus.py``.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from flashpoint.errors import UserError

MOST_RUNS = 10_000  # of one sweep


@dataclass
class ProductSweeperConfig:
    """Settings of the sweeper."""

    _target_: str = "hydra_plugins.flashpoint_launcher.product.ProductSweeper"
    params: dict[str, Any] | None = field(default_factory=dict)
    """Key → its values, as on the command line, which takes precedence."""


ConfigStore.instance().store(group="hydra/sweeper", name="product", node=ProductSweeperConfig, provider="flashpoint")


class ProductSweeper(Sweeper):
    """Hands all runs of a sweep to the launcher at once."""

    def __init__(self, params: dict[str, Any] | None) -> None:
        self._params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run all combinations.

        Raises:
            UserError: there are none or too many, or the launcher tells what failed.
            HydraException: a value cannot be composed.
        """
        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        given = parser.parse_overrides([*(f"{key}={value}" for key, value in self._params.items()), *arguments])
        axes = {override.get_key_element(): _values(override) for override in given}  # the last of a key counts
        runs = math.prod(map(len, axes.values()))
        if not runs:
            raise UserError("the sweep has no run: a list, range or glob among its values is empty; give a value")
        if runs > MOST_RUNS:
            raise UserError(f"the sweep has {runs:,} runs; give {MOST_RUNS:,} at most")
        for values in axes.values():
            value, times = Counter(values).most_common(1)[0]
            if times > 1:
                raise UserError(f"{value}: more than once in this sweep; give each value once")
        # all numbers of a range are of one kind: if its ends can be composed, so can the others
        ends = {override.get_key_element() for override in given if isinstance(override.value(), RangeSweep)}
        tried = [values[:: max(1, len(values) - 1)] if key in ends else values for key, values in axes.items()]
        self.validate_batch_is_legal(_each_value_once(tried))
        jobs = [list(overrides) for overrides in itertools.product(*axes.values())]
        returns = self.launcher.launch(jobs, initial_job_idx=0)
        for result in returns:
            _ = result.return_value  # which raises what a failed job has raised
        return [returns]


def _values(override: Override) -> list[str]:
    """Return ``KEY=VALUE`` of each value, the only one of a key that is not swept.

    Raises:
        UserError: there are too many to list, or no list of them.
    """
    key, value = override.get_key_element(), override.value()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: takes any number between two; list some, e.g. {key}=1,2,3")
    if isinstance(value, RangeSweep):
        numbers = _numbers(value, str(override.input_line))
        return [f"{key}={number}" for number in (random.sample(numbers, len(numbers)) if value.shuffle else numbers)]
    return [f"{key}={one}" for one in override.sweep_string_iterator()]


def _numbers(value: RangeSweep, line: str) -> list[float]:
    """Return the numbers of a range, without its stop.

    They are counted in decimals, as they are written. Hydra adds up binary fractions: its range(0,0.9,0.3) has four
    numbers, and the last is 0.8999999999999999.

    Raises:
        UserError: there are too many to list, or no list of them.
    """
    given = value.start, value.stop, value.step
    start, stop, step = (Decimal(str(number)) for number in given)
    if not (start.is_finite() and stop.is_finite() and step.is_finite() and step):
        raise UserError(f"{line}: give finite numbers, and a step that is not 0")
    count = max(0, math.ceil((stop - start) / step))
    if count > MOST_RUNS:
        raise UserError(f"{line}: more than {MOST_RUNS:,} values; give fewer")
    whole = all(isinstance(number, int) for number in given)
    return [int(number) if whole else float(number) for number in (start + i * step for i in range(count))]


def _each_value_once(axes: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return combinations in which each value stands at least once."""
    first = [values[0] for values in axes]
    others = [[*first[:axis], value, *first[axis + 1 :]] for axis, values in enumerate(axes) for value in values[1:]]
    return [first, *others]
