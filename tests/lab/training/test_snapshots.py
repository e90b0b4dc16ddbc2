"""Distances between two runs' weights: against SciPy, by hand, and which runs may be compared."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from flashpoint.lab.training.snapshots import distances
from tests.conftest import Command
from tests.records import call, rows
from tests.verdicts import assert_one_line, outcome_of

TWIN = ("attn=standard", "run_name=twin", "checkpoints.weights_interval=5")


def test_distances_by_hand() -> None:
    one = {"a": torch.tensor([[1.0, 2.0], [3.0, 5.0]]), "b": torch.tensor([0.0])}
    other = {"a": torch.tensor([[2.0, 1.0], [3.0, 4.0]]), "b": torch.tensor([6.0])}
    found = distances(one, other)
    assert found["weights_largest/a"] == 1
    assert found["weights_wasserstein/a"] == 0.25  # 1, 2, 3, 5 against 1, 2, 3, 4: the order does not count
    assert found["weights_spread/a"] == pytest.approx(1.25**0.5)
    assert (found["weights_largest/all"], found["weights_spread/b"]) == (6, 0)
    assert found["weights_wasserstein/all"] == 1  # 0, 1, 2, 3, 5 against 1, 2, 3, 4, 6


def test_the_wasserstein_distance_is_scipys() -> None:
    from scipy.stats import wasserstein_distance

    generator = np.random.default_rng(0)
    one, other = generator.normal(size=(7, 31)), 0.3 + 2 * generator.standard_t(3, size=(7, 31))
    found = distances({"w": torch.from_numpy(one)}, {"w": torch.from_numpy(other)})
    assert found["weights_wasserstein/w"] == pytest.approx(wasserstein_distance(one.ravel(), other.ravel()))
    assert found["weights_spread/w"] == pytest.approx(other.std())


def measured(folder: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"] + 1: line for line in lines if "weights_largest/all" in line}


@pytest.mark.slow
def test_a_run_is_measured_against_its_twin(train: Command, tmp_path: Path) -> None:
    """At the twin's snapshots, over the recorded tensors, and printed by what the two differ in."""
    from scipy.stats import wasserstein_distance

    assert outcome_of(train(*TWIN))[1] == "stable"
    assert sorted(path.stem for path in (tmp_path / "runs/twin/weights").iterdir()) == [
        "step-000000005", "step-000000010"
    ]  # fmt: skip
    against = ("attn=standard", "probes.weights_against=twin", "checkpoints.weights_interval=10")
    moved = train(*against, "model.init_ulps=65536", "run_name=moved")
    assert outcome_of(moved)[1] == "stable", moved.stderr
    found = measured(tmp_path / "runs/moved")
    assert list(found) == [5, 10]
    own, others = (
        load_file(tmp_path / f"runs/{name}/weights/step-000000010.safetensors") for name in ("moved", "twin")
    )
    everything = [torch.cat([tensor.flatten() for tensor in weights.values()]).numpy() for weights in (own, others)]
    assert found[10]["weights_largest/all"] == np.abs(np.subtract(*everything, dtype=np.float64)).max()
    assert found[10]["weights_wasserstein/all"] == pytest.approx(wasserstein_distance(*everything))
    tensor = "blocks.0.attention.qkv.weight"
    spread = others[tensor].double().std(correction=0).item()
    assert found[10][f"weights_spread/{tensor}"] == pytest.approx(spread)

    assert outcome_of(train(*against, "train.order_seed=7", "run_name=ordered"))[1] == "stable"
    runs = [tmp_path / "runs/moved", tmp_path / "runs/ordered"]
    told = rows(call("weights", *runs, "--control", "batch order", "--figures", tmp_path / "out"))
    assert told[0].startswith("| 65,536 FP32 ulps in one weight | 1 | ")
    assert told[1].startswith("| batch order | 1 | ")
    assert all((tmp_path / f"out/{name}.png").stat().st_size > 10_000 for name in ("absolute", "relative"))
    stored = pq.read_table(tmp_path / "out/weights.parquet").to_pylist()
    assert [(row["differs_in"], row["seed"], row["step"]) for row in stored][:2] == [
        ("65,536 FP32 ulps in one weight", 0, 5), ("65,536 FP32 ulps in one weight", 0, 10)
    ]  # fmt: skip
    assert stored[1]["largest"] == found[10]["weights_largest/all"]
    assert len((tmp_path / "out/weights.csv").read_text().splitlines()) == 1 + len(stored)

    two = ("model.init_seed=9", "train.order_seed=7")
    assert_one_line(train("probes.weights_against=twin", "attn=standard", *two), "initial weights and batch order")
    assert_one_line(train("probes.weights_against=twin", "attn=standard", "seed=4"), "seed 0 there, 4 here")
    (tmp_path / "other.txt").write_text("another text of which there is enough to train on " * 2000)
    other = ("model.init_ulps=65536", f"data.path={tmp_path / 'other.txt'}")
    assert_one_line(train("probes.weights_against=twin", "attn=standard", *other), "its tape differs in")
    assert_one_line(train("probes.weights_against=twin", "attn=standard", "train.lr=0.5"), "train.lr is 0.002 there")
