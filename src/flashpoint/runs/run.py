"""A run as everything that reads one sees it, wherever it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs.configuration import RunConfig, Shape
from flashpoint.runs.folder import CHAIN_FILE, RunFolder
from flashpoint.runs.manifest import Manifest, Origin
from flashpoint.runs.metric_table import LOSS, W_Q_NORM
from flashpoint.runs.metrics import Columns, Series, read_metrics
from flashpoint.runs.outcome import Ending, Outcome

if TYPE_CHECKING:
    from flashpoint.runs.chain import Chain

T = TypeVar("T")


def called(run: Run, runs: Sequence[Run]) -> str:
    """Return what tells a run from others that are shown with it: its attention, and the seed if another has that
    attention. Its name stands instead of the seed if another has the seed, too, or it is not known."""
    alike = [other for other in runs if other.title == run.title]
    if len(alike) == 1:
        return run.title
    seeds = [other.config.seed for other in alike]
    if run.config.seed is not None and seeds.count(run.config.seed) == 1:
        return f"{run.title}, seed {run.config.seed}"
    return run.label


@dataclass(frozen=True)
class Smoothed:
    """A moving average and the steps that it is over: the detector's, or a quarter of a short run."""

    series: Series
    steps: int


class Stored(Protocol):
    """The storage of a run: a folder, or rows of the evidence tables (:mod:`flashpoint.lab.evidence.tables`).

    What is missing or damaged raises a :class:`UserError` when it is read.
    """

    @property
    def name(self) -> str: ...
    @property
    def experiment(self) -> str | None: ...
    @property
    def where(self) -> str: ...
    @property
    def folder(self) -> RunFolder | None: ...
    @property
    def ended(self) -> bool: ...

    def config(self) -> RunConfig: ...
    def manifest(self) -> Manifest: ...
    def outcome(self) -> Outcome: ...
    def metrics(self) -> Columns: ...
    def chain(self) -> Chain: ...


@dataclass(frozen=True)
class InFolder:
    """A run in a folder of its own."""

    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def experiment(self) -> None:
        return None

    @property
    def where(self) -> str:
        return str(self.folder.path)

    @property
    def ended(self) -> bool:
        return self.folder.outcome.exists()

    def config(self) -> RunConfig:
        return self.folder.read_config()

    def manifest(self) -> Manifest:
        return self.folder.read_manifest()

    def outcome(self) -> Outcome:
        return self.folder.read_outcome()

    def metrics(self) -> Columns:
        if not self.ended and not self.folder.metrics.exists():
            return {}  # a run writes who it is, and tells its listeners, before it begins the file
        return read_metrics(self.folder.metrics)

    def chain(self) -> Chain:
        from flashpoint.runs.chain import Chain  # few readers ask for it

        return Chain.read(self.folder.chain)


