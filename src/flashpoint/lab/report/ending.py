"""The listener that draws a run when it has ended."""

from __future__ import annotations

import contextlib
import io
import sys
import threading

from flashpoint.lab.report.curves import draw_curves
from flashpoint.lab.report.page import write_report
from flashpoint.listeners import Metrics
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.outcome import Outcome
from flashpoint.runs.run import Run


class EndOfRunDrawing:
    """Writes ``curves.png``, and the page with every figure under ``report/``."""

    name = "drawing"

    def begun(self, folder: RunFolder, first_step: int) -> None:
        """Make the library that draws ready while the run trains: at its end the user would wait for it."""
        self._ready = threading.Thread(target=_make_ready, daemon=True)
        self._ready.start()

    def logged(self, step: int, metrics: Metrics) -> None:
        """All metrics are read from the run's file at its end."""

    def ended(self, folder: RunFolder, outcome: Outcome) -> None:
        """Draw."""
        self._ready.join()  # one thread at a time: the library says of itself that it is not made for two
        draw_curves(folder)
        write_report([Run.of_folder(folder)], folder.report.path)

    def failed(self, folder: RunFolder) -> None:
        """A run without a verdict is not drawn."""


def _make_ready() -> None:
    """Draw the first figure, which reads fonts and makes a parser of "$10^1$" for all that follow."""
    if "matplotlib.figure" in sys.modules:  # by the run before this one
        return
    with contextlib.suppress(Exception):  # drawing fails by it, too, and says so
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1, 1))
        figure.subplots().semilogy([1, 10])
        figure.savefig(io.BytesIO())
