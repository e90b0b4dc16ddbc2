"""A recorded run as the figures read it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashpoint.attention.variant import AttentionVariant
from flashpoint.errors import UserError
from flashpoint.run_folder import RunFolder, read_json
from flashpoint.tracking import read_metrics

_BY_HEAD = re.compile(r"layer/(\d+)/head/(\d+)/(\w+)")
Series = tuple[NDArray[np.int64], NDArray[np.float64]]

_SMOOTHING_STEPS = 100


@dataclass(frozen=True)
class Smoothed:
    """A moving average and the steps that it is over: 100, or a tenth of a short run."""

    series: Series
    steps: int


@dataclass(frozen=True)
class RecordedRun:
    """Settings, verdict and metrics of one run.

    Raises:
        UserError: a file is missing or damaged.
    """

    folder: RunFolder

    @classmethod
    def open(cls, run: str | Path) -> RecordedRun:
        """An existing run, by path or by its name under ``runs``."""
        return cls(RunFolder.open(run))

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def variant(self) -> str:
        """The attention's name, by which runs have their colour; one with injected errors has another."""
        return f"{self.attention.name} injected" if self.attention.injected else self.attention.name

    @property
    def title(self) -> str:
        """The attention as people read it, with all that its name does not say."""
        return self.attention.title

    @cached_property
    def attention(self) -> AttentionVariant:
        """Every numerical choice; one that is younger than the record has its default."""
        return AttentionVariant.from_dict(self.config["attn"])

    @property
    def label(self) -> str:
        """What legends say: the variant, and the run's name where it says more."""
        return self.title if self.name == self.title else f"{self.name} ({self.title})"

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self.folder.config)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_json(self.folder.manifest)

    @cached_property
    def outcome(self) -> dict[str, Any]:
        return read_json(self.folder.outcome)

    @property
    def onset(self) -> int | None:
        onset: int | None = self.outcome["onset_step"]
        return onset

    @property
    def origin(self) -> tuple[str, int] | None:
        """The run that this one replays, and the step of it at which this one began; None of one that replays none."""
        parent = self.manifest.get("parent")
        return (parent["run"], parent["from_step"]) if parent else None

    @property
    def failed_at(self) -> int | None:
        """The onset, or the last step of a run whose numbers ceased to be finite; None of a stable one."""
        if self.outcome["outcome"] == "stable":
            return None
        return int(self.outcome["step"]) if self.onset is None else self.onset

    @property
    def verdict(self) -> str:
        """``exploded at 5,563``, ``stable to 20,000``."""
        if self.onset is not None:
            return f"exploded at {self.onset:,}"
        return f"{self.outcome['outcome']} to {self.outcome['step']:,}"

    @cached_property
    def columns(self) -> dict[str, Series]:
        """Every metric: steps [n] and values [n]."""
        return read_metrics(self.folder.metrics)

    def by_head(self, name: str) -> Series | None:
        """Steps [n] and values [n_layer, n_head, n] of a metric of heads; None where the run has not measured it."""
        return self._by_head.get(name)

    def measured_by_head(self, name: str) -> Series:
        """:meth:`by_head` of a metric that is needed.

        Raises:
            UserError: the run has not measured it.
        """
        if (series := self.by_head(name)) is None:
            known = ", ".join(sorted(self._by_head)) or "none"
            raise UserError(f"{self.folder.metrics}: {name} of heads was not measured, or not kept; it has {known}")
        return series

    def smoothed(self, name: str) -> Smoothed | None:
        """Moving average of a per-step metric; None where the run has not measured it."""
        if name not in self.columns:
            return None
        at, values = self.columns[name]
        spacing = max(1, int(np.median(np.diff(at)))) if len(at) > 1 else 1  # a thinned run has not every step
        window = max(1, min(_SMOOTHING_STEPS // spacing, len(values) // 10))
        averages = np.convolve(values, np.ones(window) / window, mode="valid")
        return Smoothed((at[window - 1 :], averages), window * spacing)

    @cached_property
    def hottest_layer(self) -> int:
        """That of :attr:`hottest_head`: of an explosion the layer that explodes; 2, the paper's, if not measured."""
        return 2 if self.by_head("w_q_spectral_norm") is None else self.hottest_head[0]

    @cached_property
    def hottest_head(self) -> tuple[int, int]:
        """Layer and head, from 1, whose W_Q norm is highest where first measured since the onset, or else at the end.

        Not at the end of an explosion: what is broken goes on to grow in other layers, the more the longer the tail.

        Raises:
            UserError: the run has not measured it.
        """
        steps, norms = self.measured_by_head("w_q_spectral_norm")
        end = len(steps) - 1
        then = norms[..., end if self.onset is None else min(int(np.searchsorted(steps, self.onset)), end)]
        layer, head = np.unravel_index(then.argmax(), then.shape)
        return int(layer) + 1, int(head) + 1

    @cached_property
    def _by_head(self) -> dict[str, Series]:
        found: dict[str, dict[tuple[int, int], Series]] = {}
        for column, series in self.columns.items():
            if match := _BY_HEAD.fullmatch(column):
                found.setdefault(match[3], {})[int(match[1]), int(match[2])] = series
        tables = {}
        for name, heads in found.items():
            layers, count = (max(place) for place in zip(*heads, strict=True))
            steps = heads[1, 1][0]
            tables[name] = steps, np.array([[heads[i + 1, j + 1][1] for j in range(count)] for i in range(layers)])
        return tables
