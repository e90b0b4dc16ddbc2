"""Models of Transformers with the drop-in attention: they train with it, or are refused."""

from collections.abc import Callable

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gpt2(implementation: str) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=48, vocab_size=100, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.1,
    )  # fmt: skip
    return GPT2LMHeadModel._from_config(config, attn_implementation=implementation)


def llama(implementation: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation)


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, llama])
def test_a_model_of_transformers_trains_with_it(build: Callable[[str], torch.nn.Module]) -> None:
    from flashpoint.huggingface import implementation

    name = implementation("flash_exact_rowsum")
    models = [build(name).to(DEVICE), build("sdpa").to(DEVICE)]
    assert models[0].config._attn_implementation == name
    tokens = torch.randint(0, 100, (2, 33), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grads = []
    for model in models:
        with torch.autocast(DEVICE, torch.bfloat16):
            model(tokens, labels=tokens).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert not all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    for one, other in zip(*grads, strict=True):
        assert (one - other).norm() <= 0.1 * other.norm()
    padded = torch.ones_like(tokens).index_fill(1, torch.arange(3, device=DEVICE), 0)
    with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(ValueError, match="padding"):
        models[0](tokens, attention_mask=padded)
    with torch.no_grad():  # generation and padded sequences are PyTorch's
        logits = [model(tokens, attention_mask=padded).logits[:, 3:] for model in models]
        generated = [model.generate(tokens[:1, :5], max_new_tokens=3, do_sample=False) for model in models]
    torch.testing.assert_close(*logits)
    assert torch.equal(*generated)


def gemma2(implementation: str) -> torch.nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, attn_logit_softcapping=0.5, sliding_window=64,
    )  # fmt: skip
    return Gemma2ForCausalLM._from_config(config, attn_implementation=implementation)


def gpt_oss(implementation: str) -> torch.nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=64,
        pad_token_id=0, layer_types=["full_attention"],
    )  # fmt: skip
    return GptOssForCausalLM._from_config(config, attn_implementation=implementation)


def t5(implementation: str) -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=100, decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    return T5ForConditionalGeneration._from_config(config, attn_implementation=implementation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "told", "evaluates"),
    [(gemma2, "softcap", False), (gpt_oss, "s_aux", False), (t5, "position_bias", True)],
)
def test_a_model_of_transformers_whose_attention_is_another_one_is_refused(
    build: Callable[[str], torch.nn.Module], told: str, evaluates: bool
) -> None:
    """It would train another model than the one that was asked for."""
    from flashpoint.huggingface import implementation

    model = build(implementation("flash_fp32"))
    tokens = torch.randint(1, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match=f"takes no {told}"):
        model(input_ids=tokens, labels=tokens)
    with torch.no_grad():
        if not evaluates:
            with pytest.raises(ValueError, match=f"takes no {told}"):
                model(input_ids=tokens, labels=tokens)
        else:
            torch.manual_seed(0)
            plain = build("sdpa")
            plain.load_state_dict(model.state_dict())
            losses = [one.eval()(input_ids=tokens, labels=tokens).loss for one in (model, plain)]
            assert torch.equal(*losses)


def bloom(implementation: str) -> torch.nn.Module:
    """Its own attention got no mask: it saw the tokens that it is to predict."""
    from transformers import BloomConfig, BloomForCausalLM

    class OfAUser(BloomForCausalLM):
        pass

    return OfAUser._from_config(
        BloomConfig(vocab_size=100, hidden_size=32, n_layer=1, n_head=2), attn_implementation=implementation
    )


def falcon(implementation: str) -> torch.nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    return FalconForCausalLM._from_config(config, attn_implementation=implementation)


def deberta(implementation: str) -> torch.nn.Module:
    """Asks for no mask either."""
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(
        vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return DebertaV2ForMaskedLM._from_config(config, attn_implementation=implementation)


@pytest.mark.slow
@pytest.mark.parametrize("build", [bloom, falcon, deberta])
def test_a_model_of_transformers_that_computes_its_attention_itself_is_refused(
    build: Callable[[str], torch.nn.Module],
) -> None:
    from flashpoint.huggingface import implementation

    build("eager")
    with pytest.raises(ValueError, match=r"(OfAUser|For\w+LM) computes its attention itself"):
        build(implementation("flash_exact_rowsum"))


@pytest.mark.slow
def test_a_users_model_that_takes_its_attention_from_transformers_is_not_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from flashpoint.huggingface import implementation

    class OfAUser(GPT2LMHeadModel):
        pass

    OfAUser.__module__ = "__main__"  # of a notebook: its source is not at hand
    config = GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=2)
    OfAUser._from_config(config, attn_implementation=implementation("flash_exact_rowsum"))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_compiled_model_of_transformers_trains_with_it() -> None:
    """Transformers hands it the causal mask then, which it leaves out of a model that is not compiled."""
    from flashpoint.huggingface import implementation

    model = gpt2(implementation("flash_exact_rowsum")).to(DEVICE)
    model.config.use_cache = False
    compiled = torch.compile(model, backend="aot_eager")
    tokens = torch.randint(0, 100, (2, 33), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grads = []
    for called in (model, compiled):
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            called(tokens, labels=tokens).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    if DEVICE == "cpu":  # on a GPU the error ends the process's use of it
        padded = torch.ones_like(tokens).index_fill(1, torch.arange(3), 0)
        with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(RuntimeError, match="padding"):
            compiled(tokens, attention_mask=padded)
