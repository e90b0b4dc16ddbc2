"""What ``config.json`` holds: of somebody's own loop what is known of it, and what stored names mean today."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import Field

from flashpoint.errors import UserError
from flashpoint.field_types import Count

if TYPE_CHECKING:
    from flashpoint.numerics.variant import AttentionVariant
from flashpoint.schema import Kind, Step


def as_of_today(config: dict[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with all sections and with today's name of its attention."""
    return {**with_all_sections(config), "attn": _named_as_today(config["attn"])}


def with_all_sections(config: dict[str, Any]) -> dict[str, Any]:
    """Return a stored configuration in which sections that are younger than the run are empty."""
    return {"probes": {}, "checkpoints": {}, **config}


def _named_as_today(attn: dict[str, Any]) -> dict[str, Any]:
    """Return a stored attention with today's name.

    ``flash_fixed`` was Algorithm 1, then Algorithm 1 with exact row sums, before it became a δ of O in two parts. What
    is called so today has that δ, or its name tells another one, as ``flash_fixed delta=p_dp`` does.
    """
    name, space, differing = attn["name"].partition(" ")
    if name == "flash_fp32_delta_split":
        name = "flash_fixed"
    elif name == "flash_fixed" and attn.get("delta") != "out_fp32" and "delta=" not in differing:
        name = "flash_fixed_paper" + (" exact_row_sum=True" if attn.get("exact_row_sum") else "")
    return {**attn, "name": f"{name}{space}{differing}"}


def attention_of(config: Mapping[str, Any]) -> AttentionVariant:
    """Return the attention of a stored configuration; a choice that is younger than the run has its default.

    Raises:
        ValueError: a choice has a value outside its range, or two contradict each other.
    """
    return _variant(json.dumps(config["attn"], sort_keys=True))


@lru_cache(maxsize=1024)  # many runs, few attentions
def _variant(text: str) -> AttentionVariant:
    from flashpoint.numerics.variant import AttentionVariant  # a loop that is watched does without

    return AttentionVariant.from_dict(json.loads(text))


_UNSEEN = "unknown"
"""The name of an attention that no step has shown."""


class _Attention(Kind):
    name: str = _UNSEEN


class _Shape(Kind):
    n_layer: Count
    n_head: Count
    d_model: Count
    context: Count


class _Training(Kind):
    steps: Step | None = None
    warmup_steps: Step = 0


class _Criterion(Kind):
    window: Count
    margin: float
    hold_steps: Count


class WatchedConfig(Kind):
    """The kind of ``config.json`` of somebody's own loop: what :func:`flashpoint.watch` was told, has seen or does."""

    attn: _Attention = Field(default_factory=_Attention)
    """The name of what the layers call; unknown until a step has shown it."""
    model: _Shape | None = None
    """Attentions of a forward pass, their heads, width of all heads, and tokens of a sequence, as first seen."""
    train: _Training
    """What ``watch`` was given."""
    detector: _Criterion
    """By which the watch judges the losses."""


class KnownSettings(dict[str, Any]):
    """A section of what is known of somebody's own loop. To ask it for anything else raises a :class:`UserError`."""

    def __init__(self, values: Mapping[str, Any], where: str, section: str = "") -> None:
        super().__init__(
            {
                name: KnownSettings(value, where, f"{section}{name}.") if isinstance(value, dict) else value
                for name, value in values.items()
            }
        )
        self._where, self._section = where, section

    def __missing__(self, key: str) -> Any:
        raise UserError(f"{self._where}: its loop did not tell {self._section}{key}; leave the run out")


def known_settings(config: Mapping[str, Any], where: str) -> KnownSettings:
    """Return what is known of an :class:`WatchedConfig`.

    Earlier versions stored their own defaults beside it, which say nothing of the loop: they are left out.

    Args:
        where: what messages call the run.
    """
    known = WatchedConfig.model_validate(config).model_dump(exclude_none=True)
    if known["attn"]["name"] == _UNSEEN:
        known.pop("model", None)  # seen together; before that earlier versions had a default there
    return KnownSettings(with_all_sections(known), where)
