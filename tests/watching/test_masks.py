"""Masks, dropout and shapes of attention calls: what is recorded, and what is left out with a reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpoint.diagnosis.verdict import diagnose
from flashpoint.watching.captures import read_calls
from flashpoint.watching.functions import masking
from flashpoint.watching.interception import intercepting_interface
from flashpoint.watching.interceptor import Interceptor
from flashpoint.watching.loop import Watch
from tests.watching.loops import loop

LOWER = torch.ones(12, 12, dtype=torch.bool).tril()


def added(seen: Tensor, least: float = -torch.inf) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, least)


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (LOWER, True),
        (LOWER.expand(2, 1, 12, 12), True),
        (added(LOWER), True),
        (added(LOWER, torch.finfo(torch.bfloat16).min).bfloat16(), True),
        (torch.ones(12, 12, dtype=torch.bool), False),
        (torch.zeros(2, 1, 12, 12), False),
        (added(LOWER) + torch.arange(12.0), None),  # a bias, as ALiBi's
        (LOWER.triu(-3), None),  # a window
        (LOWER & (torch.arange(12) > 2), None),  # padding
        (added(LOWER, -5.0), None),
        (torch.ones(3, 12, dtype=torch.int64), None),
        (object(), None),
    ],
)
def test_a_mask_is_causal_or_none_or_another(mask: Any, causal: bool | None) -> None:
    assert masking(mask, 12) is causal


class Masked(nn.Module):
    """One layer of attention of 4 heads with whatever the call is given."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor], value_size: int = 8) -> None:
        super().__init__()
        self.call = call
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4 * value_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(*(part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)))


@pytest.mark.parametrize("mask", [LOWER, added(LOWER)])
def test_a_causal_mask_is_recorded_as_is_causal(tmp_path: Path, mask: Tensor) -> None:
    model = Masked(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    loop(tmp_path, model, captured, steps=1)
    (call,) = read_calls(tmp_path / "own")
    assert call.form.is_causal
    assert diagnose(call).findings == ()


def captured(model: nn.Module, _number: int, watched: Watch) -> None:
    watched.capture(sequences=0)
    loss = model(torch.randn(3, 12, 32)).square().mean()
    loss.backward()
    watched.step(loss)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Masked(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, LOWER.triu(-3))), "a mask"),
        (Masked(lambda *qkv: F.scaled_dot_product_attention(*qkv, dropout_p=0.1)), "dropout"),
        (Masked(lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1])), "expand k and v to those of q"),
        (Masked(F.scaled_dot_product_attention, value_size=16), "out [3, 4, 12, 16]: not as many features a head"),
        (Masked(lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :7], v[:, :, :7])), "k [3, 4, 7, 8], v"),
        (Masked(lambda q, k, v: F.scaled_dot_product_attention(q, k, v[:, :1])), "v [3, 1, 12, 8], out"),
        (
            Masked(lambda *qkv: F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in qkv), is_causal=True)),
            "q [12, 12, 8], k [12, 12, 8], v [12, 12, 8], out [12, 12, 8]: not four dimensions; make them [B, H, T, d]",
        ),
    ],
)
def test_what_cannot_be_diagnosed_is_left_out_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: nn.Module, told: str
) -> None:
    loop(tmp_path, model, captured, steps=2)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "no attention was recorded" in line and told in line]
    assert not [line for line in lines if "failed" in line]
    assert not (tmp_path / "own/captures").exists()


def vmapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = torch.vmap(lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True))(q, k, v)
    return out


