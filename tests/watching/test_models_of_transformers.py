"""Attentions of models of Transformers that are more than causal: each is recorded, and nothing is found in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashpoint.diagnosis.verdict import diagnose
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import loop

transformers = pytest.importorskip("transformers")

TOKENS, HEADS = 24, 4
_SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "pad_token_id": 0,
}
_SHARED = {"num_key_value_heads": 2, "head_dim": 8}
_WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_PADDED = torch.ones(2, TOKENS, dtype=torch.int64)
_PADDED[0, -7:] = 0
_ALL = torch.ones_like(_PADDED)
_POSITIONS = torch.cat([torch.arange(15), torch.arange(TOKENS - 15)]).expand(2, -1)


def tokens(**given: Any) -> Callable[[], dict[str, Any]]:
    """Of which padding is left out of the loss."""

    def make() -> dict[str, Any]:
        ids = torch.randint(1, 32, (2, TOKENS))
        return {"input_ids": ids, "labels": ids.masked_fill(given.get("attention_mask", _ALL) == 0, -100), **given}

    return make


def sounds() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 8, 2 * TOKENS), "labels": torch.randint(3, 32, (2, 7))}


def pairs() -> dict[str, Any]:
    return {"input_ids": torch.randint(1, 32, (2, TOKENS)), "labels": torch.randint(1, 32, (2, 7))}


SEEN: dict[str, Any] = {"shape": (2, 1, TOKENS, TOKENS)}
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]], list[set[str]]]] = {
    "gemma 2": ("Gemma2ForCausalLM", _SMALL | _SHARED | _WINDOW, tokens(), [{"softcap", "mask"}, {"softcap"}]),
    "gemma 3": ("Gemma3ForCausalLM", _SMALL | _SHARED | _WINDOW, tokens(), [{"mask"}, set()]),
    "gpt-oss": (
        "GptOssForCausalLM",
        _SMALL | _SHARED | _WINDOW | {"num_local_experts": 2, "num_experts_per_tok": 1},
        tokens(),
        [{"sink", "mask"}, {"sink"}],
    ),
    "mistral": ("MistralForCausalLM", _SMALL | _SHARED | {"sliding_window": 4}, tokens(), [{"mask"}] * 2),
    "mistral, padded": (
        "MistralForCausalLM",
        _SMALL | _SHARED | {"sliding_window": None},
        tokens(attention_mask=_PADDED),
        [{"mask"}] * 2,
    ),
    "mistral, packed": (
        "MistralForCausalLM",
        _SMALL | _SHARED | {"sliding_window": None},
        tokens(position_ids=_POSITIONS, use_cache=False),
        [{"mask"}] * 2,
    ),
    "mistral, packed, with a cache, which passes over it": (
        "MistralForCausalLM",
        _SMALL | _SHARED | {"sliding_window": None},
        tokens(position_ids=_POSITIONS),
        [set(), set()],
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        _SMALL
        | {"num_key_value_heads": HEADS, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1}
        | {"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16}
        | {"q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
        tokens(),
        [set(), set()],
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": HEADS}
        | {"decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0},
        pairs,
        [{"bias"}, {"bias"}, set()],
    ),
    "t5 with dropout": (
        "T5ForConditionalGeneration",
        {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": HEADS}
        | {"decoder_start_token_id": 0, "pad_token_id": 0},
        pairs,
        [{"bias", "kept"}, {"bias", "kept"}, {"kept"}],
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": 32, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": HEADS}
        | {"decoder_attention_heads": HEADS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8}
        | {"max_source_positions": TOKENS, "max_target_positions": 12, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": 2, "decoder_start_token_id": 1},
        sounds,
        [set(), set(), set()],
    ),
    "bert, padded": (
        "BertForMaskedLM",
        _SMALL | _NO_DROPOUT,
        tokens(attention_mask=_PADDED),
        [{"mask"}] * 2,
    ),
    "bert with dropout": ("BertForMaskedLM", _SMALL, tokens(), [{"kept"}] * 2),
    "modernbert": (
        "ModernBertForMaskedLM",
        _SMALL
        | {"local_attention": 4, "global_attn_every_n_layers": 2, "bos_token_id": 1, "cls_token_id": 1}
        | {"eos_token_id": 2, "sep_token_id": 2},
        tokens(attention_mask=_PADDED),
        [{"mask"}] * 2,
    ),
}
ONLY_EAGER = ("gemma 2", "gpt-oss")
CASES = [(name, way) for name in MODELS for way in ("eager", "sdpa") if way == "eager" or name not in ONLY_EAGER]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES)
def test_each_attention_is_recorded_and_nothing_is_found_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, way: str
) -> None:
    kind, settings, batch, told = MODELS[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    model: Any = model_class._from_config(model_class.config_class(**settings), attn_implementation=way).train()

    def step(model: Any, _number: int, watched: Watch) -> None:
        watched.capture(sequences=0)
        loss = model(**batch()).loss
        loss.backward()
        watched.step(loss)

    run = loop(tmp_path, model, step, steps=2)
    assert run.manifest.not_recorded == (), capsys.readouterr().err
    calls = read_calls(tmp_path / "own")
    found = [{*call.form.tensors, *(["softcap"] if call.form.softcap else [])} for call in calls]
    assert found == told
    for call in calls:
        assert [one.text for one in diagnose(call).findings] == []
