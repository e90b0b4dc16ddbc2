"""Fingerprints of batches, and how long batches are held."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashpoint.watching.latest_batches import LatestBatches, on_cpu, sums

BITS = (1 << 64) - 1


def by_definition(batch: Any) -> int:
    """Every word plus a constant, times an odd factor of its place; and parts of a batch as digits of a number."""
    if isinstance(batch, np.ndarray):
        batch = torch.from_numpy(batch)
    if isinstance(batch, Tensor):
        flat = batch.flatten()
        words = (flat.float().view(torch.int32) if flat.is_floating_point() else flat).tolist()
        factors = [(2 * place + 1) * 0x5851F42D4C957F2D for place in range(1, len(words) + 1)]
        return sum((word + 0x9E3779B9) * factor for word, factor in zip(words, factors, strict=True)) & BITS
    total = 0
    for part in batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ():
        total = (total * 0x100000001B3 + by_definition(part)) & BITS
    return total


@pytest.mark.parametrize(
    "batch",
    [
        torch.randint(-(1 << 40), 1 << 40, (3, 7), generator=torch.Generator().manual_seed(0)),
        torch.full((5,), -(1 << 63)),
        torch.tensor(7),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([[True, False], [False, True]]).mT,
        torch.arange(255, dtype=torch.uint8),
        torch.tensor([1.5, -0.0, float("nan"), float("inf")]),
        torch.arange(6.0).bfloat16().requires_grad_(),
        np.arange(5),
        torch.arange((1 << 18) + 3),
        [torch.arange(3), torch.arange(3)],
        {"x": torch.arange(3), "text": ["a", "b"], "y": (torch.arange(4.0), [], [torch.tensor(2), 3, torch.tensor(4)])},
        [{"ids": torch.arange(9)}, {"ids": torch.arange(8)}],
    ],
)
def test_a_fingerprint_is_the_documented_number(batch: Any) -> None:
    assert sums(batch).fingerprint() == by_definition(batch)


def nested(*rows: list[float], layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=layout)


@pytest.mark.filterwarnings("ignore")  # PyTorch calls these layouts prototypes
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nested([1.0, 2.0], [3.0]), nested([1.0], [2.0, 3.0])),
        (nested([1.0], [2.0], layout=torch.strided), nested([1.0], [3.0], layout=torch.strided)),
        (torch.tensor([[0.0, 1.0]]).to_sparse(), torch.tensor([[1.0, 0.0]]).to_sparse()),
        (torch.tensor([[0.0, 1.0]]).to_sparse_csr(), torch.tensor([[0.0, 2.0]]).to_sparse_csr()),
        (torch.tensor([[0.0, 1.0]]).to_sparse_csc(), torch.tensor([[1.0, 0.0]]).to_sparse_csc()),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j])),
    ],
    ids=["jagged", "nested", "sparse", "rows", "columns", "complex"],
)
def test_tensors_of_several_parts_have_a_fingerprint_and_are_kept(one: Tensor, other: Tensor, tmp_path: Path) -> None:
    held = LatestBatches(3)
    assert held.add(0, {"x": one}) is not None
    assert held.of(0)[1]
    assert sums(one).fingerprint() != sums(other).fingerprint()
    torch.save(on_cpu(one), tmp_path / "batch.pt")
    torch.load(tmp_path / "batch.pt", weights_only=True)


@pytest.mark.parametrize("batch", [None, 3, "text", [], {"a": "b"}, [[], ()]])
def test_a_batch_without_tensors_is_not_held(batch: Any) -> None:
    assert LatestBatches(3).add(0, batch) is None


def test_batches_are_held_until_they_are_forgotten_or_too_many() -> None:
    held = LatestBatches(4)
    for step in range(6):
        assert held.add(step, torch.tensor(step)) is not None
    assert [held.of(step) for step in (1, 2, 5)] == [(None, True), (torch.tensor(2), True), (torch.tensor(5), True)]
    held.forget(3)
    assert [held.of(step)[0] for step in (3, 4)] == [None, torch.tensor(4)]
