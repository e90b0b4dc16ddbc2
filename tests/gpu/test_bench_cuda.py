"""``scripts/benchmarks/bench.py`` on a CUDA device: that it measures everything; the times are not judged."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, environment

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def measured(name: str, out: Path, *arguments: str) -> list[dict[str, str]]:
    """The rows of a table that the script writes."""
    env = {variable: value for variable, value in environment().items() if variable != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, str(REPOSITORY / "scripts/benchmarks/bench.py"), *arguments, "--out", str(out)]
    subprocess.run(command, env=env, check=True, timeout=600)
    with (out / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_kernels(tmp_path: Path) -> None:
    """Tensors of the last shape have 16 MiB: once they are freed, the next capture unmaps them."""
    shapes = ("2x2x256x64", "2x2x256x128", "8x8x2048x64")
    rows = measured("kernels", tmp_path, "kernels", "--shape", *shapes, "--seconds", "0.02",
                    "--attention", "flash_bf16")  # fmt: skip
    for shape in (word.replace("x", "×") for word in shapes):
        names = {row["attention"] for row in rows if row["shape"] == shape}
        assert {"sdpa_flash", "sdpa_efficient", "naive_bf16", "flex", "flash_bf16", "flash_fp32 again"} <= names
    assert all(float(row["forward, TFLOP/s median"]) > 0 < float(row["backward, TFLOP/s median"]) for row in rows)


def test_training_and_where_its_time_goes(tmp_path: Path) -> None:
    attentions = ("flash_bf16", "flash_bf16,train.cuda_graph=false")
    arguments = ("training", "--shape", "laptop:4", "--seconds", "0.05", "--profile", "--attention", *attentions)
    assert [row["loop"] for row in measured("training", tmp_path, *arguments)] == [*attentions, "nanogpt"]
    with (tmp_path / "training-profile.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert min(float(row[group]) for group in ("attention", "matrix products", "optimiser")) > 0
    recorded, launched = (float(row["sum"]) for row in rows[:2])
    assert recorded == pytest.approx(launched, rel=0.5)  # a graph's kernels are seen, each of them once


def test_compilation(tmp_path: Path) -> None:
    rows = measured("compile", tmp_path, "compile", "--shape", "laptop:4")
    for row in rows:
        assert min(float(row[phase]) for phase in ("Dynamo", "AOTAutograd", "Inductor", "kernels, meanwhile")) > 0
