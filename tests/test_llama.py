"""Llama's layers against Transformers' Llama, and recorded, replayed and resumed as GPT-2 is."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashpoint.lab.config import ModelConfig
from flashpoint.lab.model import GPT, RMS_NORM_EPS, ROTARY_BASE
from flashpoint.lab.probes.instrumented import InstrumentedPass
from flashpoint.numerics.choices import UNROUNDED
from flashpoint.numerics.variant import AttentionVariant
from tests import warm
from tests.conftest import Command, environment, train_command

CONFIG = ModelConfig(family="llama", n_layer=3, n_head=4, n_kv_head=2, d_model=64, context=32, vocab_size=97)
EXACT = AttentionVariant(probs=UNROUNDED, out=UNROUNDED, grad_scores=UNROUNDED)
SEED_AND_STEP = torch.tensor([0, 0])
LLAMA = ("model.family=llama", "model.n_kv_head=1", "model.qk_norm=true", "checkpoints.interval=4")


def tokens(length: int = 32, batch: int = 2) -> Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def far_from_the_start(config: ModelConfig) -> GPT:
    """So that attention matters, and gains are no ones."""
    model = GPT(config, EXACT, 3)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(
                torch.rand(len(parameter), generator=generator)
            )
    return model


def in_transformers(model: GPT, other: torch.nn.Module) -> dict[str, Tensor]:
    """Copy the weights; return the other model's, under the names that they have in this one."""
    config, theirs, named = model.config, dict(other.named_parameters()), {}
    for name, weight in model.named_parameters():
        if name == "token_embedding.weight":
            named[name] = [theirs["model.embed_tokens.weight"]]
        elif name == "final_norm.weight":
            named[name] = [theirs["model.norm.weight"]]
        else:
            _, layer, part = name.split(".", 2)
            places = {
                "attention_norm.weight": ["input_layernorm"],
                "attention.qkv.weight": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                "attention.projection.weight": ["self_attn.o_proj"],
                "attention.q_norm.weight": ["self_attn.q_norm"],
                "attention.k_norm.weight": ["self_attn.k_norm"],
                "mlp_norm.weight": ["post_attention_layernorm"],
                "mlp.gate.weight": ["mlp.gate_proj"],
                "mlp.expand.weight": ["mlp.up_proj"],
                "mlp.projection.weight": ["mlp.down_proj"],
            }
            named[name] = [theirs[f"model.layers.{layer}.{place}.weight"] for place in places[part]]
        with torch.no_grad():
            sizes = [len(one) for one in named[name]]
            for one, ours in zip(named[name], weight.split(sizes), strict=True):
                one.copy_(ours)
    assert {id(one) for many in named.values() for one in many} == {id(one) for one in theirs.values()}
    assert config.d_model == theirs["model.norm.weight"].numel()
    return named


def shape(config: ModelConfig) -> dict[str, Any]:
    """What Transformers' configurations call it."""
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.d_model, "intermediate_size": config.d_mlp,
        "num_hidden_layers": config.n_layer, "num_attention_heads": config.n_head, "head_dim": config.head_size,
        "num_key_value_heads": config.kv_heads, "max_position_embeddings": config.context,
        "rms_norm_eps": RMS_NORM_EPS, "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "tie_word_embeddings": True, "attn_implementation": "eager",
    }  # fmt: skip


def assert_equal_to(model: GPT, other: Any) -> None:
    """Logits and gradients, in FP32."""
    named, inputs, targets = in_transformers(model, other), tokens(), tokens().flip(1)
    expected = other(inputs).logits
    torch.testing.assert_close(model.logits(inputs, SEED_AND_STEP), expected, rtol=1e-5, atol=1e-5)
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    model(inputs, targets, SEED_AND_STEP).backward()
    for name, parameter in model.named_parameters():
        reference = torch.cat([one.grad for one in named[name] if one.grad is not None])
        assert parameter.grad is not None
        assert (parameter.grad - reference).norm() <= 2e-5 * reference.norm(), name


@pytest.mark.slow
def test_logits_and_gradients_equal_transformers_llama() -> None:
    transformers = pytest.importorskip("transformers")
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape(CONFIG)))
    assert_equal_to(far_from_the_start(CONFIG), other)


@pytest.mark.slow
def test_with_qk_norm_logits_and_gradients_equal_transformers_qwen3() -> None:
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(CONFIG, qk_norm=True)
    assert_equal_to(
        far_from_the_start(config), transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape(config)))
    )


def test_llamas_mlp_is_as_wide_as_published() -> None:
    """Meta's 7B has 11,008 for a width of 4,096, a multiple of 256; ours is the multiple of 64 below that."""
    assert ModelConfig(family="llama", d_model=768, n_head=12).d_mlp == 8 * 768 // 3
    assert 11_008 - ModelConfig(family="llama", d_model=4096, n_head=32).d_mlp == 64


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_observed_gradients_by_q_add_up_to_those_of_w_q(family: Any, qk_norm: bool) -> None:
    """The oracle is autograd's gradient of the whole projection."""
    model = far_from_the_start(dataclasses.replace(CONFIG, family=family, qk_norm=qk_norm))
    sequences = tokens(33)
    seen = InstrumentedPass(model, sequences, 2, torch.device("cpu"), "data", "fp32")(sequences, SEED_AND_STEP)
    model(sequences[:, :-1], sequences[:, 1:], SEED_AND_STEP).backward()
    grad = seen.to_projection(seen.grad_q) if seen.to_projection else seen.grad_q
    by_head = torch.einsum("lnhtd,lntc->lhdc", grad, seen.x)
    for block, found in zip(model.blocks, by_head, strict=True):
        wanted = block.attention.qkv.weight.grad[:64].view(4, 16, 64)
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.fixture(scope="module")
def whole(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder in which ``runs/whole`` has been recorded."""
    folder = tmp_path_factory.mktemp("llama")
    command = train_command(*LLAMA, "run_name=whole", tiny=True, text_file=text_file)
    warm.run(command, cwd=folder, env=environment(), timeout=120).check_returncode()
    return folder


@pytest.mark.slow
def test_a_llama_is_replayed_branched_and_resumed_bit_for_bit(whole: Path, train: Command) -> None:
    halfway = ("train.steps=8", "train.decay_steps=12", "run_name=halfway")
    for command, tiny in (
        (("replay=whole", "run_name=again"), False),
        (("replay=whole", "from_step=4", "run_name=branch"), False),
        ((*LLAMA, *halfway), True),
        (("resume=halfway", "train.steps=12"), False),
    ):
        result = train(*command, tiny=tiny, cwd=whole)
        assert result.returncode == 0, result.stderr
    runs = [whole / "runs" / name for name in ("whole", "again", "branch", "halfway")]
    outcomes = [json.loads((run / "outcome.json").read_text()) for run in runs]
    assert len({outcome["weights_digest"] for outcome in outcomes}) == 1
    assert json.loads((runs[0] / "config.json").read_text())["model"]["family"] == "llama"
    logged = {name for line in (runs[0] / "metrics.jsonl").open() for name in json.loads(line)}
    assert {"w_q_spectral_norm", "delta_error_sum", "token_similarity", "entropy"} <= logged
