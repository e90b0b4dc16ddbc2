"""Probes on tensors whose answer is known by hand, and the paper's identity on a captured batch."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashpoint.lab.config import ModelConfig
from flashpoint.lab.model import GPT
from flashpoint.lab.precision import Precision
from flashpoint.lab.probes import attention as probes
from flashpoint.lab.probes import out_error
from flashpoint.lab.probes.instrumented import InstrumentedPass
from flashpoint.lab.probes.observation import Observation
from flashpoint.numerics import reference
from flashpoint.numerics.choices import NEAREST, STOCHASTIC, UNROUNDED, DeltaError
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant

BF16 = AttentionVariant(name="flash_bf16", scores=NEAREST, out_unnormalized=NEAREST)
SDPA = AttentionVariant(name="sdpa", kernel="sdpa")
T, D, C = 4, 16, 3


def observation(variant: AttentionVariant = BF16, **given: Tensor) -> Observation:
    """One layer, one sequence, one head; only zeros where nothing is given. Zero queries attend evenly."""
    zeros = torch.zeros(1, 1, T, D)
    fields: dict[str, Any] = {
        "x": torch.zeros(1, T, C), "q": zeros, "k": zeros, "v": zeros, "out": zeros, "grad_out": zeros, "grad_q": zeros,
        "w_q": torch.zeros(1, D, C), "update": torch.zeros(1, D, C),
    }  # fmt: skip
    fields = {name: value[None] for name, value in {**fields, **given}.items()}
    return Observation(variant=variant, seed_and_step=torch.zeros(2, dtype=torch.int64), **fields)


def values(probe: probes.Probe, seen: Observation) -> dict[str, float]:
    return {name: value.item() for name, value in probe.measure(seen).items()}


def test_delta_error_of_a_known_error_of_o() -> None:
    v = torch.full((1, 1, T, D), 2.0)  # so O is 2 in FP32, whatever is attended to
    error = torch.tensor([0.5, -0.25, 0.0, 1.0])[None, None, :, None].expand(1, 1, T, D)
    grad_out = torch.full((1, 1, T, D), 0.125)
    seen = observation(v=v, out=v + error, grad_out=grad_out)
    per_token = 0.125 * D * np.array([0.5, -0.25, 0.0, 1.0])  # Σ_d dO·(O_lp − O_hp)
    probe = probes.DeltaError()
    found = values(probe, seen)
    assert found["delta_error_sum"] == pytest.approx(per_token.sum())
    assert found["delta_error_variance"] == pytest.approx(per_token.var(ddof=1))
    bound = 0.125 * D * (2 + np.array([0.5, -0.25, 0.0, 1.0]))  # |dO||O|: all features alike
    assert found["delta_error_relative_bias"] == pytest.approx(per_token.sum() / bound.sum())
    assert found["delta_error_relative_noise"] == pytest.approx(np.sqrt((per_token**2).sum() / (bound**2).sum()))
    for name in ("bias", "noise"):  # nothing is rounded in P̄, which is 1: both δ to compare with are the same
        assert found[f"row_sum_relative_{name}"] == pytest.approx(found[f"delta_error_relative_{name}"])
    assert found["delta_abs_mean"] == pytest.approx(0.125 * 2 * D)
    assert found["row_sum_mean"] == pytest.approx(-per_token.mean())  # Σ_j P(dP − δ) = rowsum(dO∘O_hp) − δ
    assert found["row_sum_abs_mean"] == pytest.approx(np.abs(per_token).mean())
    assert found["grad_out_error_sign_agreement"] == pytest.approx((1 - 1 + 1) / 3)
    again = values(probe, seen)
    assert again["delta_error_cumulative"] == pytest.approx(2 * per_token.sum())
    resumed = probes.DeltaError()
    resumed.load_state(probe.state())
    assert values(resumed, seen)["delta_error_cumulative"] == pytest.approx(3 * per_token.sum())


def test_the_rounding_of_p_leaves_a_row_sum_where_o_is_exact() -> None:
    q, k, v, out, grad_out = (torch.zeros(1, 1, T, D) for _ in range(5))
    q[0, 0, 1, 0], k[0, 0, 1, 0] = -0.5, 1.0  # row 1 scores 0 and −1/8
    rounded, exact = 226 / 256, math.exp(-1 / 8)  # P̄ of the second key; 225.9 / 256 to nearest
    v[0, 0, 1], grad_out[0, 0, 1], out[0, 0, 1] = 1.0, 1.0, rounded / (1 + exact)
    found = values(probes.DeltaError(), observation(q=q, k=k, v=v, out=out, grad_out=grad_out))
    assert found["delta_error_relative_noise"] < 1e-7
    assert found["row_sum_relative_bias"] == pytest.approx((rounded - exact) / rounded, rel=1e-3)
    assert found["row_sum_relative_noise"] == pytest.approx((rounded - exact) / rounded, rel=1e-3)


@pytest.mark.parametrize(
    ("choice", "error"),
    [({"delta": "out_fp32"}, 0.0), ({"delta": "p_dp"}, 0.0), ({"exact_row_sum": True}, 0.0), ({}, 0.125 * D * T)],
)
def test_the_variants_own_delta_counts(choice: dict, error: float) -> None:
    v = torch.full((1, 1, T, D), 2.0)
    seen = observation(
        variant=dataclasses.replace(BF16, **choice), v=v, out=v + 1, grad_out=torch.full((1, 1, T, D), 0.125)
    )
    assert values(probes.DeltaError(), seen)["delta_error_sum"] == pytest.approx(error, abs=1e-6)


def test_rows_of_exact_attention_are_all_on() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(1, 1, T, D, generator=generator).bfloat16().float() for _ in range(4))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    unrounded = AttentionVariant(probs=UNROUNDED, out=UNROUNDED, grad_scores=UNROUNDED)
    found = values(probes.Rows(), observation(unrounded, q=q, k=k, v=v, out=out, grad_out=grad_out))
    assert found["row_mass_mean"] == pytest.approx(1)
    assert found["half_mass_rows"] == found["half_norm_rows"] == found["zero_grad_rows"] == 0


def test_rows_that_a_floor_switches_off_are_counted() -> None:
    """Three of four rows see equal scores of 32 nats; with m = 64 their ℓ is the floor, 1e-10, and P̄ is exp(−32)."""
    q, k = torch.zeros(1, 1, T, D), torch.zeros(1, 1, T, D)
    q[..., 0], k[..., 0] = 4.0, 32.0
    v = grad_out = torch.randn(1, 1, T, D, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    variant = AttentionVariant(shift="dynamic_max", beta=2.0, max_shift=None, denominator_floor=1e-10)
    key = NoiseKey(torch.zeros(2, dtype=torch.int64), 1, torch.arange(1), 1, 1)
    out = reference.flash_fwd(q, k, v, variant, key)[0]
    found = values(probes.Rows(), observation(variant, q=q, k=k, v=v, out=out, grad_out=grad_out))
    masses = [1.0, *(count * math.exp(-32) / 1e-10 for count in (2, 3, 4))]
    assert found["row_mass_mean"] == pytest.approx(sum(masses) / 4, rel=1e-4)
    assert found["half_mass_rows"] == found["half_norm_rows"] == 3 / 4
    assert found["zero_grad_rows"] == 0
    k[..., 0] = 128.0  # exp(−128) is less than any FP32 number
    out = reference.flash_fwd(q, k, v, variant, key)[0]
    found = values(probes.Rows(), observation(variant, q=q, k=k, v=v, out=out, grad_out=grad_out))
    assert found["zero_grad_rows"] == 1


def test_deviation_of_a_known_error() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(1, 1, T, D, generator=generator) for _ in range(4))
    exact_q = q.clone().double().requires_grad_()
    scores = (exact_q @ k.double().mT / math.sqrt(D)).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    out = scores.softmax(-1) @ v.double()
    (grad_q,) = torch.autograd.grad(out, exact_q, grad_out.double())
    out = out.detach()
    seen = observation(
        q=q, k=k, v=v, grad_out=grad_out, out=(out + 0.25).float(), grad_q=(grad_q - 0.5).float()
    )  # δ is of the O that is 0.25 too large
    found = values(probes.Deviation(), seen)
    of_delta = 0.25 * grad_out.double().sum(-1)
    for name, error, exact in (
        ("out", torch.full_like(out, 0.25), out),
        ("grad_q", torch.full_like(out, -0.5), grad_q),
        ("delta", of_delta, (grad_out.double() * out).sum(-1)),
    ):
        unit = exact.square().mean().sqrt().item()
        assert found[f"{name}_deviation_max"] == pytest.approx(error.abs().max().item(), rel=1e-4), name
        assert found[f"{name}_deviation_rms"] == pytest.approx(error.square().mean().sqrt().item() / unit, rel=1e-4)
        assert found[f"{name}_deviation_mean"] == pytest.approx(error.mean().item() / unit, rel=1e-4)


def test_the_observed_gradient_of_q_is_the_attentions_own(captured: Observation) -> None:
    """In BF16 O and dQ of the observed pass deviate from attention in FP32, by little."""
    found = {name: value.amax().item() for name, value in probes.Deviation().measure(captured).items()}
    assert 0 < found["grad_q_deviation_rms"] < 0.05
    assert 0 < found["out_deviation_rms"] < 0.05


def test_ties_of_even_attention() -> None:
    found = values(out_error.Ties(), observation())  # row t has t + 1 equal scores
    assert found["tied_rows"] == 3 / 4
    assert found["tie_multiplicity"] == (2 + 3 + 4) / 3
    assert found["ties_on_first_keys"] == 1.0


def test_ties_are_placed_where_they_are() -> None:
    k = torch.zeros(1, 1, 8, D)
    k[0, 0, [1, 6], 0] = 8.0  # the keys at 1 and 6 tie from row 6 on
    q = torch.zeros(1, 1, 8, D)
    q[..., 0] = 4.0
    q[0, 0, 0] = q[0, 0, 1] = 0
    out = torch.zeros(1, 1, 8, D)
    seen = observation(q=q, k=k, v=out, out=out, grad_out=out)
    found = values(out_error.Ties(), seen)
    # Row 1 ties its two keys of score 0, rows 6 and 7 the keys 1 and 6: six ones, four of them on the first four keys.
    assert found["tied_rows"] == 3 / 8
    assert found["tie_multiplicity"] == 2
    assert found["ties_on_first_keys"] == 4 / 6


def test_the_rounding_of_out_points_away_from_zero_or_towards_it_by_row() -> None:
    v = torch.ones(1, 1, T, D)
    v[..., 1] = -2.0
    exact = v.clone()  # rows of even attention over equal values; row 0 has one key, the others tie
    error = torch.zeros(1, 1, T, D)
    error[0, 0, 0, 0] = -0.5  # towards 0, in the row without a tie
    error[0, 0, 1, 0] = 0.25  # away from 0
    error[0, 0, 2, 1] = -0.25  # away from 0
    error[0, 0, 3, 1] = 0.125  # towards 0
    found = values(out_error.Ties(), observation(v=v, out=exact + error))
    assert found["tied_out_error_bias"] == pytest.approx((0.25 + 0.25 - 0.125) / 0.625)
    assert found["untied_out_error_bias"] == -1
    assert values(out_error.Ties(), observation(v=v, out=exact))["tied_out_error_bias"] == 0


def test_the_rounding_in_the_most_one_sided_feature_of_tied_rows() -> None:
    v = torch.ones(1, 1, T, D)
    v[0, 0, 0] = -1.0
    v[..., 3] = -2.0  # the only feature of one sign
    exact = v.cumsum(2) / torch.arange(1, T + 1)[:, None]
    error = torch.full((1, 1, T, D), 0.25)  # towards 0 where O is negative
    error[0, 0, 0, 3] = 1.0  # in the row without a tie
    error[0, 0, 2, 3] = -0.75  # away from 0
    found = values(out_error.Ties(), observation(v=v, out=exact + error))
    assert found["one_sided_tied_out_error_bias"] == pytest.approx((0.75 - 0.25 - 0.25) / 1.25, rel=1e-5)


def test_a_maximum_that_a_later_block_tops_is_no_tie() -> None:
    q, k, v = torch.zeros(1, 1, 8, D), torch.zeros(1, 1, 8, D), torch.zeros(1, 1, 8, D)
    q[..., 0], k[0, 0, :, 0] = 4.0, 4.0 * torch.arange(8.0)  # in every row the last key has the largest score
    seen = observation(q=q, k=k, v=v, out=v, grad_out=v, variant=dataclasses.replace(BF16, block_k=2))
    assert values(out_error.Ties(), seen)["tied_rows"] == 0
    k[0, 0, 1:7, 0] = k[0, 0, 1, 0]  # keys 1 to 6 alike, over four blocks: rows 2 to 6 tie, and row 7 has one maximum
    assert (
        values(out_error.Ties(), observation(q=q, k=k, v=v, out=v, grad_out=v, variant=seen.variant))["tied_rows"]
        == 5 / 8
    )


def test_scores_and_entropy() -> None:
    found = values(probes.Scores(), observation())
    assert found["entropy"] == pytest.approx(sum(math.log(n) for n in (1, 2, 3, 4)) / 4, rel=1e-6)
    assert found["score_max"] == found["score_mean"] == 0
    q, k = torch.zeros(1, 1, T, D), torch.zeros(1, 1, T, D)
    q[0, 0, 3, 0], k[0, 0, 1, 0] = -8.0, 2.0  # one score of −8·2·α = −4
    found = values(probes.Scores(), observation(q=q, k=k))
    assert found["score_max"] == 4
    assert found["score_mean"] == pytest.approx(4 / 10)  # of the ten scores that are not masked


def test_one_signed_values_and_errors() -> None:
    v = torch.ones(1, 1, T, D)
    v[0, 0, 0] = -1
    v[0, 0, :2, 1] = -1
    exact = v.cumsum(2) / torch.arange(1, T + 1)[:, None]
    error = torch.full((1, 1, T, D), 0.25)
    error[0, 0, ::2] = -0.25  # no bias
    error[..., 5] = 0.25  # but here
    found = values(out_error.OutBias(), observation(v=v, out=exact + error))
    assert found["v_sign_max"] == 3 / 4
    assert found["out_error_bias_max"] == pytest.approx(1, rel=1e-5)
    assert found["out_error_bias_mean"] == pytest.approx(1 / D, rel=1e-4)


def test_the_first_half_of_the_rows_chooses_the_feature_whose_signs_are_counted() -> None:
    v = torch.ones(1, 1, T, D)
    v[0, 0, 0] = -1.0
    exact = v.cumsum(2) / torch.arange(1, T + 1)[:, None]
    error = torch.full((1, 1, T, D), 0.25)
    grad_out = torch.full((1, 1, T, D), -1.0)  # of the other sign, but
    grad_out[0, 0, 0, 5] = grad_out[0, 0, 2, 5] = 1.0  # in one row of each half
    grad_out[0, 0, :2, 7] = 1.0  # in both rows of the first half: this feature is chosen
    grad_out[0, 0, 2, 7] = 0.0  # no sign; the last row differs
    error[0, 0, 2:, 7] = -0.25  # so that both are negative there
    found = values(out_error.OutBias(), observation(v=v, out=exact + error, grad_out=grad_out))
    assert found["feature_sign_agreement"] == 1.0
    assert found["feature_v_error_sign_agreement"] == 1 / 4  # one of four keys has a negative value
    grad_out[0, 0, 2, 7] = 1.0
    found = values(out_error.OutBias(), observation(v=v, out=exact + error, grad_out=grad_out))
    assert found["feature_sign_agreement"] == 1 / 2


def test_shares_along_the_mean_key_and_the_first() -> None:
    k = torch.zeros(1, 1, T, D)
    k[0, 0, :, 0] = 1.0  # the mean key is e₀ + e₁/4
    k[0, 0, 0, 1] = 1.0  # the first key is e₀ + e₁
    w_q, update = torch.zeros(1, D, C), torch.zeros(1, D, C)
    w_q[0, 0] = torch.tensor([3.0, 0.0, 4.0])
    update[0, 2, 1] = 7.0
    found = values(probes.NullDirection(), observation(k=k, w_q=w_q, update=update))
    assert found["w_q_mean_key_share"] == pytest.approx(1 / (1 + 1 / 16))
    assert found["w_q_first_key_share"] == pytest.approx(1 / 2)
    assert found["w_q_update_mean_key_share"] == found["w_q_update_first_key_share"] == 0
    # Rows attend evenly: PK_i is e₀ + e₁/i, their mean e₀ + 25/48·e₁.
    cosine = (1 + 25 / 192) / math.sqrt((1 + (25 / 48) ** 2) * (1 + 1 / 16))
    assert found["attended_key_mean_key_cosine"] == pytest.approx(cosine)
    # Without the mean over all keys e₁ is left, which the mean key has a quarter of.
    centered = observation(k=k, w_q=w_q, update=update, variant=AttentionVariant(center_grad_q=True))
    left = values(probes.NullDirection(), centered)["attended_key_mean_key_cosine"]
    assert left == pytest.approx(1 / 4 / math.sqrt(1 + 1 / 16))


def test_similarity_of_tokens_and_steps() -> None:
    k = torch.zeros(1, 1, T, D)
    k[..., 0] = 1.0
    x = torch.zeros(1, T, C)
    x[0, :2, 0], x[0, 2:, 1] = 1.0, -2.0  # two tokens one way, two at right angles
    probe = probes.Similarity()
    found = values(probe, observation(k=k, x=x))
    assert found["token_similarity"] == pytest.approx(4 / 12)  # of the twelve pairs, four are alike
    assert found["input_similarity"] == pytest.approx(4 / 12)
    assert found["attended_key_similarity"] == pytest.approx(1)  # all keys are one
    assert "step_similarity" not in found
    assert values(probe, observation(k=k, x=x))["step_similarity"] == pytest.approx(8 / 16)
    assert values(probe, observation(k=-k, x=x))["step_similarity"] == pytest.approx(-8 / 16)


def test_effective_rank_counts_equal_directions() -> None:
    k, x = torch.zeros(1, 1, T, D), torch.zeros(1, T, C)
    k[..., 0] = 1.0
    x[0, 0, 0], x[0, 1, 1] = 1.0, 1.0
    v = torch.zeros(1, 1, T, D)
    error = torch.zeros(1, 1, T, D)
    error[0, 0, 0, 0] = 1.0
    one = observation(k=k, x=x, v=v, out=error, grad_out=torch.ones(1, 1, T, D))
    assert values(probes.Similarity(), one)["w_q_error_effective_rank"] == pytest.approx(1)
    # With keys that no longer agree the second error points elsewhere.
    k[0, 0, 0], k[0, 0, 1] = 0, 0
    k[0, 0, 0, 1], k[0, 0, 1, 1], k[0, 0, 1, 2] = 1.0, -1.0, 2.0
    error[0, 0, 1, 0] = 1.0  # PK of row 1 is the mean of the keys 0 and 1: e₂
    two = observation(k=k, x=x, v=v, out=error, grad_out=torch.ones(1, 1, T, D))
    assert values(probes.Similarity(), two)["w_q_error_effective_rank"] == pytest.approx(2)
    assert values(probes.Similarity(), observation())["w_q_error_effective_rank"] == 0


@pytest.fixture(scope="module")
def model() -> GPT:
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=64, context=40, vocab_size=50), BF16, 0)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight *= 8
    return model


@pytest.fixture(scope="module")
def captured(model: GPT) -> Observation:
    """Two layers of a small model on two sequences, after one made-up step."""
    tokens = torch.randint(0, 50, (2, 41), generator=torch.Generator().manual_seed(0))
    observe = InstrumentedPass(model, tokens, batch_size=4, device=torch.device("cpu"))
    seen = observe(tokens, torch.tensor([1, 2]))
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[:64] += 1.0
    return observe.with_update(seen)


def test_a_captured_batch_is_the_models(captured: Observation) -> None:
    assert not captured.update[0].any()
    assert torch.equal(captured.update[1], (captured.w_q[1] + 1.0) - captured.w_q[1])
    assert captured.q.dtype == captured.out.dtype == torch.bfloat16
    assert captured.q.shape == (2, 2, 2, 40, 32)
    q = torch.einsum("lntc,lhdc->lnhtd", captured.x.bfloat16().double(), captured.w_q.bfloat16().double())
    torch.testing.assert_close(captured.q.double(), q, rtol=2**-8, atol=1e-5)  # one rounding to BF16
    assert (captured.grad_out.abs().sum((1, 2, 3, 4)) > 0).all()


def observed(model: GPT, precision: Precision, batch_size: int = 4) -> Observation:
    tokens = torch.randint(0, 50, (2, 41), generator=torch.Generator().manual_seed(0))
    observe = InstrumentedPass(model, tokens, batch_size, torch.device("cpu"), "data", precision)
    return observe(tokens, torch.tensor([1, 2]))


def test_pytorchs_attention_is_seen_with_the_roundings_of_the_trainings_precision() -> None:
    """FP16 has three bits more than BF16. In FP32 nothing is rounded: what is left is the order of sums."""
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=64, context=40, vocab_size=50), SDPA, 0)
    bf16, fp16, fp32 = (
        probes.DeltaError().measure(observed(model, precision))["delta_error_relative_noise"]
        for precision in ("bf16", "fp16", "fp32")
    )
    assert ((fp16 / bf16 > 1 / 16) & (fp16 / bf16 < 1 / 4)).all(), fp16 / bf16
    assert (fp32 < 1e-6).all(), fp32
    assert (bf16 > 1e-4).all()


def test_the_observed_gradients_of_fp16_do_not_underflow() -> None:
    """Few sequences of a large step have gradients below FP16's 6e-8; FP32 is the oracle."""
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=64, context=40, vocab_size=50), SDPA, 0)
    fp16, fp32 = (observed(model, precision, batch_size=2**15) for precision in ("fp16", "fp32"))
    assert fp32.grad_out.abs().median() < 6e-8
    for found, expected in ((fp16.grad_out, fp32.grad_out), (fp16.grad_q, fp32.grad_q)):
        assert (found - expected).norm() < 0.03 * expected.norm()


