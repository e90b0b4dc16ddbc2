"""Masks, dropout and shapes of attention calls: what is left out, with a reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from flashpoint.diagnosis.verdict import diagnose
from flashpoint.watching.captures import read_calls
from flashpoint.watching.interceptor import Interceptor
from flashpoint.watching.loop import Watch
from tests.watching.loops import loop


class Masked(nn.Module):
    """One layer of attention of 4 heads with whatever the call is given."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(*(part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)))


def captured(model: nn.Module, _number: int, watched: Watch) -> None:
    watched.capture(sequences=0)
    loss = model(torch.randn(3, 12, 32)).square().mean()
    loss.backward()
    watched.step(loss)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Masked(lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1])), "expand k and v to those of q"),
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
def test_a_dropout_that_is_not_seen_is_told_with_its_remedy_and_that_no_warning_comes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    implementation: str,
    dropout: dict[str, float],
    recorded: bool,
) -> None:
    """As on a GPU, where a kernel draws it. GPT-2 has some by default."""
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setattr(Interceptor, "see_dropout", lambda *_: None)
    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.Generator().get_state())
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


@pytest.mark.parametrize(
    ("bias", "queries"), [(causal_upper_left, 12), (causal_upper_left, 7), (causal_lower_right, 7)]
)
def test_pytorchs_causal_bias_is_recorded_as_the_mask_that_it_is(
    tmp_path: Path, bias: Callable[..., Tensor], queries: int
) -> None:
    """It holds no numbers: what lay in its memory was taken for a bias."""
    model = Masked(lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :queries], k, v, bias(queries, 12)))
    loop(tmp_path, model, captured, steps=2)
    (call,) = read_calls(tmp_path / "own")
    offset = 12 - queries if bias is causal_lower_right else 0
    seen = torch.ones(queries, 12, dtype=torch.bool).tril(offset)
    assert call.form.bias is None
    scores = call.form.scores(torch.zeros(4, queries, 12), 0)
    assert torch.equal(scores > -torch.inf, seen.expand(4, -1, -1))
    assert not diagnose(call).findings
