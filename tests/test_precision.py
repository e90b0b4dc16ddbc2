"""The precision of a training: FP16 products against FP64, and what FP32 and the loss's scale do to a step."""

from typing import get_args

import numpy as np
import pytest
import torch

from flashpoint.lab.linear import Linear
from flashpoint.lab.precision import Precision, autocast, loss_scale
from tests.conftest import Command
from tests.verdicts import assert_one_line, losses_of, outcome_of

CPU = torch.device("cpu")


def test_an_fp16_layer_rounds_operands_and_result_once() -> None:
    """Small integers over 8: products and their FP32 sums are exact, so that FP64 decides every bit."""
    generator = np.random.default_rng(0)
    x, weight = (generator.integers(-40, 41, size=shape) / 8 for shape in ((5, 96), (7, 96)))
    x[0, 0], weight[0, 0] = 1 + 2**-11, 2049.0  # ties of FP16: to even
    layer = Linear(96, 7)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        with autocast(CPU, "fp16"):
            found = layer(torch.from_numpy(x).float())
    expected = (x.astype(np.float16).astype(np.float64) @ weight.astype(np.float16).astype(np.float64).T).astype(
        np.float16
    )
    assert found.dtype == torch.float16
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("precision", get_args(Precision))
def test_the_scale_of_the_loss_is_a_power_of_two(precision: Precision) -> None:
    mantissa, _ = np.frexp(loss_scale(precision))
    assert mantissa == 0.5


@pytest.mark.slow
def test_precisions_train_alike_but_not_the_same(train: Command, tmp_path) -> None:
    losses = {}
    for precision in ("bf16", "fp16", "fp32"):
        result = train("attn=sdpa", f"train.precision={precision}", f"run_name={precision}", "train.grad_clip=0.5")
        assert outcome_of(result)[1] == "stable"
        losses[precision] = np.array(losses_of(tmp_path / "runs" / precision))
    for precision in ("bf16", "fp16"):
        apart = np.abs(losses[precision] - losses["fp32"])
        assert 0 < apart.max() < 0.02
    assert np.abs(losses["fp16"] - losses["fp32"]).max() < np.abs(losses["bf16"] - losses["fp32"]).max()


@pytest.mark.slow
def test_what_rounds_to_bf16_takes_no_other_precision(train: Command) -> None:
    assert_one_line(train("attn=flash_bf16", "train.precision=fp32"), "attn=flash_bf16", "choose attn=sdpa")
    assert_one_line(train("attn=sdpa", "train.precision=tf32"), "needs a CUDA device")
