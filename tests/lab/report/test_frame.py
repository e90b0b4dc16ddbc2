"""Numbers below a panel, measured as Matplotlib draws them."""

from itertools import pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flashpoint.lab.report.frame import Frame, Lines, bare_axes


@pytest.mark.parametrize("width", [1.0, 2.4, 3.2, 6.0])
@pytest.mark.parametrize("last", [40, 17_120, 600_000])
def test_no_number_touches_the_next(width: float, last: int) -> None:
    axes = bare_axes(width, 2.0)
    axes.set_xlim(0, last)
    figure = Figure(figsize=(width + 1, 3))
    canvas = FigureCanvasAgg(figure)
    Frame.of(axes, width, 2.0).draw(figure, Lines(), 0.5, 0.5, below=True, beside=False, boxed=False)
    below = [text.get_window_extent(canvas.get_renderer()) for text in figure.texts if text.get_text().isdigit()]
    assert below
    assert all(one.x1 < other.x0 for one, other in pairwise(sorted(below, key=lambda box: box.x0)))
