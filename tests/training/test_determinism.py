"""Which code made a run, and on what."""

import hashlib
from pathlib import Path

import pytest

from flashpoint.training.determinism import environment_difference, source_digest


def test_the_source_is_all_python_files_and_their_places(tmp_path: Path) -> None:
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    (package / "inside").mkdir(parents=True)
    elsewhere.mkdir()
    (package / "b.py").write_bytes(b"xy")
    (package / "inside/a.py").write_bytes(b"")
    (elsewhere / "k.py").write_bytes(b"z")
    (package / "linked").symlink_to(elsewhere)  # as src/flashpoint/kernels is in a checkout
    (package / "b.pyc").write_bytes(b"no source")
    by_hand = b"b.py\x002\x00xy" + b"inside/a.py\x000\x00" + b"linked/k.py\x001\x00z"
    assert source_digest(package) == hashlib.sha256(by_hand).hexdigest()


@pytest.mark.parametrize(
    ("recorded", "here", "told"),
    [
        ("ScaledDotProductFlashAttention", "ScaledDotProductFlashAttention", None),
        ("ScaledDotProductFlashAttention", "math", "sdpa ScaledDotProductFlashAttention → math"),
        ("ScaledDotProductFlashAttention", None, None),  # a replay with another attention
        (None, "math", None),
    ],
)
def test_another_production_kernel_is_told(recorded: str | None, here: str | None, told: str | None) -> None:
    same = {"torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0", "hardware": "NVIDIA H200", "tiles": {}}
    line = environment_difference({**same, "sdpa": recorded}, {**same, "sdpa": here})
    whole = f"not the tape's environment ({told}): same batches and initial weights, other bits"
    assert line == (whole if told else None)


def test_a_run_recorded_before_the_production_kernel_was_is_compared_in_the_rest() -> None:
    old = {"torch": "2.11.0", "cuda": None, "triton": None, "hardware": "CPU, 2 threads", "tiles": None}
    assert environment_difference(old, {**old, "sdpa": "math"}) is None
    line = environment_difference(old, {**old, "torch": "2.12.0", "sdpa": "math"})
    assert line == "not the tape's environment (torch 2.11.0 → 2.12.0): same batches and initial weights, other bits"
