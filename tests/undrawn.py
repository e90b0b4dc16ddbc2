"""The runs of :mod:`tests.warm` have no page, and their other figures stay empty and small: half of a run's time, and
nobody sees them.

``tests/report/`` draws figures, and looks at them.
"""

import functools

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashpoint.lab.report import ending

Axes.draw = lambda *_: None  # type: ignore[method-assign]
Figure.savefig = functools.partialmethod(Figure.savefig, dpi=10)  # type: ignore[assignment]
ending.write_report = lambda *_: None  # type: ignore[assignment]
