"""The runs of :mod:`tests.warm` have no page and no curves, and other figures stay empty and small: nobody sees them,
and they take half of a run's time.

``tests/lab/report/`` draws figures, and looks at them; ``tests/test_interrupted.py`` has a run draw.
"""

import functools

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashpoint.lab.report import ending

Axes.draw = lambda *_: None  # type: ignore[method-assign]
Figure.savefig = functools.partialmethod(Figure.savefig, dpi=10)  # type: ignore[assignment]
ending.draw_curves = lambda folder: folder.figure.touch()  # type: ignore[assignment,return-value]
ending.write_report = lambda *_: None  # type: ignore[assignment]
