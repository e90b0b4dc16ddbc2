"""A run that turns NaN says where: the layer, head and row, and what underflowed."""

import dataclasses
import html
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashpoint.lab.config import Config, DataConfig, ModelConfig, TrainConfig
from flashpoint.lab.model import GPT
from flashpoint.lab.training.nonfinite import locate
from flashpoint.lab.training.parallel import Ranks
from flashpoint.lab.training.step import OptimizerStep
from flashpoint.numerics.variant import AttentionVariant
from tests.conftest import Command
from tests.records import call
from tests.verdicts import outcome_of

PLACE = re.compile(r"O of layer (\d+), head (\d+), row (\d+) of sequence (\d+) is NaN \((\d+) of (\d+) rows")
MODEL = ModelConfig(n_layer=3, n_head=2, d_model=32, context=16, vocab_size=32)
UNGUARDED = AttentionVariant(name="unguarded", shift="dynamic_max", beta=1e6, tie_tolerance=1e-3, max_shift=None)


def batch(micro_batches: int = 1) -> Tensor:
    return torch.randint(0, 4, (micro_batches, 3, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_the_place_is_the_first_row_that_is_nan(layer: int) -> None:
    variant = dataclasses.replace(UNGUARDED, layers=(layer,), elsewhere=AttentionVariant())
    model, outs = GPT(MODEL, variant, seed=1), []
    model.blocks[layer - 1].attention.projection.register_forward_pre_hook(lambda _, args: outs.append(args[0]))
    said = locate(model, batch(), torch.tensor([0, 0]))
    broken = outs[0].unflatten(-1, (2, 16)).transpose(1, 2).isnan().all(-1)  # [B, H, T]
    sequence, head, row = broken.nonzero()[0].tolist()
    found = PLACE.search(said)
    assert found, said
    assert [int(number) for number in found.groups()] == [
        layer, head + 1, row + 1, sequence + 1, int(broken.sum()), broken.numel()
    ]  # fmt: skip
    assert "ℓ = 0" in said


def test_finite_steps_and_other_causes_are_told_apart() -> None:
    model = GPT(MODEL, AttentionVariant(), seed=1)
    assert locate(model, batch(2), torch.tensor([0, 0])).startswith("no value")
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[0, 0] = torch.nan
    assert "layer 2" in locate(model, batch(), torch.tensor([0, 0]))
    model = GPT(MODEL, AttentionVariant(), seed=1)
    with torch.no_grad():
        model.final_norm.weight[0] = torch.inf
    assert locate(model, batch(), torch.tensor([0, 0])).startswith("the loss")


def test_gradients_are_those_of_a_step_of_several_micro_batches() -> None:
    """They were as large as without, and FP16 overflowed where the step had not."""
    config = Config(
        model=ModelConfig(n_layer=3, n_head=2, d_model=32, context=16, vocab_size=257),
        data=DataConfig(vocab_size=257),
        attn=AttentionVariant(kernel="sdpa"),
        train=TrainConfig(batch_size=24, micro_batch_size=3, precision="fp16"),
    )
    model = GPT(config.model, config.attn, seed=1)
    with torch.no_grad():
        model.final_norm.weight *= 224
    assert locate(model, batch(1), torch.tensor([0, 0]), "fp16").startswith("dO of layer 2")
    said = locate(model, batch(8), torch.tensor([0, 0]), "fp16")
    step = OptimizerStep(model, config, torch.device("cpu"), Ranks())
    step(batch(8), learning_rate=0.0)
    assert step.result.isfinite().all()
    assert said.startswith("no value")


def turned_nan(train: Command, folder: Path, *, interval: int) -> str:
    """What a run says of its place, with checkpoints after each ``interval`` steps."""
    overflowing = ("attn=flash_fixed_paper_unguarded", "attn.beta=3000")
    result = train(*overflowing, f"checkpoints.interval={interval}", "run_name=nan", cwd=folder)
    assert outcome_of(result)[1] == "nonfinite"
    outcome = json.loads((folder / "runs/nan/outcome.json").read_text())
    assert outcome["outcome"] == "nonfinite"
    assert PLACE.search(outcome["nonfinite"])
    assert f"step {outcome['onset_step']:,}: {outcome['nonfinite']}" in result.stderr
    said: str = outcome["nonfinite"]
    return said


@pytest.mark.slow
def test_a_run_that_turns_nan_is_repeated_from_its_beginning(train: Command, tmp_path: Path) -> None:
    turned_nan(train, tmp_path, interval=0)


@pytest.mark.slow
def test_a_run_that_turns_nan_is_repeated_from_a_checkpoint_and_all_tell_of_it(train: Command, tmp_path: Path) -> None:
    said = turned_nan(train, tmp_path, interval=2)
    assert said in call("runs", tmp_path / "runs/nan").stdout
    call("report", tmp_path / "runs/nan")
    assert said in html.unescape((tmp_path / "runs/nan/report/report.html").read_text())
