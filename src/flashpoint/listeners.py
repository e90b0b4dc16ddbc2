"""Who is told of a run while it trains: W&B, drawings, or whatever a caller registers."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import notify
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.outcome import Outcome

Metrics = Mapping[str, float | NDArray[np.floating]]
"""Metrics by name: a number, or an array [n_layer, n_head]."""


class Listener(Protocol):
    """Hears of one run, in the process that keeps its files. What it raises is told in one line; the run goes on."""

    name: str
    """What it does, in the user's words: it stands in that line."""

    def begun(self, folder: RunFolder, first_step: int) -> None:
        """The folder has its configuration and manifest; training begins at ``first_step``, from 0."""

    def logged(self, step: int, metrics: Metrics) -> None:
        """Metrics of a step were written to the metrics file."""

    def ended(self, folder: RunFolder, outcome: Outcome) -> None:
        """All files of the run are written."""

    def failed(self, folder: RunFolder) -> None:
        """An error ends the run in place of :meth:`ended`; its files so far are closed, and there is no verdict."""


class Listeners:
    """Several as one. One that fails is told of once and hears nothing more."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = list(listeners)

    def begun(self, folder: RunFolder, first_step: int) -> None:
        self._each(lambda listener: listener.begun(folder, first_step))

    def logged(self, step: int, metrics: Metrics) -> None:
        self._each(lambda listener: listener.logged(step, metrics))

    def ended(self, folder: RunFolder, outcome: Outcome) -> None:
        self._each(lambda listener: listener.ended(folder, outcome))

    @contextlib.contextmanager
    def listening(self, folder: RunFolder, first_step: int) -> Iterator[None]:
        """Tell them that the run begins, and if the block fails that it did."""
        self.begun(folder, first_step)
        try:
            yield
        except Exception:
            self._each(lambda listener: listener.failed(folder))
            raise

    def _each(self, tell: Callable[[Listener], None]) -> None:
        for listener in tuple(self._listeners):
            try:
                tell(listener)
            except Exception as error:  # whatever a listener does, the run is not to end by it
                self._listeners.remove(listener)
                reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
                notify(f"{listener.name} is off for this run ({reason}); the run's files have everything")
