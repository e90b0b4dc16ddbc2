"""The former place of :class:`flashpoint.runs.run.Run`, until its last importers have the new one."""

from flashpoint.runs.run import Run

__all__ = ["Run"]
