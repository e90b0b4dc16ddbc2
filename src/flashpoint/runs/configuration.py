"""What ``config.json`` tells of every run, whoever trained it, and what a watch knows of somebody's own loop.

A run of ``flashpoint train`` tells all its settings (:mod:`flashpoint.lab.stored_config`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import Field

from flashpoint.runs import migrations
from flashpoint.schema import Count, Kind, Step, read_record

if TYPE_CHECKING:
    from flashpoint.numerics.variant import AttentionVariant


class Shape(Protocol):
    """Of the model: layers, heads of a layer, width, and tokens of a sequence."""

    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def context(self) -> int: ...


class Training(Protocol):
    """Steps to run, those of the warm-up, and sequences a step. None is what a loop did not tell."""

    @property
    def steps(self) -> int | None: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def batch_size(self) -> int | None: ...


class Criterion(Protocol):
    """When a run counts as exploded (:class:`flashpoint.detector.ExplosionDetector`)."""

    @property
    def window(self) -> int: ...
    @property
    def margin(self) -> float: ...
    @property
    def hold_steps(self) -> int: ...


class RunConfig(Protocol):
    """The settings that readers of any run ask for. None is what somebody's own loop did not tell."""

    @property
    def seed(self) -> int | None: ...
    @property
    def attn(self) -> AttentionVariant: ...
    @property
    def model(self) -> Shape | None: ...
    @property
    def train(self) -> Training: ...
    @property
    def detector(self) -> Criterion: ...

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        ...


class _Attention(Kind):
    name: str


class WatchedShape(Kind):
    """Attentions of a forward pass, their heads, width of all heads, and tokens of a sequence, as first seen.

    And which modules call them, by name, empty where that is not known.
    """

    n_layer: Count
    n_head: Count
    d_model: Count
    context: Count
    modules: tuple[str, ...]


class WatchedTraining(Kind):
    """What ``watch`` was given."""

    steps: Step | None
    warmup_steps: Step

    @property
    def batch_size(self) -> None:
        """A loop does not tell it."""


class WatchedCriterion(Kind):
    """By which the watch judges the losses."""

    window: Count
    margin: Annotated[float, Field(allow_inf_nan=True)] = math.nan
    """NaN where the noise of the losses sets it."""
    hold_steps: Count


class _Stored(Kind):
    attn: _Attention
    model: WatchedShape | None
    train: WatchedTraining
    detector: WatchedCriterion


@dataclass(frozen=True, slots=True)
class WatchedConfig:
    """What :func:`flashpoint.watch` was told, has seen or does: a :class:`RunConfig`."""

    attn: AttentionVariant
    """The name of what the layers call, ``unknown`` until a step has shown it. Its choices are not known."""
    model: WatchedShape | None
    """None until a step has shown it."""
    train: WatchedTraining
    detector: WatchedCriterion
    seed: None = None
    """A loop does not tell it."""

    @classmethod
    def read(cls, path: Path) -> WatchedConfig:
        """Read ``config.json`` of a watched run.

        Raises:
            UserError: the file is missing, or holds something else.
        """
        from flashpoint.numerics.variant import AttentionVariant  # a loop that is watched does without

        stored = read_record(path, _Stored, migrations.watched_config)
        return cls(AttentionVariant(name=stored.attn.name), stored.model, stored.train, stored.detector)

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values that are known."""
        sections = {name: getattr(self, name) for name in ("model", "train", "detector")}
        known = {name: value.model_dump(exclude_none=True) for name, value in sections.items() if value is not None}
        if math.isnan(self.detector.margin):
            del known["detector"]["margin"]
        return {"attn": {"name": self.attn.name}, **known}
