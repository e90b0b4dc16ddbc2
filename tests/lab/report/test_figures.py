"""The figures of made-up runs, measured as Matplotlib lays them out: curves, axes, panels and names."""

import math
import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashpoint.cli.run_words import open_run
from flashpoint.lab.report.colours import colour
from flashpoint.lab.report.figures import draw_bias, draw_heads, draw_heat_map, draw_losses, draw_metrics, thinned
from flashpoint.lab.report.panel_grid import ABREAST, PanelGrid, Plot
from flashpoint.lab.report.panels import PANELS
from flashpoint.runs.metric_table import SCORE_MEAN, TIE_MULTIPLICITY, TIED_ROWS
from flashpoint.runs.run import Run
from tests.lab.report.made_up import record
from tests.records import write_run


def test_the_runs_of_a_figure_have_the_same_steps_below_one_another(tmp_path: Path) -> None:
    whole, late = (record(tmp_path, name).folder for name in ("whole", "late"))
    lines = late.metrics.read_text().splitlines(keepends=True)
    late.metrics.write_text("".join(lines[len(lines) // 2 :]))
    runs = [Run.of_folder(folder) for folder in (whole, late)]
    for draw in (draw_heads, draw_bias, draw_heat_map, partial(draw_metrics, metrics=[TIED_ROWS])):
        grid = draw(runs)
        assert grid is not None
        artists = [artist for artist in grid.figure.artists if artist.get_clip_box()]
        boxes = {artist.get_clip_box().bounds for artist in artists}
        places = {
            (artist.get_transform().transform((step, 1))[0] - artist.get_clip_box().x0, step)
            for artist in artists
            for step in (0, 399)
        }
        assert (len(boxes), len({(round(at, 6), step) for at, step in places})) == (2, 2)


@pytest.mark.parametrize("rows", [1, 2])
def test_runs_that_have_no_room_side_by_side_go_on_below(tmp_path: Path, rows: int) -> None:
    runs = [record(tmp_path, f"run-{number}", onset=number or None) for number in range(ABREAST + 2)]
    grid = draw_heads(runs) if rows == 1 else draw_metrics(runs, [TIED_ROWS, TIE_MULTIPLICITY])
    assert grid is not None
    grid.figure.canvas.draw()
    plots = [plot for row in grid.rows for plot in row.plots]
    boxes = [_box(plot) for plot in plots]
    assert len({round(box.x0) for box in boxes}) == ABREAST
    assert len({round(box.y0) for box in boxes}) == 2 * rows
    assert all(box.height > 1.2 * grid.figure.dpi for box in boxes)
    from_above = sorted(plots, key=lambda plot: (-round(_box(plot).y0), _box(plot).x0))
    assert [mark for mark, _ in from_above[rows * ABREAST].marks] == [ABREAST]
    assert len({row.limits for row in grid.rows}) == 1  # both metrics have the same values


@pytest.mark.slow
@pytest.mark.parametrize("draw", [draw_heads, draw_bias, partial(draw_metrics, metrics=[TIED_ROWS, TIE_MULTIPLICITY])])
def test_all_panels_of_a_row_have_one_axis_and_room_for_their_curves(
    tmp_path: Path, draw: Callable[[list[Run]], PanelGrid | None]
) -> None:
    runs = [record(tmp_path, f"run-{number}") for number in range(4)]
    for run in runs:  # the second row has another axis than the first
        run.folder.metrics.write_text(run.folder.metrics.read_text().replace('multiplicity": ', 'multiplicity": 1'))
    lines = runs[3].folder.metrics.read_text().replace('"step": 399', '"step": 999').replace(": 8.9", ": 8999.0")
    runs[3].folder.metrics.write_text(lines)
    grid = draw([Run.of_folder(run.folder) for run in runs])
    assert grid is not None
    grid.figure.draw_without_rendering()
    numbers = [
        (of, text.get_window_extent()) for text in grid.figure.texts if (of := _read(text.get_text())) is not None
    ]
    for row in grid.rows:
        for number, plot in enumerate(row.plots):
            box = _box(plot)
            drawn = np.concatenate([curve.get_transform().transform(curve.get_xydata()) for curve in plot.curves])
            assert ((box.min <= drawn) & (drawn <= box.max)).all()
            beside = [
                (of, at) for of, at in numbers if box.x0 - 70 < at.x1 < box.x0 and box.y0 - 5 < at.y1 < box.y1 + 9
            ]
            assert (len(beside) > 1) == (number % 2 == 0)  # the first at the left
            for of, at in beside:
                assert (at.y0 + at.y1) / 2 == pytest.approx(_place(plot, 0, of)[1], abs=2)
            below = [(of, at) for of, at in numbers if box.y0 - 30 < at.y0 < box.y0 and box.x0 < at.x1 < box.x1 + 20]
            assert (len(below) > 1) == (row is grid.rows[-1])
            for of, at in below:
                assert (at.x0 + at.x1) / 2 == pytest.approx(_place(plot, of, 1.0)[0], abs=2)


def _place(plot: Plot, step: float, value: float) -> Any:
    """Where a value stands in the picture."""
    return plot.curves[0].get_transform().transform((step, value))


def _box(plot: Plot) -> Any:
    """The four sides of a panel in the picture."""
    return plot.curves[0].get_clip_box()


def _read(text: str) -> float | None:
    """Which number a text at an axis is; None of another text."""
    found = re.fullmatch(r"(−?)([\d.]+)(?: × 10|(?<=10))?([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]*)", text)
    if not found:
        return None
    sign, factor, power = found.groups()
    exponent = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    number = float(factor) if not power else 10.0 ** int(exponent) * (float(factor) if "×" in text else 1)
    return -number if sign else number


def test_a_sweep_that_was_kept_without_its_losses_is_drawn(tmp_path: Path) -> None:
    metrics = [{"step": step, "grad_norm": 1.0 + step} for step in range(3)]
    runs = [open_run(write_run(tmp_path / str(seed), {"name": "a"}, seed=seed, metrics=metrics)) for seed in range(5)]
    assert [len(row.plots[0].curves) for row in draw_losses(runs).rows] == [0, 5]


def test_the_names_of_a_sweep_leave_its_curves_their_room(tmp_path: Path) -> None:
    grid = draw_losses([record(tmp_path, f"run-{number}", attention="flash_bf16") for number in range(16)])
    for row in grid.rows:
        assert _box(row.plots[0]).height > 2 * grid.figure.dpi


def test_the_loss_is_drawn_as_the_detector_averages_it(tmp_path: Path) -> None:
    losses = [(step * 7) % 11 / 10 for step in range(400)]
    metrics = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    for window in (50, 100):
        path = write_run(tmp_path / str(window), {"name": "a"}, detector={"window": window}, metrics=metrics)
        (plot,) = draw_losses([open_run(path)]).rows[0].plots
        steps, drawn = plot.curves[0].get_data()
        assert list(steps) == list(range(window - 1, 400))
        np.testing.assert_allclose(drawn, [sum(losses[at + 1 - window : at + 1]) / window for at in steps])


@pytest.mark.parametrize("count", [1, 3200, 3201, 20_001, 20_800])
def test_a_long_curve_keeps_its_ends_and_all_that_a_pixel_shows(count: int) -> None:
    random = np.random.default_rng(count)
    steps, values = 3 * np.arange(count), random.standard_normal(count)
    values[random.random(count) < 0.1] = np.nan
    values[count // 3 : count // 2] = np.nan
    kept_steps, kept = thinned((steps, values))
    assert len(kept) <= 4 * 800 + 1
    assert (kept_steps[0], kept_steps[-1]) == (steps[0], steps[-1])
    assert (np.diff(kept_steps) > 0).all()
    np.testing.assert_array_equal(kept, values[kept_steps // 3])
    edges = np.linspace(0, 3 * count, 401)  # wider than two parts: each holds one whole
    for low, high in pairwise(edges):
        inside, shown = values[(low <= steps) & (steps < high)], kept[(low <= kept_steps) & (kept_steps < high)]
        if np.isfinite(inside).any():
            assert np.isfinite(shown).any()
    assert (np.nanmin(kept), np.nanmax(kept)) == (np.nanmin(values), np.nanmax(values)) or count == 1
    assert not np.isfinite(kept[(steps[count // 3] < kept_steps) & (kept_steps < steps[count // 2])]).any()


def test_what_is_of_no_row_is_not_drawn(tmp_path: Path) -> None:
    shares, of_them = [0.0, 0.5, 0.0, 0.25], [0.0, 2.0, 0.0, 3.0]
    metrics = [
        {"step": step, "w_q_spectral_norm": [[1.0]], "tied_rows": [[share]], "tie_multiplicity": [[count]]}
        for step, (share, count) in enumerate(zip(shares, of_them, strict=True))
    ]
    run = open_run(write_run(tmp_path / "run", {"name": "a"}, metrics=metrics))
    (ties,) = [panel for panel in PANELS if panel.key == "ties"]
    grid = ties.draw([run])
    assert grid is not None
    (first,), (second,) = (row.plots[0].curves for row in grid.rows)
    np.testing.assert_array_equal(first.get_ydata(), shares)
    np.testing.assert_array_equal(second.get_ydata(), [math.nan, 2.0, math.nan, 3.0])
    assert second.get_marker() == "."  # a line alone would not show them


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["_mine", "a$^$", "$x$ and $y"])
def test_a_name_is_drawn_as_it_stands(tmp_path: Path, name: str) -> None:
    """Matplotlib takes dollars for formulas, and an underscore for a curve without a name."""
    figure = draw_losses([record(tmp_path, "run", attention=name)]).figure
    figure.draw_without_rendering()
    (legend,) = figure.legends
    (text,) = legend.get_texts()
    drawn, is_formula = text._preprocess_math(text.get_text())  # type: ignore[attr-defined]
    assert (drawn.strip().startswith(name), is_formula) == (True, False)


def test_a_long_legend_is_not_cut_off(tmp_path: Path) -> None:
    long = "flash_bf16_of_some_forty_letters_on_one_line"
    figure = draw_losses([record(tmp_path, f"seed-{seed}", attention=long) for seed in range(5)]).figure
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert figure.bbox.x0 <= legend.get_window_extent().x0
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_of_many_heads_those_with_the_largest_weights_are_named(tmp_path: Path) -> None:
    norms = [3.0, 9.0, 1.0, 8.0, 2.0, 7.0, 0.5, 6.0, 0.4, 0.3]
    values = {f"layer/1/head/{head}/w_q_spectral_norm": norm for head, norm in enumerate(norms, 1)}
    metrics = [{"step": step, **values} for step in (1, 2)]
    grid = draw_heads([open_run(write_run(tmp_path / "wide", {"name": "sdpa"}, metrics=metrics))])
    assert grid is not None
    (plot,) = grid.rows[0].plots
    named = {line.get_label(): line.get_color() for line in plot.curves if line.get_color() != "0.8"}
    assert list(named) == [f"layer 1, head {head}" for head in (2, 4, 6, 8)]
    assert len(set(named.values())) == 4
    (legend,) = grid.figure.legends
    assert len(legend.get_texts()) == 5
    assert legend.get_texts()[-1].get_text() == "layer 1, other heads"


def test_the_bias_of_a_layer_is_the_sum_over_steps_of_the_mean_over_its_heads(tmp_path: Path) -> None:
    grid = draw_bias([record(tmp_path, "flash_bf16")])
    assert grid is not None
    curves = grid.rows[0].plots[0].curves
    assert len(curves) == 3
    for layer, curve in enumerate(curves, 1):
        # Heads 1 and 2 at steps 19, 39, 59, …: step / 100 (times 5 in layer 2) + 1.5.
        by_step = [step / 100 * (5 if layer == 2 else 1) + 1.5 for step in range(19, 400, 20)]
        np.testing.assert_allclose(curve.get_ydata(), list(accumulate(by_step)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("others", [0.0, 1e-9])
def test_a_layer_of_a_far_larger_bias_leaves_the_others_their_room(tmp_path: Path, others: float) -> None:
    biases = {"one": [1.0, 1e-3, -1e-4, 2e-4, "nan"], "other": [others] * 5}
    runs = []
    for name, of_layers in biases.items():
        metrics = [{"step": step, "row_sum_relative_bias": [[bias] for bias in of_layers]} for step in (19, 39)]
        runs.append(open_run(write_run(tmp_path / name, {"name": "flash_bf16"}, onset=30, metrics=metrics)))
    grid = draw_bias(runs)
    assert grid is not None
    grid.figure.draw_without_rendering()
    plot = grid.rows[0].plots[0]
    low, high = _box(plot).intervaly
    ends = [_place(plot, 39, 2 * bias)[1] for bias in (0, 1.0, 1e-3, -1e-4, 2e-4)]
    assert low < min(ends) < max(ends) < high
    assert min(np.diff(sorted(ends))) > 0.02 * (high - low)


def test_a_curve_that_ends_before_its_run_says_where_and_has_a_cross_there(tmp_path: Path) -> None:
    """A head with a row whose P are all 0 has no δ to compare with, and then the mean of its layer has none either."""
    biases = {19: [[1.0, 3.0], [1.0, 1.0], ["nan", 1.0]], 39: [[1.0, 1.0], [2.0, 4.0], ["nan", 1.0]]}
    biases[59] = [[2.0, 2.0], [1.0, "nan"], ["nan", 1.0]]
    metrics = [{"step": step, "row_sum_relative_bias": of_step} for step, of_step in biases.items()]
    grid = draw_bias([open_run(write_run(tmp_path / "run", {"name": "released_fixed"}, metrics=metrics))])
    assert grid is not None
    whole, short, none = grid.rows[0].plots[0].curves
    np.testing.assert_array_equal(whole.get_ydata(), [2.0, 3.0, 5.0])
    np.testing.assert_array_equal(short.get_ydata(), [1.0, 4.0, math.nan])
    assert [line.get_label() for line in (whole, short, none)] == ["layer 1", "layer 2, to 39", "layer 3, no value"]
    assert (short.get_marker(), short.get_markevery()) == ("x", [1])
    assert whole.get_marker() == none.get_marker() == "None"


def test_the_names_of_twelve_layers_lie_on_no_curve_and_in_the_figure(tmp_path: Path) -> None:
    metrics = [{"step": step, "row_sum_relative_bias": [["nan" if step > 2000 else 1.0]] * 12} for step in (1999, 2999)]
    grid = draw_bias(
        [open_run(write_run(tmp_path / str(run), {"name": f"of {run}"}, metrics=metrics)) for run in range(4)]
    )
    assert grid is not None
    figure = grid.figure
    figure.draw_without_rendering()
    labels = [text.get_window_extent() for text in figure.texts if text.get_text() == "optimiser step"]
    for legend, label in zip(figure.legends, labels, strict=True):
        assert len(legend.get_texts()) == 12
        names = legend.get_window_extent()
        assert names.y1 <= label.y0
        assert figure.bbox.y0 <= names.y0
        assert figure.bbox.x0 <= names.x0
        assert names.x1 <= figure.bbox.x1


def test_a_changed_attention_has_its_colour_unless_the_unchanged_one_is_there(tmp_path: Path) -> None:
    """The first run without a GPU was black."""
    plain, changed = (record(tmp_path, name) for name in ("flash_bf16", "flash_bf16 scores=none"))
    for runs, colours in (
        ([changed], [colour("flash_bf16")]),
        ([plain, changed], [colour("flash_bf16"), "#000000"]),
    ):
        assert [curve.get_color() for curve in draw_losses(runs).rows[0].plots[0].curves] == colours


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw", [draw_losses, draw_heads, partial(draw_metrics, metrics=[TIED_ROWS, TIE_MULTIPLICITY])]
)
@pytest.mark.parametrize("count", [1, 4, 5])
def test_names_lie_on_no_curve(tmp_path: Path, draw: Callable[[list[Run]], PanelGrid | None], count: int) -> None:
    grid = draw([record(tmp_path, f"run-{number}") for number in range(count)])
    assert grid is not None
    figure = grid.figure
    figure.draw_without_rendering()
    (names,) = [legend.get_window_extent() for legend in figure.legends]
    assert all(names.y1 <= text.get_window_extent().y0 for text in figure.texts)
    assert all(names.y1 <= _box(plot).y0 for row in grid.rows for plot in row.plots)
    assert all(figure.bbox.x0 <= text.get_window_extent().x0 for text in figure.texts)
    assert figure.bbox.y0 <= names.y0
    assert names.x1 <= figure.bbox.x1


def test_biases_of_one_size_have_a_linear_axis(tmp_path: Path) -> None:
    grid = draw_bias([record(tmp_path, "flash_bf16")])
    assert grid is not None
    places = [_place(grid.rows[0].plots[0], 0, value)[1] for value in (0, 10, 20)]
    assert np.diff(places, 2) == pytest.approx(0)


@pytest.mark.parametrize("broken", ["nan", "inf"])
def test_the_colours_of_the_heat_map_end_at_the_largest_norm_that_is_a_number(tmp_path: Path, broken: str) -> None:
    metrics = [{"step": step, "w_q_spectral_norm": [[1.0, norm]]} for step, norm in ((49, 20.0), (99, broken))]
    path = write_run(tmp_path / "run", {"name": "flash_bf16"}, onset=60, outcome="nonfinite", metrics=metrics)
    grid = draw_heat_map([open_run(path)])
    assert grid is not None
    cells = grid.rows[0].plots[0].cells
    assert cells is not None
    assert cells.norm.vmax == 20.0


def test_the_curves_of_several_panels_are_named_once(tmp_path: Path) -> None:
    grid = draw_metrics([record(tmp_path, "flash_bf16")], [TIED_ROWS, SCORE_MEAN])
    assert grid is not None
    (legend,) = grid.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["layer 2, head 1", "layer 2, head 2"]
