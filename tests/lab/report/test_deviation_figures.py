"""The figures of deviations: what is drawn where, and the data beside them."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from flashpoint.lab.deviation.emulated import Block
from flashpoint.lab.deviation.formats import BF16, FP16, FP32, FP64
from flashpoint.lab.deviation.presets import PRESETS
from flashpoint.lab.deviation.sweep import Measured, Sweep, drawn_inputs, measure
from flashpoint.lab.report.colours import colour
from flashpoint.lab.report.deviation_figures import draw_deviation
from tests.conftest import REPOSITORY
from tests.records import call, refusal

CPU = torch.device("cpu")
PUBLISHED = REPOSITORY / "docs/findings/deviation/deviation.csv"


def measured(sweep: Sweep, *lengths: int) -> list[Measured]:
    return list(measure(sweep, drawn_inputs("normal", lengths, [8], 2, causal=True), CPU))


def test_a_sweep_is_drawn_along_what_it_sweeps_and_formats_stand_in_the_order_of_their_bits() -> None:
    found = measured(Sweep(precisions=(FP32, BF16, FP64, FP16)), 16)
    figures = draw_deviation(found, "somewhere")
    assert list(figures) == ["precision", "precision_golden"]
    panels = figures["precision_golden"].axes
    assert [text.get_text() for text in panels[0].get_xticklabels()] == ["bf16\n7", "fp16\n10", "fp32\n23", "fp64\n52"]
    flash, baseline = panels[0].get_lines()
    assert (flash.get_color(), baseline.get_color()) == (colour("flash"), colour("baseline"))
    expected = {one.precision: one.size.largest for one in found if (one.engine, one.other) == ("flash", "golden")}
    assert list(flash.get_ydata()) == [expected[precision] for precision in (BF16, FP16, FP32, FP64)]
    assert np.isnan(baseline.get_ydata()[-1])  # is the golden value


def test_what_no_tile_changes_is_a_level_and_lengths_are_a_logarithmic_axis() -> None:
    sweep = Sweep(precisions=(BF16,), blocks=(Block(4, 4), Block(8, 8)))
    found = measured(sweep, 8, 16)
    figures = draw_deviation(found, "somewhere")
    assert list(figures) == ["length", "block"]
    assert figures["length"].axes[0].get_xscale() == "log"
    levels = [line for line in figures["block"].axes[0].get_lines() if len(set(line.get_ydata())) == 1]
    heights = {one.size.largest for one in found if (one.engine, one.other) == ("baseline", "golden")}
    assert heights <= {line.get_ydata()[0] for line in levels}


def test_a_tile_that_is_cut_to_the_length_is_no_sweep_of_tiles() -> None:
    for engines in (("flash", "baseline"), ("flash",)):
        found = measured(Sweep(engines=engines, precisions=(BF16,)), 8, 16)
        assert list(draw_deviation(found, "somewhere")) == ["length"]


def test_without_a_sweep_engines_stand_side_by_side() -> None:
    (key,) = figures = draw_deviation(measured(Sweep(precisions=(BF16,)), 8), "somewhere")
    assert key == "engine"
    assert [text.get_text() for text in figures[key].axes[0].get_xticklabels()] == ["flash", "baseline"]


@pytest.mark.slow
def test_the_command_writes_figures_and_their_data(tmp_path: Path) -> None:
    small = ("--length", "8,16", "--head-size", "8", "--seeds", "2", "--of", "O,dQ", "--device", "cpu")
    result = call("deviation", *small, "--figures", tmp_path / "out")
    assert f"figures: {tmp_path / 'out/length.png'}" in result.stderr
    assert (tmp_path / "out/length.png").stat().st_size > 10_000
    with (tmp_path / "out/deviation.csv").open() as file:
        rows = list(csv.DictReader(file))
    stored = pq.read_table(tmp_path / "out/deviation.parquet").to_pylist()
    assert len(rows) == len(stored) == 2 * 3 * 2
    for row, other in zip(rows, stored, strict=True):
        assert row == {key: "" if value is None else str(value) for key, value in other.items()}


@pytest.mark.slow
def test_the_published_figures_are_what_the_preset_gives() -> None:
    """One tile of it. A libm that rounds exp otherwise may move a few of the values by an ulp."""
    part = next(part for part in PRESETS["cpu"] if part.name == "block")
    block = Block(64, 64)
    assert block in part.sweep.blocks
    with PUBLISHED.open() as file:
        published = {
            (row["engine"], row["other"]): row
            for row in csv.DictReader(file)
            if (row["part"], row["sums"]) == (part.name, "within") and row["B_r"] + row["B_c"] in ("6464", "")
        }
    found = list(measure(dataclasses.replace(part.sweep, sums=("within",), blocks=(block,)), part.given(), CPU))
    assert {(one.engine, one.other) for one in found} == published.keys()
    for one in found:
        row = published[one.engine, one.other]
        assert one.size.rms == pytest.approx(float(row["rms"]), rel=0.02)
        assert one.size.mean == pytest.approx(float(row["mean"]), rel=0.02)


def test_a_preset_takes_no_sweep_of_its_own() -> None:
    assert "--preset cpu: takes no --precision and no --length" in refusal(
        call("deviation", "--preset", "cpu", "--length", "8", "--precision", "bf16")
    )
    assert "--preset cpu: takes no ENGINE" in refusal(call("deviation", "flash", "--preset", "cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_the_preset_of_a_gpu_needs_one() -> None:
    assert refusal(call("deviation", "--preset", "gpu")) == (
        "error: --preset gpu: no CUDA device is visible; use --preset cpu"
    )
