"""Text of others in figures."""

import warnings
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from flashpoint.lab.report.axes import literal, save


def test_a_name_is_drawn_as_it_stands_and_says_nothing_on_stderr(tmp_path: Path) -> None:
    figure = Figure()
    figure.subplots().set_title(literal("名前 \x1b]0;t\x07 $x$"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 0


@pytest.mark.parametrize(("name", "drawn"), [("_a", " _a"), ("$x$", r"\$x\$"), ("\x1b[1m", r"\x1b[1m")])
def test_a_name_is_no_formula_and_no_control_sequence(name: str, drawn: str) -> None:
    assert literal(name) == drawn