def named(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def vmapped_over_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Inside the transform the tensors have four dimensions, as those of a call that is recorded."""
    inside: Callable[..., Tensor] = torch.vmap(lambda *qkv: named(*qkv), in_dims=2, out_dims=2)
    return inside(*(x.unflatten(1, (2, 2)) for x in (q, k, v))).flatten(1, 2)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, of vmap
@pytest.mark.parametrize("call", [vmapped, vmapped_over_groups])
def test_a_call_inside_a_transform_is_left_out_by_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: Callable[..., Tensor]
) -> None:
    loop(tmp_path, Masked(call), captured, steps=2, functions=[f"{__name__}:named"])
    told = capsys.readouterr().err
    assert "inside torch.vmap" in told
    assert "frozen" not in told
    assert "failed" not in told


def test_multi_head_attention_that_returns_its_weights_is_left_out_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Weighing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]  # type: ignore[no-any-return]

    loop(tmp_path, Weighing(), steps=1)
    assert "need_weights" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("dropout", "recorded"), [({}, False), ({"attn_pdrop": 0.0}, True)])
def test_the_dropout_that_gpt2_has_is_told_with_its_remedy_and_that_no_warning_comes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    implementation: str,
    dropout: dict[str, float],
    recorded: bool,
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16, n_positions=12, n_embd=32, n_layer=1, n_head=4, **dropout)
    model: Any = GPT2LMHeadModel._from_config(config, attn_implementation=implementation).train()

    def step(model: Any, _number: int, watched: Watch) -> None:
        tokens = torch.randint(16, (2, 12))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        watched.step(loss, tokens)

    run = loop(tmp_path, model, step, steps=2)
    told = capsys.readouterr().err
    assert ("attn_pdrop=0.0" in told) == ("no early warning comes" in told) == (not recorded)
    assert ("w_q_spectral_norm" in (run.folder.metrics.read_text() if run.folder else "")) == recorded


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("settings", "padded", "told"),
    [
        ({}, False, ""),
        ({"attention_dropout": 0.1}, False, "dropout"),
        ({}, True, "a mask beside the causal one"),
        ({"sliding_window": 4}, False, "a mask beside the causal one"),
    ],
)
def test_transformers_masks_and_dropout_are_left_out_aloud(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    implementation: str,
    settings: dict[str, Any],
    padded: bool,
    told: str,
) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, **{"sliding_window": None, **settings},
    )  # fmt: skip
    model: Any = MistralForCausalLM._from_config(config, attn_implementation=implementation).train()
    seen = torch.ones(2, 12, dtype=torch.int64)
    seen[0, : 3 * padded] = 0

    def step(model: Any, _number: int, watched: Watch) -> None:
        watched.capture(sequences=0)
        tokens = torch.randint(16, (2, 12))
        loss = model(input_ids=tokens, labels=tokens, attention_mask=seen).loss
        loss.backward()
        watched.step(loss)

    loop(tmp_path, model, step, steps=2)
    err = capsys.readouterr().err
    assert f"{implementation}: {told}" in err if told else "no attention" not in err
    calls = [] if told else read_calls(tmp_path / "own")
    assert [diagnose(call).findings for call in calls] == [()] * (not told)


@pytest.mark.parametrize(
    ("packed", "given", "told"),
    [
        (False, {"position_ids": torch.arange(12)[None]}, None),
        (False, {"cu_seq_lens_q": torch.tensor([0, 12])}, None),
        (True, {"position_ids": torch.arange(12)[None] % 9}, "packed sequences"),
        (True, {"cu_seq_lens_q": torch.tensor([0, 9, 12])}, "packed sequences"),
        (True, {}, "O is not softmax(α·QKᵀ)V, causal"),
    ],
)
def test_what_is_not_causal_though_no_mask_tells_so_is_left_out_aloud(
    packed: bool, given: dict[str, Tensor], told: str | None
) -> None:
    """FlashAttention in Transformers takes several sequences in one row by their positions; there is no mask then."""
    interceptor = Interceptor(sequences=1)

    def attend(_module: Any, q: Tensor, k: Tensor, v: Tensor, _mask: None, **_: Any) -> tuple[Tensor, None]:
        seen = LOWER.clone()
        seen[9:, :9] &= not packed
        if told and not given:  # a model that is said to be causal, and is not
            seen[:] = True
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2), None

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 12, 8, requires_grad=True) for heads in (4, 2, 2))
    get_interface = intercepting_interface(interceptor, lambda *_: attend)
    get_interface(None, "flash_attention_2", attend)(nn.Module(), q, k, v, None, **given)
    assert set(interceptor.calls.missed) == (set() if told is None else {f"flash_attention_2: {told}"})
    assert len(interceptor.calls) == (told is None)
