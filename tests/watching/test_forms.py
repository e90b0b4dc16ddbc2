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
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashpoint
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.verdict import diagnose
from flashpoint.watching.agreement import agreeing
from flashpoint.watching.captures import read_calls
from flashpoint.watching.interception import intercepting_interface
from flashpoint.watching.interceptor import Interceptor
from flashpoint.watching.loop import Watch
from tests.watching.loops import loop

BATCH, HEADS, LENGTH, SIZE = 3, 4, 12, 8
LOWER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
SOME = torch.ones(BATCH, LENGTH, dtype=torch.bool)
"""Tokens that are no padding: all of two sequences, and nine of the second."""
SOME[1, 9:] = False
PADDED = SOME[:, None, None]
WINDOW = LOWER.triu(-3)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def added(seen: Tensor, least: float = -torch.inf) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, least)


def sdpa(**options: Any) -> Attend:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


class Model(nn.Module):
    """One layer of attention in FP64, of 4 heads of queries, with whatever the call is given.

    Args:
        others: tokens of another sequence, to whose keys and values the first one attends; None is itself.
    """

    def __init__(self, call: Attend, heads_kv: int = HEADS, values: int = SIZE, others: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.call, self.others = call, others
        self.sizes = [HEADS * SIZE, heads_kv * SIZE, heads_kv * values]
        self.heads = (HEADS, heads_kv, heads_kv)
        self.q, self.k, self.v = (nn.Linear(32, size, dtype=torch.float64) for size in self.sizes)
        self.bias = nn.Parameter(torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.others is None else x.repeat(1, 3, 1)[:, : self.others].flip(0)
        parts = zip((self.q, self.k, self.v), (x, y, y), self.heads, strict=True)
        return self.call(*(part(of).unflatten(-1, (heads, -1)).transpose(1, 2) for part, of, heads in parts))


def captured(model: nn.Module, number: int, watched: Watch) -> None:
    if number == 0:
        watched.capture(sequences=0)
    loss = model(2 * torch.randn(BATCH, LENGTH, 32, dtype=torch.float64)).square().mean()
    loss.backward()
    watched.step(loss)


def call_of(folder: Path, model: nn.Module, **options: Any) -> AttentionCall:
    run = loop(folder, model, captured, steps=2, **options)
    assert run.manifest.not_recorded == ()
    (call,) = read_calls(folder / "own")
    return call


def assert_exact(call: AttentionCall) -> None:
    for n in range(len(call.q)):
        true = exact(call, n)
        for name in ("out", "grad_q", "grad_k", "grad_v"):
            expected, found = getattr(call, name)[n], getattr(true, name)
            if name in ("grad_k", "grad_v"):
                found = (
                    found.reshape(expected.shape)
                    if found.shape == expected.shape
                    else found.unflatten(0, (len(expected), -1)).sum(1)
                )
            torch.testing.assert_close(found, expected, msg=lambda told, name=name: f"{name}: {told}")


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


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
    visible: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Stands in for flash-attn's function, and has two masks more; [B, T, H, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    queries, keys = scores.shape[-2:]
    ahead = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.reshape(-1, len(alibi_slopes.flatten()), 1, 1) * ahead.abs()
    left, right = (side if side >= 0 else keys for side in window_size)
    scores = scores.masked_fill((ahead < -left) | (ahead > (0 if causal else right)), -torch.inf)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
    sinks = scores[..., :0] if s_aux is None else s_aux[:, None, None].expand_as(scores[..., :1])
    weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :keys]
    return (F.dropout(weights, dropout_p) @ v).transpose(1, 2)


def flash_with(*positional: Any, others: int | None = None, **options: Any) -> nn.Module:
    return Model(
        lambda *qkv: flash(*(x.transpose(1, 2) for x in qkv), *positional, **options).transpose(1, 2), others=others
    )


NAMED: dict[str, Callable[[], nn.Module]] = {
    "nothing": lambda: flash_with(causal=True),
    "a window": lambda: flash_with(0.0, None, True, (3, 0)),
    "a window of both sides": lambda: flash_with(window_size=(2, 1)),
    "a cap": lambda: flash_with(0.0, 0.5, True, (-1, -1), 3.0),
    "slopes": lambda: flash_with(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0]), causal=True),
    "slopes with dimensions of 1": lambda: flash_with(alibi_slopes=torch.rand(1, 4, 1, 1), causal=True),
    "a sink": lambda: flash_with(s_aux=torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64), causal=True),
    "dropout": lambda: flash_with(0.25, causal=True),
    "two lengths, causal": lambda: flash_with(causal=True, others=19),
    "two lengths, a window": lambda: flash_with(causal=True, window_size=(4, -1), others=19),
    "a mask of another name": lambda: flash_with(visible=PADDED & LOWER),
    "a mask that hides": lambda: flash_with(key_padding_mask=~SOME, causal=True),
    "all at once": lambda: flash_with(
        0.25, 0.5, True, (4, -1), 5.0, torch.tensor([0.5, 0.25, 0.1, 0.0]), torch.ones(4), PADDED, others=12
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_what_a_named_function_is_told_is_recorded(tmp_path: Path, name: str) -> None:
    call = call_of(tmp_path, NAMED[name](), functions=[f"{__name__}:flash@bthd"])
    assert call.form.is_plain is (name in ("nothing", "a sink"))
    assert_exact(call)
    assert diagnose(call).findings == ()


def causal_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As a function of a package's own that calls flash-attn's with keys of a segment before."""
    return flash(q, k, v, causal=True)


def full_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


@pytest.mark.parametrize(
    ("inside", "others"),
    [(causal_inside, 19), (causal_inside, 40), (full_inside, 1), (full_inside, 19), (full_inside, 40)],
)
def test_of_two_lengths_o_shows_which_mask_is_inside(
    tmp_path: Path, inside: Callable[..., Tensor], others: int
) -> None:
    name = inside.__name__
    model = Model(lambda *qkv: globals()[name](*(x.transpose(1, 2) for x in qkv)).transpose(1, 2), others=others)
    call = call_of(tmp_path, model, functions=[f"{__name__}:{name}@bthd"])
    assert (call.form.mask is not None) is (inside is causal_inside)
    assert_exact(call)
    assert diagnose(call).findings == ()


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
) -> Tensor:
    """Stands in for flash-attn's function of sequences in a row, [T, H, d]: each by itself goes to PyTorch's."""
    assert max_seqlen_q == max_seqlen_k
    sizes = cu_seqlens_q.diff().tolist()
    each = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)), strict=True)
    parts = [F.scaled_dot_product_attention(*(x[None] for x in one), is_causal=causal)[0] for one in each]
    return torch.cat(parts, 1).transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_in_a_row_are_recorded_as_one_with_a_mask(tmp_path: Path, causal: bool) -> None:
    """A gradient between two of them would be told of the mask."""
    ends = torch.tensor([0, 5, 19, 36], dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        out = flash_varlen(
            *packed, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=17, max_seqlen_k=17, causal=causal
        )
        return out.unflatten(0, (BATCH, LENGTH)).transpose(1, 2)

    call = call_of(tmp_path, Model(attend), functions=[f"{__name__}:flash_varlen@bthd"])
    assert call.q.shape == (1, HEADS, BATCH * LENGTH, SIZE)
    assert call.form.is_causal is causal
    of = torch.searchsorted(ends, torch.arange(36), right=True)
    seen = (of[:, None] == of) & (torch.ones(36, 36).tril().bool() if causal else True)
    found = call.form.mask & torch.ones(36, 36).tril().bool() if causal else call.form.mask
    assert torch.equal(found[0, 0], seen)
    assert_exact(call)
    assert diagnose(call).findings == ()


def test_slopes_that_are_not_of_the_heads_are_refused_by_their_shape(tmp_path: Path) -> None:
    model = flash_with(alibi_slopes=torch.tensor([0.5]), causal=True)
    run = loop(tmp_path, model, captured, steps=1, functions=[f"{__name__}:flash@bthd"])
    (reason,) = run.manifest.not_recorded
    assert "alibi_slopes [1], where [H] is [4]" in reason


def flexible(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: BlockMask | None = None
) -> Tensor:
    """Stands in for PyTorch's flex_attention, which has no backward pass on a CPU."""
    scores = query @ key.mT * SIZE**-0.5
    at = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *at)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(*at), -torch.inf)
    return scores.softmax(-1) @ value


def in_documents(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & ((i < 5 + b) == (j < 5 + b))


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"block_mask": create_block_mask(in_documents, BATCH, None, LENGTH, LENGTH, "cpu")}, {"mask": BATCH}),
        ({"score_mod": lambda s, _b, h, i, j: torch.where(i >= j, s - (i - j) / (2 + h), -torch.inf)}, {"bias": 1}),
        ({"score_mod": lambda s, _b, _h, i, j: torch.where(i >= j, 3 * torch.tanh(s / 3), -torch.inf)}, {}),
    ],
    ids=["block mask", "bias", "cap"],
)
def test_functions_of_flex_attention_are_evaluated(
    tmp_path: Path, options: dict[str, Any], shapes: dict[str, int]
) -> None:
    model = Model(lambda q, k, v: flexible(q, k, v, **options))
    call = call_of(tmp_path, model, functions=[f"{__name__}:flexible"])
    assert call.form.is_causal
    assert {name: len(x) for name, x in call.form.tensors.items()} == shapes
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
