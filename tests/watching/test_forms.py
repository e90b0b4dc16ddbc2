"""Masks, biases, caps, sinks and dropout of attention calls: each is recorded as a form, of which FP64 makes the
gradients that PyTorch's autograd found, or left out with a reason."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashpoint
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.verdict import diagnose
from flashpoint.watching.agreement import agreeing
from flashpoint.watching.interception import intercepting_interface
from flashpoint.watching.interceptor import Interceptor
from flashpoint.watching.loop import Watch
from tests.watching.forms import (
    BATCH,
    HEADS,
    LENGTH,
    LOWER,
    PADDED,
    SIZE,
    SOME,
    WINDOW,
    Model,
    added,
    assert_exact,
    call_of,
    captured,
    sdpa,
)
from tests.watching.loops import loop

SDPA: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a causal mask": (lambda: Model(sdpa(attn_mask=LOWER)), {"is_causal": True, "mask": None}),
    "an added causal mask": (lambda: Model(sdpa(attn_mask=added(LOWER, -1e38))), {"is_causal": True, "mask": None}),
    "a window": (lambda: Model(sdpa(attn_mask=WINDOW)), {"is_causal": True, "mask": [1, 1, LENGTH, LENGTH]}),
    "padding": (lambda: Model(sdpa(attn_mask=PADDED)), {"is_causal": False, "mask": [BATCH, 1, 1, LENGTH]}),
    "added padding of each head": (
        lambda: Model(sdpa(attn_mask=added(PADDED & LOWER).repeat(1, HEADS, 1, 1))),
        {"is_causal": True, "mask": [BATCH, 1, LENGTH, LENGTH], "bias": None},
    ),
    "rows that see nothing": (
        lambda: Model(sdpa(attn_mask=PADDED.flip(-1) & LOWER)),
        {"is_causal": True, "mask": [BATCH, 1, LENGTH, LENGTH]},
    ),
    "a bias of positions": (
        lambda: Model(sdpa(attn_mask=torch.randn(LENGTH, LENGTH, dtype=torch.float64))),
        {"is_causal": False, "bias": [1, 1, LENGTH, LENGTH], "mask": None},
    ),
    "two lengths": (lambda: Model(sdpa(), others=7), {"is_causal": False}),
    "two lengths, causal": (lambda: Model(sdpa(is_causal=True), others=19), {"is_causal": True, "mask": None}),
    "two lengths, padding": (
        lambda: Model(sdpa(attn_mask=PADDED[..., 3:10]), others=7),
        {"is_causal": False, "mask": [BATCH, 1, 1, 7]},
    ),
    "other values": (lambda: Model(sdpa(is_causal=True), values=20), {"is_causal": True}),
    "shared keys": (
        lambda: Model(sdpa(attn_mask=WINDOW, enable_gqa=True), heads_kv=2),
        {"is_causal": True, "mask": [1, 1, LENGTH, LENGTH]},
    ),
    "dropout": (
        lambda: Model(sdpa(dropout_p=0.3, is_causal=True, enable_gqa=True), heads_kv=2),
        {"is_causal": True, "dropout": 0.3, "kept": [BATCH, HEADS, LENGTH, LENGTH]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SDPA)
def test_what_pytorchs_attention_is_told_is_recorded(tmp_path: Path, name: str) -> None:
    make, told = SDPA[name]
    call = call_of(tmp_path, make())
    for of, wanted in told.items():
        found = getattr(call.form, of)
        assert (list(found.shape) if isinstance(found, Tensor) else found) == wanted, of
    assert_exact(call)
    assert diagnose(call).findings == ()


def test_a_bias_that_is_learned_keeps_its_gradient(tmp_path: Path) -> None:
    model = Model(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, model.bias.masked_fill(~LOWER, -torch.inf)))
    alone = copy.deepcopy(model)
    alone.call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, alone.bias.masked_fill(~LOWER, -torch.inf))
    call = call_of(tmp_path / "watched", model)
    assert_exact(call)
    assert call.form.is_causal
    assert call.form.bias is not None
    loop(tmp_path / "alone", alone, captured, steps=2, interval=100, weights_interval=100)
    assert torch.equal(model.bias, alone.bias)


@pytest.mark.parametrize(
    "given",
    [{"attn_mask": WINDOW}, {"key_padding_mask": ~SOME}, {"attn_mask": ~WINDOW, "key_padding_mask": ~SOME}],
    ids=["mask", "padding", "both"],
)
def test_masks_of_multi_head_attention_are_recorded(tmp_path: Path, given: dict[str, Tensor]) -> None:
    class Multi(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, HEADS, batch_first=True, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            told = {name: ~mask if mask is WINDOW else mask for name, mask in given.items()}
            return self.attention(x, x, x, need_weights=False, **told)[0]  # type: ignore[no-any-return]

    call = call_of(tmp_path, Multi())
    assert call.form.mask is not None
    assert call.form.mask.shape[0] == (BATCH if "key_padding_mask" in given else 1)
    assert_exact(call)


PACKED = torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4])[None]
DOCUMENTS = LOWER & ((torch.arange(LENGTH) < 7) == (torch.arange(LENGTH) < 7)[:, None])


@pytest.mark.parametrize(
    ("seen", "mask", "given", "recorded"),
    [
        (LOWER, None, {"position_ids": torch.arange(LENGTH)[None]}, "causal"),
        (LOWER, None, {"cu_seq_lens_q": torch.tensor([0, LENGTH])}, "causal"),
        (DOCUMENTS, None, {"position_ids": PACKED}, "masked"),
        (DOCUMENTS, None, {"cu_seq_lens_q": torch.tensor([0, 7, LENGTH])}, "masked"),
        (WINDOW, None, {"sliding_window": 4}, "masked"),
        (WINDOW.triu(-1) | WINDOW.triu(-1).mT, None, {"sliding_window": 2, "is_causal": False}, "masked"),
        (LOWER & SOME[1:2, None] & SOME[1:2, :, None], SOME[1:2], {}, "masked"),
        (LOWER.triu(-2), None, {"sliding_window": 4}, ""),
        (WINDOW.roll(1, 0), WINDOW[None, None], {}, ""),
        (torch.ones_like(LOWER), None, {}, ""),  # a model that is said to be causal, and is not
    ],
)
def test_what_flashattention_in_transformers_is_told_is_recorded_if_o_shows_it(
    seen: Tensor, mask: Tensor | None, given: dict[str, Any], recorded: str
) -> None:
    interceptor = Interceptor(sequences=1)

    def attend(_module: Any, q: Tensor, k: Tensor, v: Tensor, _mask: Any, **_: Any) -> tuple[Tensor, None]:
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2), None

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, LENGTH, SIZE, requires_grad=True) for heads in (4, 2, 2))
    get_interface = intercepting_interface(interceptor, lambda *_: attend)
    get_interface(None, "flash_attention_2", attend)(nn.Module(), q, k, v, mask, **given)
    assert interceptor.calls.failed == set()
    if not recorded:
        (reason,) = interceptor.calls.missed
        assert reason.startswith("flash_attention_2: O is not softmax(QKᵀ·scale)V")
        return
    (shown,) = interceptor.calls
    form = shown.called.form
    assert form.is_plain is (recorded == "causal")
    assert form.is_causal is bool(given.get("is_causal", True))


def test_layers_share_one_copy_of_their_mask() -> None:
    interceptor = Interceptor(sequences=2)
    q = torch.randn(BATCH, HEADS, LENGTH, SIZE, requires_grad=True)
    mask = (PADDED & LOWER).float().log()

    def attend(_module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **_: Any) -> tuple[Tensor, None]:
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2), None

    get_interface = intercepting_interface(interceptor, lambda *_: attend)
    for _ in range(2):
        get_interface(None, "mine", attend)(nn.Module(), q, q, q, mask)
    mask[:, :, 5:, 0] = -torch.inf  # another mask in the same place
    get_interface(None, "mine", attend)(nn.Module(), q, q, q, mask)
    first, second, third = (shown.called.form.mask for shown in interceptor.calls)
    assert first is not None
    assert first is second
    assert third is not None
    assert first.shape == third.shape == (2, 1, LENGTH, LENGTH)
    assert int(first.sum() - third.sum()) == 2 * 7


def test_a_mask_that_is_too_large_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashpoint.watching.masks._LARGEST", BATCH * LENGTH * LENGTH - 1)
    (told,) = loop(tmp_path, Model(sdpa(attn_mask=PADDED & LOWER)), captured, steps=2).manifest.not_recorded
    assert "scaled_dot_product_attention: mask [3, 1, 12, 12] is" in told


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_watched_training_with_masks_and_dropout_keeps_its_bits(tmp_path: Path, p: float) -> None:
    def trained(watch: bool) -> list[Tensor]:
        model = Model(sdpa(attn_mask=PADDED & LOWER, dropout_p=p))
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with flashpoint.watch(model, runs_dir=tmp_path, name="own", interval=1 if watch else 1000) as watched:
            for number in range(3):
                (captured if watch else captured_never)(model, number, watched)
                optimizer.step()
                optimizer.zero_grad()
        return [*model.parameters()]

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


def captured_never(model: nn.Module, _number: int, watched: Watch) -> None:
    loss = model(2 * torch.randn(BATCH, LENGTH, 32, dtype=torch.float64)).square().mean()
    loss.backward()
    watched.step(loss)


def test_rows_beside_a_large_sink_may_be_too_small_for_fp16() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, LENGTH, SIZE, generator=generator).half()
    form = Form(True, 1.0, sink=torch.full((2,), 18.0))
    call = AttentionCall(q, k, v, v, form, 1, 0, "f")
    out = torch.stack([exact(call, 0).out]).half()
    assert agreeing([form], [q, k, v, out], closely=True) is form


LEFT = torch.ones(BATCH, LENGTH, dtype=torch.bool)
"""Padding before the text of the second sequence; all of the third is padding."""
LEFT[1, :5], LEFT[2] = False, False


def test_a_row_whose_keys_a_bias_closes_softly_has_weights_and_may_have_any_by_rounding() -> None:
    """−10,000 is added to all keys that padding leaves to nine rows. In FP16 numbers lie 8 nats apart there."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 33, 8).half()
    there = (torch.arange(33) >= 9)[None, None, None]
    prefix = (torch.ones(33, 33, dtype=torch.bool).tril() | (torch.arange(33) < 4))[None, None]
    bias = torch.zeros(1, 1, 33, 33).masked_fill(~prefix, -10_000.0).half()
    rounded = (3 * (q @ k.mT) + bias).masked_fill(~there, -torch.inf)
    out = (rounded.float().softmax(-1) @ v.float()).half()
    forms = [Form(is_causal, 3.0, bias=bias, mask=there) for is_causal in (True, False)]
    assert agreeing(forms, [q, k, v, out], closely=True) is forms[1]
    assert agreeing(forms, [q, k, v, out.flip(-1)], closely=True) is None
    nothing_but = Form(False, 3.0, bias=bias - 20_000)
    assert agreeing([nothing_but], [q, k, v, out.flip(-1)], closely=True) is None


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: str) -> Tensor:
    """An attention that is written out, as people write it; its rows without a key are NaN, 0 or the mean of V."""
    scores = q @ k.mT * SIZE**-0.5
    if how == "added":
        return (scores + added(mask, torch.finfo(torch.float64).min)).softmax(-1) @ v
    weights = scores.masked_fill(~mask, -1e9 if how == "large" else -torch.inf).softmax(-1)
    return (weights.nan_to_num(0.0) if how == "zero" else weights) @ v


