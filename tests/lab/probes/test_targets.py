"""Targets drawn from a prediction: against the distribution they are of, and against Fisher's identity."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch

from flashpoint.errors import UserError
from flashpoint.lab.build_config import build_config
from flashpoint.lab.config import ModelConfig, Targets
from flashpoint.lab.model import GPT
from flashpoint.lab.probes.instrumented import InstrumentedPass
from flashpoint.lab.probes.observation import analysed
from flashpoint.lab.probes.targets import draw, with_unrounded_out
from flashpoint.numerics.choices import STOCHASTIC, UNROUNDED, Rounding
from flashpoint.numerics.variant import AttentionVariant
from tests.composed import CONFIGS, composed_values

CPU = torch.device("cpu")
SHAPE = ModelConfig(n_layer=2, n_head=2, d_model=32, context=16, vocab_size=32)
COARSE = AttentionVariant(name="coarse", out_unnormalized=Rounding("nearest", 2))
N, T = 64, 16


def sensitive(variant: AttentionVariant = COARSE) -> GPT:
    """Weights so large that a rounding error of O costs nats."""
    model = GPT(SHAPE, variant, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(14)
    return model


def test_tokens_are_drawn_as_often_as_predicted() -> None:
    logits = torch.tensor([3.0, 0.0, -1.0, 2.0, -9.0])
    tokens = draw(logits.expand(50, 400, 5), torch.tensor([3, 4]))
    share = np.bincount(tokens.flatten().numpy(), minlength=5) / 20_000
    expected = np.exp(logits.double().numpy()) / np.exp(logits.double().numpy()).sum()
    assert (np.abs(share - expected) <= 4 * np.sqrt(expected / 20_000)).all()
    neighbours = np.corrcoef(tokens[:, 1:].flatten().numpy(), tokens[:, :-1].flatten().numpy())[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(20_000)


def test_a_key_draws_the_same_and_another_key_another() -> None:
    logits = torch.zeros(2, 64, 50)
    first, again, other_step, other_seed = (draw(logits, torch.tensor(key)) for key in ([3, 4], [3, 4], [3, 5], [4, 4]))
    assert torch.equal(first, again)
    for other in (other_step, other_seed):
        assert (first == other).double().mean() < 0.1
    assert (first[0] == first[1]).double().mean() < 0.2


def test_the_unrounded_twin_has_the_same_weights_and_leaves_o_alone() -> None:
    selected = dataclasses.replace(COARSE, layers=(2,), heads=(1,), elsewhere=AttentionVariant(name="flash_fp32"))
    model = sensitive(selected)
    twin = with_unrounded_out(model)
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()]
    shifting = GPT(dataclasses.replace(SHAPE, shift_keys="running"), COARSE, 0)
    buffers = [[id(buffer) for buffer in one.buffers()] for one in (shifting, with_unrounded_out(shifting))]
    assert buffers[0] == buffers[1] != []
    variants = [block.attention.core.variant for block in twin.blocks]
    for variant in (*variants, variants[0].elsewhere):
        assert (variant.out_unnormalized, variant.out) == (UNROUNDED, UNROUNDED)
    assert variants[0].layers == (2,)
    assert model.blocks[0].attention.core.variant == selected
    independent = AttentionVariant(out_unnormalized=STOCHASTIC, delta="out_independent")
    assert with_unrounded_out(sensitive(independent)).blocks[0].attention.core.variant.delta == "out"
    split = AttentionVariant(delta="out_fp32", out_residual_bits=3)
    assert with_unrounded_out(sensitive(split)).blocks[0].attention.core.variant.out_residual_bits is None
    production = AttentionVariant(name="sdpa", kernel="sdpa")
    corrected = AttentionVariant(name="flex_fixed", kernel="flex", delta="out_fp32", out_residual_bits=6)
    assert analysed(corrected, "bf16") == AttentionVariant(name="flex_fixed", delta="out_fp32", out_residual_bits=6)
    assert with_unrounded_out(sensitive(production)).blocks[0].attention.core.variant.out == UNROUNDED


def test_the_unrounded_twins_projection_takes_o_with_all_its_bits() -> None:
    """Autocast would round it to BF16; the oracle multiplies in FP64."""
    twin = with_unrounded_out(sensitive())
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    projection = twin.blocks[1].attention.projection
    projection.register_forward_hook(lambda _, taken, made: seen.append((taken[0].double().numpy(), made)))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        twin.logits(torch.arange(T).repeat(4, 1), torch.tensor([0, 0]))
    ((out, made),) = seen
    assert made.dtype == torch.bfloat16
    weight = projection.weight.detach().numpy().astype(ml_dtypes.bfloat16).astype(float)
    rounded_out = out.astype(ml_dtypes.bfloat16).astype(float)
    agree, rounded_agree = (
        (made.float().numpy() == (o @ weight.T).astype(ml_dtypes.bfloat16).astype(float)).mean()
        for o in (out, rounded_out)
    )
    assert agree > 0.99  # FP32 sums may fall on the other side of a tie
    assert rounded_agree < 0.9


def test_in_fp32_the_unrounded_twin_rounds_nothing() -> None:
    """Its logits are those of the model with the attention in FP64 in its place."""
    model = sensitive(AttentionVariant(name="sdpa", kernel="sdpa"))
    tokens, key = torch.arange(T).repeat(4, 1), torch.tensor([0, 0])
    with torch.no_grad():
        found = with_unrounded_out(model, "fp32").logits(tokens, key)
        expected = model.double().logits(tokens, key)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize(("targets", "expected"), [("model", 0.0), ("unrounded", 1.0)])
def test_in_nats_the_bias_of_delta_is_its_variance_where_the_targets_do_not_know_of_the_error(
    targets: Targets, expected: float
) -> None:
    """Fisher's identity; 0 where they do. Of the random tokens that the model sees neither would hold."""
    N = 384
    observe = InstrumentedPass(sensitive(), torch.zeros(N, T + 1, dtype=torch.int64), N, CPU, targets)
    generator = torch.Generator().manual_seed(0)
    means, squares = [], []
    for step in range(20):
        seen = observe(torch.randint(0, 32, (N, T + 1), generator=generator), torch.tensor([0, step]))
        error = (seen.delta - seen.delta_fp32).double() * N * T
        means.append(error.mean((1, 2, 3)))
        squares.append(error.square().mean((1, 2, 3)))
    ratios = torch.stack(means) / torch.stack(squares).mean(0)
    standard_error = ratios.std(0) / len(ratios) ** 0.5
    assert (standard_error < 0.1).all()
    assert ((ratios.mean(0) - expected).abs() < 3 * standard_error).all()


def test_the_datas_targets_are_the_default() -> None:
    sequences = torch.randint(0, 32, (N, T + 1), generator=torch.Generator().manual_seed(0))
    model = sensitive()
    seen = InstrumentedPass(model, sequences, N, CPU)(sequences, torch.tensor([0, 0]))
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(sequences[:, :-1], sequences[:, 1:], torch.tensor([0, 0]))
    (gradient,) = torch.autograd.grad(loss, [model.blocks[1].attention.projection.weight])
    flat = seen.grad_out[1].transpose(1, 2).flatten(2)  # [N, T, C]
    out = seen.out[1].transpose(1, 2).flatten(2).float()
    # dW of the projection is of what follows it: compare what both agree on, dO·O = ⟨W, dW⟩.
    weight = model.blocks[1].attention.projection.weight
    assert (flat * out).sum().item() == pytest.approx((weight * gradient).sum().item(), rel=0.05)


def test_other_targets_are_refused() -> None:
    with pytest.raises(UserError, match=r"probes\.targets=labels: choose one of data, model, unrounded"):
        build_config(composed_values("probes.targets=labels"), CONFIGS / "attn")
