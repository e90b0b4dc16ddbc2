"""Figures of the runs of :mod:`tests.warm` stay empty and small: a quarter of a run's time, and nobody sees them.

``tests/report/`` draws figures, and looks at them.
"""

import functools

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Axes.draw = lambda *_: None  # type: ignore[method-assign]
Figure.savefig = functools.partialmethod(Figure.savefig, dpi=10)  # type: ignore[assignment]