def test_each_layer_and_head_is_seen_with_its_own_variant(captured: Observation) -> None:
    exact = dataclasses.replace(BF16, delta="out_fp32", center_keys=True, layers=(2,), heads=(1,), elsewhere=BF16)
    seen = dataclasses.replace(captured, variant=exact)
    errors = probes.DeltaError().measure(seen)["delta_error_relative_noise"]
    assert errors[1, 0] == 0
    assert errors.count_nonzero() == 3
    means = seen.keys.mean((1, 3)).norm(dim=-1)
    assert means[1, 0] < 1e-2 * means[1, 1]
    assert torch.equal(seen.keys[0], captured.k[0].float())


def test_delta_of_o_in_two_parts_has_an_eighth_of_the_noise_with_three_bits(captured: Observation) -> None:
    """And more than that is taken off where Ō was rounded, too. In heads without a residual nothing changes."""
    split = dataclasses.replace(BF16, delta="out_fp32", out_residual_bits=3, heads=(1,), elsewhere=BF16)
    noises = [
        probes.DeltaError().measure(dataclasses.replace(captured, variant=variant))["delta_error_relative_noise"]
        for variant in (split, BF16)
    ]
    ratios = noises[0] / noises[1]
    assert ((ratios[:, 0] > 1 / 25) & (ratios[:, 0] < 1 / 7)).all(), ratios
    assert (ratios[:, 1] == 1).all()


