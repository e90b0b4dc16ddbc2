"""Small models of Transformers, with random weights, whose attention is more than causal; and batches for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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
"""Class, settings, what makes a batch, and the parts of each recorded call's form, by name."""
ONLY_EAGER = ("gemma 2", "gpt-oss")


def built(name: str, way: str) -> nn.Module:
    """Return a model with the weights of seed 0, whose ``attn_implementation`` is ``way``."""
    import transformers

    kind, settings, _, _ = MODELS[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    model: nn.Module = model_class._from_config(model_class.config_class(**settings), attn_implementation=way)
    return model.train()
