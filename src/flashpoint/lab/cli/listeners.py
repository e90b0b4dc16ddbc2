"""The listeners of a run that the command line starts."""

from __future__ import annotations

from flashpoint.lab.surroundings import TrackingConfig
from flashpoint.listeners import Listener


def default_listeners(tracking: TrackingConfig) -> list[Listener]:
    """Return the listeners: drawings first, then W&B, which uploads the drawings."""
    from flashpoint.lab.report.ending import EndOfRunDrawing
    from flashpoint.lab.wandb_tracking.listener import WandbListener

    tracked = tracking.wandb != "disabled"
    return [EndOfRunDrawing(report=tracked), *([WandbListener(tracking)] if tracked else [])]