@pytest.mark.parametrize("centers", [False, True])
@pytest.mark.parametrize("layer", [1, 2])
def test_the_papers_identity_holds_on_it(captured: Observation, layer: int, centers: bool) -> None:
    """dW_Q,hp − dW_Q,lp = α Σ_T (δ_lp − δ_hp)[T]·(PK)[T]ᵀX[T], both sides from backward passes in FP32."""
    captured = dataclasses.replace(captured, variant=dataclasses.replace(BF16, center_grad_q=centers))
    noise = NoiseKey(captured.seed_and_step, layer, torch.arange(2), 2, 2)
    variant = dataclasses.replace(captured.variant, delta="out_fp32", grad_scores=UNROUNDED)
    q, k, v = (x[layer - 1].float() for x in (captured.q, captured.k, captured.v))
    _, logsumexp, out_fp32, centered = reference.flash_fwd(q, k, v, variant, noise)

    def weight_gradient(out: Tensor) -> Tensor:
        grad_q, *_ = reference.flash_bwd(
            captured.grad_out[layer - 1], q, k, v, out, logsumexp, out, centered, variant, noise
        )  # fmt: skip
        return torch.einsum("nhtd,ntc->hdc", grad_q.double(), captured.x[layer - 1].double())

    difference = weight_gradient(out_fp32) - weight_gradient(captured.out[layer - 1].float())
    found = probes.weight_gradient_error(captured)[layer - 1].double()
    assert difference.norm() > 0
    # Centred keys are rounded once more, to BF16.
    assert (found - difference).norm() <= (2**-8 if centers else 1e-3) * difference.norm()


