"""The figure is drawn, and is not blank, whatever a run has recorded."""

from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest

from flashpoint.lab.report.curves import draw_curves
from flashpoint.runs.folder import RunFolder
from tests.records import write_run

NORMS = [f"layer/{layer}/head/{head}/w_q_spectral_norm" for layer in range(1, 11) for head in (1, 2)]


def recorded(tmp_path: Path, lines: list[dict], onset_step: int | None = None) -> RunFolder:
    model = {"n_layer": 10, "n_head": 2}
    attn, path = {"name": "drawn"}, tmp_path / "drawn"
    return RunFolder(Path(write_run(path, attn, onset=onset_step, metrics=lines, config={"model": model})))


def pixels(path: Path) -> np.ndarray:
    return matplotlib.image.imread(path)[..., :3]


def steps(count: int) -> list[dict]:
    lines: list[dict] = []
    for step in range(count):
        lines.append({"step": step, "loss": 5 - step / count, "grad_norm": 1 + step % 3})
        if step % 10 == 9:
            lines.append({"step": step, **{name: float(step) for name in NORMS}})
            lines.append({"step": step, "val_loss": 4.5})
    return lines


@pytest.mark.slow
def test_a_whole_run_fills_three_panels(tmp_path: Path) -> None:
    path = draw_curves(recorded(tmp_path, steps(200), onset_step=150))
    image = pixels(path)
    assert image.shape == (1080, 1200, 3)
    for third in np.array_split(image[60:-40, 100:], 3):
        coloured = (np.ptp(third, axis=-1) > 0.3).mean()
        assert coloured > 1e-3  # lines, not only grey axes


@pytest.mark.slow
def test_the_onset_is_drawn_where_it_is(tmp_path: Path) -> None:
    without = pixels(draw_curves(recorded(tmp_path / "a", steps(200))))
    with_onset = pixels(draw_curves(recorded(tmp_path / "b", steps(200), onset_step=150)))
    columns = np.flatnonzero((np.abs(without - with_onset).sum(-1) > 1)[80:-80].sum(0) > 200)
    assert len(columns)
    assert np.ptp(columns) < 4  # one vertical line
    assert columns[0] / image_width(without) == pytest.approx(0.75, abs=0.05)


@pytest.mark.slow
def test_the_layer_that_explodes_stands_out(tmp_path: Path) -> None:
    hot = {"layer/7/head/1/w_q_spectral_norm": 1000.0}
    lines = [{**line, **(hot if NORMS[0] in line else {})} for line in steps(200)]
    image = pixels(draw_curves(recorded(tmp_path, lines, onset_step=150)))[-360:]  # the panel of W_Q
    red = np.abs(image - matplotlib.colors.to_rgb("C3")).max(-1) < 0.02
    rows = np.flatnonzero(red[:, image_width(image) // 2])
    assert len(rows)
    assert rows.max() < 180  # the flat line far above those of the nine other layers


def image_width(image: np.ndarray) -> int:
    return image.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        [],
        steps(1),
        [{"step": 0, "loss": "nan", "grad_norm": "inf"}, {"step": 1, "loss": 2.0, "grad_norm": 0.0}],
        [{"step": 5, "val_loss": "nan"}],
        [{"step": step, "loss": size, "grad_norm": abs(size)} for step, size in enumerate([1e308, -1e308, 5e-324])],
        [line for line in steps(50) if "val_loss" not in line and NORMS[0] not in line],
    ],
    ids=["nothing", "one step", "not finite", "validation only", "extreme", "no norms"],
)
def test_thin_and_broken_records_are_drawn(tmp_path: Path, lines: list[dict]) -> None:
    assert pixels(draw_curves(recorded(tmp_path, lines))).std() > 0.01