@dataclass(frozen=True)
class Run:
    """Settings, verdict, metrics and digest chain of one run, each read when first asked for.

    Raises:
        UserError: what is asked for is missing or damaged.
    """

    stored: Stored

    @classmethod
    def of_folder(cls, folder: RunFolder) -> Run:
        return cls(InFolder(folder))

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def experiment(self) -> str | None:
        """Whose evidence table the run is in; None of a run in a folder."""
        return self.stored.experiment

    @property
    def where(self) -> str:
        """What messages call the run: its folder, or ``EXPERIMENT:NAME``."""
        return self.stored.where

    @property
    def folder(self) -> RunFolder | None:
        """The run's folder; None for a run of the evidence tables."""
        return self.stored.folder

    @property
    def ended(self) -> bool:
        """Whether it has an outcome."""
        return "outcome" in vars(self) or self.stored.ended  # one that was read is not looked for again

    @cached_property
    def config(self) -> RunConfig:
        return self.stored.config()

    @cached_property
    def manifest(self) -> Manifest:
        return self.stored.manifest()

    @cached_property
    def outcome(self) -> Outcome:
        return self.stored.outcome()

    @cached_property
    def columns(self) -> Columns:
        """Every metric by name: steps [n], and values [n], or of a metric of heads [n_layer, n_head, n]."""
        return self.stored.metrics()

    @cached_property
    def chain(self) -> Chain:
        """Loss, gradient norm, checksum of the state and digest of each step, verified."""
        return self.stored.chain()

    @property
    def whole_chain(self) -> Chain:
        """:attr:`chain`; refused of a run that has ended, if it lacks steps."""
        if self.ended and self.chain.steps < self.outcome.step:
            raise UserError(
                f"{self.where}: its chain ends at step {self.chain.steps:,}, the run at {self.outcome.step:,}; "
                f"restore {CHAIN_FILE}"
            )
        return self.chain

    @property
    def watched(self) -> bool:
        """Whether it is of somebody's own loop, of which :attr:`config` has only what is known."""
        return self.manifest.watched

    @cached_property
    def attention(self) -> AttentionVariant:
        """Every numerical choice; one that is younger than the run has its default. Of somebody's own loop only the
        name is known."""
        return self.config.attn

    @property
    def seed(self) -> int:
        """Raises UserError: somebody's own loop did not tell it."""
        return self._told(self.config.seed, "seed")

    @property
    def shape(self) -> Shape:
        """The model's. Raises UserError: somebody's own loop did not show it."""
        return self._told(self.config.model, "model")

    @property
    def batch_size(self) -> int:
        """Sequences a step. Raises UserError: somebody's own loop did not tell it."""
        return self._told(self.config.train.batch_size, "train.batch_size")

    def _told(self, value: T | None, key: str) -> T:
        if value is None:
            raise UserError(f"{self.where}: its loop did not tell {key}; leave the run out")
        return value

    @property
    def variant(self) -> str:
        """The attention's name, by which runs have their colour; one with injected errors has another."""
        return f"{self.attention.name} injected" if self.attention.injected else self.attention.name

    @cached_property
    def title(self) -> str:
        """The attention as people read it, with all that its name does not say."""
        return self.attention.title

    @property
    def label(self) -> str:
        """What legends say: the variant, and the run's name where it says more."""
        return self.title if self.name == self.title else f"{self.name} ({self.title})"

    @property
    def onset(self) -> int | None:
        """First step of the explosion; None without one, and before the run has ended."""
        return self.outcome.onset_step if self.ended else None

    @property
    def origin(self) -> Origin | None:
        """The run that this one replays, and the step of it at which this one began; None where it replays none."""
        return self.manifest.origin

    @property
    def first_step(self) -> int:
        """The step at which the run began (:attr:`.Manifest.began_at`)."""
        return self.manifest.began_at

    @property
    def logged_steps(self) -> int:
        """Optimiser steps up to the last one in the metrics, also of a run that has not ended; with those before
        :attr:`first_step`."""
        return int(self.columns[LOSS.name][0][-1]) + 1 if LOSS.name in self.columns else 0

    @property
    def ending(self) -> Ending:
        """How the run ended, as readers are shown it."""
        return self.outcome.ending

    @property
    def failed_at(self) -> int | None:
        """The onset, or the last step of a run whose numbers ceased to be finite. None if it did not explode."""
        if self.outcome.outcome == "stable":
            return None
        # The outcome counts steps, and these count from 0.
        return max(0, self.outcome.step - 1) if self.onset is None else self.onset

    @property
    def verdict(self) -> str:
        """``exploded at 5,563``, ``nonfinite at 389``, ``stable to 20,000``, ``stopped at 3,196``; before the end
        ``under way``, or ``not ended`` where no process is known to train the run."""
        if not self.ended:
            return "under way" if self.folder and self.folder.under_way else "not ended"
        if self.failed_at is not None:
            return f"{self.ending} at {self.failed_at:,}"
        return f"{self.ending} {'at' if self.ending == 'stopped' else 'to'} {self.outcome.step:,}"

    def by_head(self, name: str) -> Series | None:
        """Return the steps [n] and values [n_layer, n_head, n] of a metric of heads; None where the run has not
        measured it."""
        series = self.columns.get(name)
        return series if series is not None and series[1].ndim == 3 else None

    def measured_by_head(self, name: str) -> Series:
        """:meth:`by_head` of a metric that is needed.

        Raises:
            UserError: the run has not measured it.
        """
        if (series := self.by_head(name)) is None:
            known = ", ".join(sorted(name for name in self.columns if self.by_head(name))) or "none"
            raise UserError(f"{self.where}: {name} of heads was not measured, or not kept; it has {known}")
        return series

    def check_together(self, *names: str) -> None:
        """Refuse metrics that are measured at once and are not of the same steps, or not of the same heads.

        Raises:
            UserError: so it is, or the run has not measured one of them.
        """
        if missing := [name for name in names if name not in self.columns]:
            raise UserError(f"{self.where}: {missing[0]} was not measured, or not kept; leave the run out")
        steps, values = self.columns[names[0]]
        for name in names[1:]:
            if not np.array_equal(steps, self.columns[name][0]) or self.columns[name][1].shape != values.shape:
                told = f"{names[0]} and {name} are of other steps, or of other heads"
                raise UserError(f"{self.where}: {told}; restore its metrics, or leave the run out")

    def smoothed(self, name: str) -> Smoothed | None:
        """Return the moving average of the finite numbers of a per-step metric; None where the run has none."""
        at, values = self.columns.get(name, (np.empty(0, np.int64), np.empty(0)))
        at, values = at[np.isfinite(values)], values[np.isfinite(values)]
        if not len(at):
            return None
        spacing = max(1, int(np.median(np.diff(at)))) if len(at) > 1 else 1  # a thinned run has not every step
        window = max(1, min(self.config.detector.window // spacing, len(values) // 4))
        averages = np.convolve(values, np.ones(window) / window, mode="valid")
        return Smoothed((at[window - 1 :], averages), window * spacing)

    @cached_property
    def hottest_layer(self) -> int:
        """The layer of :attr:`hottest_head`: in an explosion the one that explodes; 2, the paper's, if not measured, or
        the last of a smaller model."""
        if self.w_q_norms is None:
            return min(2, self.config.model.n_layer) if self.config.model else 2  # a watched loop may not tell
        return self.hottest_head[0]

    @cached_property
    def hottest_head(self) -> tuple[int, int]:
        """Layer and head, from 1, whose norm is the largest of :attr:`hottest_norms`."""
        layer, head = np.unravel_index(self.hottest_norms.argmax(), self.hottest_norms.shape)
        return int(layer) + 1, int(head) + 1

    @cached_property
    def hottest_norms(self) -> NDArray[np.float64]:
        """W_Q norms [n_layer, n_head] where first measured since the onset, or else at the end.

        Not at the end of an explosion: what is broken goes on to grow in other layers, the more the longer the tail.
        Weights that are no numbers have no norm: of a run that turned NaN it is the last measurement before.

        Raises:
            UserError: the run has not measured them, or found no number.
        """
        self.measured_by_head(W_Q_NORM.name)
        if self.w_q_norms is None:
            raise UserError(f"{self.where}: {W_Q_NORM.name} of heads was never a number")
        steps, norms = self.w_q_norms
        end = len(steps) - 1
        return norms[..., end if self.onset is None else min(int(np.searchsorted(steps, self.onset)), end)]

    @cached_property
    def w_q_norms(self) -> Series | None:
        """The spectral norms of W_Q where those of all heads are numbers; None where they never are."""
        steps, norms = self.by_head(W_Q_NORM.name) or (np.empty(0, np.int64), np.empty((0, 0, 0)))
        finite = np.isfinite(norms).all((0, 1))
        return (steps[finite], norms[..., finite]) if finite.any() else None