def drawn(variant: AttentionVariant) -> tuple[Observation, NoiseKey]:
    """Noise through a whole forward pass of the variant, in the first of one layer."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad_out = (torch.randn(2, 2, 40, D, generator=generator) for _ in range(4))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    noise = NoiseKey(torch.tensor([1, 2]), 1, torch.arange(2), 2, 2)
    out = reference.flash_fwd(q, k, v, variant, noise)[0]
    seen = observation(q=q, k=k, v=v, out=out, grad_out=grad_out, variant=variant)
    return dataclasses.replace(seen, seed_and_step=noise.seed_and_step), noise


def test_an_independent_delta_is_of_the_other_output_and_its_error_against_the_unrounded_one() -> None:
    variant = dataclasses.replace(BF16, out_unnormalized=STOCHASTIC, delta="out_independent")
    seen, noise = drawn(variant)
    q, k, v, grad_out = seen.q[0], seen.k[0], seen.v[0], seen.grad_out[0]
    _, _, other, _ = reference.flash_fwd(q, k, v, variant, noise)
    unrounded = dataclasses.replace(variant, delta="out_fp32")
    _, _, exact, _ = reference.flash_fwd(q, k, v, unrounded, noise)
    assert torch.equal(seen.out_fp32[0], exact)
    assert torch.equal(seen.delta_fp32[0], (grad_out * exact).sum(-1))
    assert torch.equal(seen.delta[0], (grad_out * other).sum(-1))
    assert not torch.equal(seen.delta[0], (grad_out * seen.out[0].float()).sum(-1))


def test_an_injected_error_counts_as_an_error_of_the_variants_delta() -> None:
    error = DeltaError(kind="noise", size=0.25, layers=(1,))
    seen, _ = drawn(dataclasses.replace(BF16, delta="out_fp32", delta_error=error))
    found = (seen.delta - seen.delta_fp32) / (seen.grad_out.norm(dim=-1) * seen.out.float().norm(dim=-1))
    torch.testing.assert_close(found.abs(), torch.full_like(found, 0.25), rtol=1e-3, atol=0)
    assert 0.3 < (found > 0).float().mean() < 0.7
    noise = probes.DeltaError().measure(seen)["delta_error_relative_noise"]
    torch.testing.assert_close(noise, torch.full_like(noise, 0.25), rtol=1e-3, atol=0)
    elsewhere = dataclasses.replace(error, layers=(2,))
    spared = dataclasses.replace(seen, variant=dataclasses.replace(seen.variant, delta_error=elsewhere))
    assert torch.equal(spared.delta, spared.delta_fp32)
