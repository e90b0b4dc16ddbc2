"""Numbers that the configuration takes, however extreme, train the tiny model to a verdict."""

from pathlib import Path

import pytest

from tests.conftest import Command
from tests.verdicts import outcome_of

EXTREMES = {
    "optimiser": ("train.lr=1e30", "train.eps=1e-37", "train.weight_decay=1e38", "train.grad_clip=1e38"),
    "small": ("train.lr=1e-37", "train.eps=1e38", "train.grad_clip=1e-37", "train.beta1=0", "train.beta2=0"),
    "muon": (
        "optimizer=muon", "optimizer.momentum=0", "optimizer.eps=1", "train.lr=1e30", "train.weight_decay=1e38",
        "train.z_loss=1e38",
    ),
    "attention": (
        "attn=flash_fixed_paper", "attn.exact_row_sum=true", "attn.beta=1e38", "attn.tie_tolerance=1e38",
        "attn.block_k=9223372036854775807",
    ),
    "counts": (
        "probes.sequences=9223372036854775807", "train.warmup_steps=9223372036854775807", "detector.window=1000000",
        "detector.hold_steps=9223372036854775807", "train.eval_sequences=9223372036854775807",
        "checkpoints.interval=9223372036854775807", "model.init_ulps=1073741824", "seed=4294967295",
        "train.eval_interval=9223372036854775807", "data.max_bytes=9223372036854775807",
        "attn.delta_error.interval=9223372036854775807", "checkpoints.budget_gib=1e38",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_number_ends_in_a_verdict(train: Command, tmp_path: Path, name: str) -> None:
    result = train(*EXTREMES[name], "train.steps=4")
    assert "Traceback" not in result.stderr
    assert outcome_of(result)[1] in ("stable", "nonfinite")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "data"}