@pytest.mark.slow
@pytest.mark.parametrize("depends", [False, True])
@pytest.mark.parametrize("how", ["added", "large", "zero"])
def test_rows_that_see_no_key_are_left_out_of_what_is_judged(tmp_path: Path, how: str, depends: bool) -> None:
    """``depends``: a gradient comes to such rows where their O is not 0, and dK and dV have a part of it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = eager(q, k, v, mask=LEFT[:, None, None] & LOWER, how=how)
        return out if depends else out * LEFT[:, None, :, None]

    call = call_of(tmp_path, Model(attend), functions=[f"{__name__}:eager"])
    found = diagnose(call)
    assert found.findings == ()
    assert found.with_keys is (depends and how != "zero")
    assert found.empty_rows == (HEADS * 17, HEADS * 17 * found.with_keys)


def test_rows_without_a_key_whose_o_is_nan_are_named_where_gradients_are_nan(tmp_path: Path) -> None:
    """0 times NaN is NaN: their weights make dV NaN, though no loss takes these rows."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = eager(q, k, v, mask=LEFT[:, None, None] & LOWER, how="nan")
        return torch.where(LEFT[:, None, :, None], out, 0.0)

    (finding,) = diagnose(call_of(tmp_path, Model(attend), functions=[f"{__name__}:eager"])).findings
    assert finding.kind == "nonfinite"
    assert f"O, NaN in {HEADS * 17} rows that see no key" in finding.text
    assert "O, dO" not in finding.text  # are finite, it would say
