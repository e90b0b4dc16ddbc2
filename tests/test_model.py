"""GPT-2's shape and start, checked from outside the model."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashpoint.lab.config import ModelConfig
from flashpoint.lab.model import GPT
from flashpoint.numerics.choices import UNROUNDED
from flashpoint.numerics.variant import AttentionVariant

CONFIG = ModelConfig(n_layer=3, n_head=2, d_model=64, context=32, vocab_size=97)
EXACT = AttentionVariant(probs=UNROUNDED, out=UNROUNDED, grad_scores=UNROUNDED)
SEED_AND_STEP = torch.tensor([0, 0])


def tokens(length: int = 32, batch: int = 2) -> Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def test_parameter_count_of_gpt2_124m(monkeypatch: pytest.MonkeyPatch) -> None:
    """124,373,760 without biases: 50,304·768 + 1,024·768 + 12·(12·768² + 2·768) + 768."""
    config = ModelConfig(n_layer=12, n_head=12, d_model=768, context=1024, vocab_size=50304)
    expected = 50304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768
    monkeypatch.setattr(GPT, "initialize", lambda *_: None)  # to draw as many numbers takes a second
    with torch.device("meta"):
        model = GPT(config, EXACT, 0)
    assert sum(p.numel() for p in model.parameters()) == expected == 124_373_760


def test_initial_weights_have_the_stated_spread() -> None:
    model = GPT(ModelConfig(n_layer=4, n_head=4, d_model=256, context=64, vocab_size=512), EXACT, 0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        expected = 0.02 / math.sqrt(8) if name.endswith("projection.weight") else 0.02
        standard_error = expected / math.sqrt(2 * parameter.numel())
        assert abs(parameter.std().item() - expected) < 5 * standard_error, name
        assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel()), name


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    first, second, other = (GPT(CONFIG, EXACT, seed).state_dict() for seed in (5, 5, 6))
    for name in first:
        assert torch.equal(first[name], second[name])
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def test_a_fresh_model_predicts_almost_uniformly() -> None:
    with torch.no_grad():
        loss = GPT(CONFIG, EXACT, 0)(tokens(), tokens().roll(1), SEED_AND_STEP)
    assert loss.item() == pytest.approx(math.log(97), abs=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("flex_on_a_cpu")
@pytest.mark.parametrize(
    ("z_loss", "changes"), [(0.0, {}), (0.25, {}), (0.0, {"qk_norm": True}), (0.0, {"score_cap": 0.5})]
)
def test_loss_and_gradients_equal_a_plain_gpt2_in_fp64(z_loss: float, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    model = GPT(config, AttentionVariant(kernel="flex") if config.score_cap else EXACT, 3, z_loss)
    with torch.no_grad():
        for parameter in model.parameters():  # far from the start, so that attention matters
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.1)
    inputs, targets = tokens(), tokens().flip(1)
    loss = model(inputs, targets, SEED_AND_STEP)
    loss.backward()
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    logits = plain_gpt2_logits(weights, inputs, config.score_cap).flatten(0, 1)
    log_z = logits.exp().sum(-1).log()
    expected = (log_z - logits.gather(1, targets.view(-1, 1)).squeeze(1)).mean()
    (expected + z_loss * log_z.square().mean()).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        gradient, reference = parameter.grad, weights[name].grad
        assert gradient is not None
        assert reference is not None
        assert (gradient - reference).norm() <= 2e-5 * reference.norm(), name


@pytest.mark.parametrize("sequences", [1, 32, 33])
@pytest.mark.parametrize("autocast", [False, True])
def test_without_gradients_the_loss_has_the_same_bits(sequences: int, autocast: bool) -> None:
    """1,024 rows are in FP32 at a time: 32 sequences of 32."""
    model, inputs = GPT(CONFIG, EXACT, 3), tokens(batch=sequences)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(inputs, inputs.flip(1), SEED_AND_STEP)
        with torch.no_grad():
            assert torch.equal(model(inputs, inputs.flip(1), SEED_AND_STEP), loss)


def plain_gpt2_logits(w: dict[str, Tensor], inputs: Tensor, score_cap: float | None) -> Tensor:
    """GPT-2 from its published equations, softmax attention written out."""
    T = inputs.shape[1]
    x = w["token_embedding.weight"][inputs] + w["position_embedding.weight"][:T]
    for layer in range(CONFIG.n_layer):
        p = f"blocks.{layer}."
        y = F.layer_norm(x, (64,)) * w[p + "attention_norm.weight"]
        heads = []
        for head in range(2):
            rows = slice(32 * head, 32 * head + 32)
            w_q, w_k, w_v = (w[p + "attention.qkv.weight"][64 * i :][rows] for i in range(3))
            q, k = y @ w_q.T, y @ w_k.T
            if (gain := p + "attention.q_norm.weight") in w:
                q = q / (q.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[gain]
                k = k / (k.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[p + "attention.k_norm.weight"]
            scores = q @ k.mT / math.sqrt(32)
            scores = score_cap * (scores / score_cap).tanh() if score_cap else scores
            scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
            heads.append(scores.softmax(-1) @ (y @ w_v.T))
        x = x + torch.cat(heads, -1) @ w[p + "attention.projection.weight"].T
        y = F.layer_norm(x, (64,)) * w[p + "mlp_norm.weight"]
        x = x + F.gelu(y @ w[p + "mlp.expand.weight"].T) @ w[p + "mlp.projection.weight"].T
    return F.layer_norm(x, (64,)) * w["final_norm.weight"] @ w["token_embedding.weight"].T


@pytest.mark.parametrize("n_kv_head", [2, 1])
def test_no_result_but_the_keys_shows_a_running_mean_of_keys(n_kv_head: int) -> None:
    """In FP64, where O, dQ, dK, dV, dx and dW agree to its rounding; K differs by c."""
    generator = torch.Generator().manual_seed(0)
    x, grad, mean = (torch.randn(*shape, generator=generator).double() for shape in ((2, 32, 64), (2, 32, 64), (64,)))
    found = []
    for shift in ("none", "running"):
        config = dataclasses.replace(CONFIG, n_kv_head=n_kv_head, shift_keys=shift)  # type: ignore[arg-type]
        attention = GPT(config, AttentionVariant(kernel="sdpa_math"), 3).blocks[1].attention.double()
        if shift == "running":
            attention.qkv.key_mean.copy_(5 * mean[: 32 * n_kv_head])
        taken: list[Tensor] = []
        attention.core.register_forward_pre_hook(lambda _, inputs, taken=taken: taken.extend(inputs[:3]))
        attention.core.register_forward_hook(lambda _module, _inputs, out, taken=taken: taken.append(out))
        given = x.clone().requires_grad_()
        with torch.no_grad():
            attention.qkv.weight.mul_(8.0)  # so that attention matters
        result = attention(given, SEED_AND_STEP)
        grads = torch.autograd.grad(result, [*taken[:3], given, *attention.parameters()], grad)
        found.append((taken, [result, *grads]))
    (plain, expected), (shifted, results) = found
    c = 5 * mean[: 32 * n_kv_head].view(n_kv_head, 1, 32)
    assert (plain[1] - shifted[1] - c).abs().max() < 1e-12
    for one, other in zip([*results, *shifted[:1], *shifted[2:]], [*expected, *plain[:1], *plain[2:]], strict=True):
        assert (one - other).norm() < 1e-12 * other.norm()


def test_sequences_longer_than_the_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"33 tokens, but model\.context=32"):
        GPT(CONFIG, EXACT, 0)(tokens(33), tokens(33), SEED_AND_STEP)


def test_w_q_is_the_projection_that_makes_each_heads_queries() -> None:
    block = GPT(CONFIG, EXACT, 0).blocks[1].attention
    x = torch.randn(5, 64)
    q = block.qkv(x)[:, :64].view(5, 2, 32)
    by_head = torch.einsum("hdc,tc->thd", block.weights[0], x)
    np.testing.assert_allclose(q.detach().numpy(), by_head.detach().numpy(), atol=1e-6)


def test_an_fp32_o_is_rounded_by_the_projection_and_so_serves_delta_alone() -> None:
    """Under autocast: O rounded to nearest, with δ of the unrounded O, gives the same bits."""
    found = []
    for variant in (AttentionVariant(out=UNROUNDED), AttentionVariant(delta="out_fp32"), AttentionVariant()):
        model = GPT(CONFIG, variant, 3)
        with torch.no_grad():
            for parameter in model.parameters():  # so that attention matters
                parameter.mul_(4.0) if parameter.dim() > 1 else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens(), tokens().roll(1), SEED_AND_STEP)
        loss.backward()
        found.append((loss.item(), model.blocks[1].attention.qkv.weight.grad))
    (kept, kept_grad), (of_fp32, of_fp32_grad), (rounded, rounded_grad) = found
    assert kept == of_fp32 == rounded
    assert torch.equal(kept_grad, of_fp32_grad)
    assert not torch.equal(kept_grad, rounded_grad)
