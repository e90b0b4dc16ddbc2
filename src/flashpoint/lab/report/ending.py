"""The listener that draws a run when it has ended."""

from __future__ import annotations

import contextlib
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
        """Import the library that draws while the run trains: at its end the user would wait for it."""
        threading.Thread(target=_import, daemon=True).start()

    def logged(self, step: int, metrics: Metrics) -> None:
        """All metrics are read from the run's file at its end."""

    def ended(self, folder: RunFolder, outcome: Outcome) -> None:
        """Draw."""
        draw_curves(folder)
        write_report([Run.of_folder(folder)], folder.report.path)

    def failed(self, folder: RunFolder) -> None:
        """A run without a verdict is not drawn."""


def _import() -> None:
    with contextlib.suppress(Exception):  # drawing fails by it, too, and says so
        import matplotlib.figure  # noqa: F401
