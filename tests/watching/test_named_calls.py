"""Attention functions that are named, however they are called: the loop gets what they return, and goes on."""

import contextlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpoint.diagnosis.verdict import diagnose
from flashpoint.errors import UserError
from flashpoint.watching.captures import read_calls
from flashpoint.watching.functions import NoMask, replaced
from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair, loop, plain


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool = True, scale: Any = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale and float(scale))


def packed(qkv: Tensor, causal: bool = True) -> Tensor:
    return attend(*qkv.unbind(0), causal=causal)


def in_a_dict(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    return {"out": attend(q, k, v)}


def in_a_list(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor | None]:
    return [attend(q, k, v), None]


class Model(nn.Module):
    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.call = nn.Linear(32, 96), nn.Linear(32, 32), call

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.out(self.call(q, k, v).transpose(1, 2).flatten(2))


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "attend": lambda q, k, v: attend(value=v, key=k, query=q),
    "in_a_list": lambda q, k, v: in_a_list(q, k, v)[0],
    "packed": lambda q, k, v: packed(torch.stack((q, k, v))),
    "in_a_dict": lambda q, k, v: in_a_dict(q, k, v)["out"],
}


def captured(model: nn.Module, number: int, watched: Watch) -> None:
    if number == 0:
        watched.capture(sequences=0)
    plain(model, number, watched)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attend", "in_a_list"])
def test_arguments_by_name_and_a_list_of_results_are_recorded(tmp_path: Path, name: str) -> None:
    loop(tmp_path, Model(CALLS[name]), captured, functions=[f"{__name__}:{name}"])
    by_name = read_calls(tmp_path / "own")
    loop(tmp_path / "plain", Model(attend), captured)
    for one, other in zip(by_name, read_calls(tmp_path / "plain/own"), strict=True):
        assert one.attention == f"{__name__}:{name}"
        assert all(torch.equal(getattr(one, of), getattr(other, of)) for of in ("q", "k", "v", "out", "grad_out"))


def test_a_scale_in_a_tensor_is_a_number(tmp_path: Path) -> None:
    model = Model(lambda q, k, v: attend(q, k, v, scale=torch.tensor(0.25)))
    loop(tmp_path, model, captured, functions=[f"{__name__}:attend"])
    assert read_calls(tmp_path / "own")[0].form.scale == 0.25


@pytest.mark.parametrize(
    ("name", "told"),
    [("packed", "called without q, k, v as its first three arguments"), ("in_a_dict", "returns dict")],
)
def test_a_call_that_cannot_be_read_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    assert loop(tmp_path, Model(CALLS[name]), functions=[f"{__name__}:{name}"]).verdict == "stable to 4"
    assert capsys.readouterr().err.count(told) == 1


@pytest.mark.parametrize("of", ["forward", "backward", "mask"])
def test_no_memory_for_copies_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], of: str
) -> None:
    tries: list[int] = []

    def full(*_given: Any, **_options: Any) -> Any:
        tries.append(1)
        raise torch.OutOfMemoryError(f"CUDA out of memory. {len(tries)} bytes are free")

    place = {"forward": "interceptor.AttentionCalled", "mask": "masks._fitted"}.get(of)
    with contextlib.ExitStack() as entered:
        if place:
            monkeypatch.setattr(f"flashpoint.watching.{place}", full)
        else:
            entered.enter_context(replaced(torch.Tensor, "clone", _but_in_backward(Tensor.clone, full)))
        model = Model(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(12, 12, dtype=torch.bool)))
        assert loop(tmp_path, model if of == "mask" else Pair()).verdict == "stable to 4"
    assert tries
    assert capsys.readouterr().err.count("no memory for its copies; give a smaller sequences=") == 1
    assert json.loads((tmp_path / "own/outcome.json").read_text())["step"] == 4


def _but_in_backward(clone: Callable[..., Any], full: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **options: (clone if torch._C._current_graph_task_id() == -1 else full)(*given, **options)


def test_why_attentions_are_left_out_is_written_down_once(tmp_path: Path) -> None:
    """For who diagnoses the run later: there is no capture, and the line in the loop is gone."""
    model = Model(lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1]))
    run = loop(tmp_path, nn.Sequential(model, Model(CALLS["packed"])), functions=[f"{__name__}:packed"])
    expand, given = run.manifest.not_recorded
    assert expand.startswith("scaled_dot_product_attention: q [3, 4, 12, 8], k [1, 4, 12, 8]")
    assert given.startswith(f"{__name__}:packed: called without q, k, v")
    assert run.folder is not None
    with pytest.raises(UserError, match=r"its attention was not recorded \(scaled_dot_product_attention: q"):
        read_calls(run.folder.path)
    assert loop(tmp_path / "none", nn.Linear(32, 32)).manifest.not_recorded[0].startswith("the watched model called")
    whole = loop(tmp_path / "all", Pair())
    assert whole.folder is not None
    assert whole.manifest.not_recorded == ()
    with pytest.raises(UserError, match=r"watched\.capture\(\) in the loop makes one"):
        read_calls(whole.folder.path)


@pytest.mark.slow
@pytest.mark.parametrize("called", [True, False])
def test_a_function_that_is_not_called_by_its_name_is_told_beside_one_that_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], called: bool
) -> None:
    held = [attend]
    model = nn.Sequential(Pair(), Model(CALLS["attend"] if called else held[0]))
    run = loop(tmp_path, model, functions=[f"{__name__}:attend"])
    told = f"{__name__}:attend was not called by its name in a module"
    assert capsys.readouterr().err.count(told) == (not called)
    assert [reason.startswith(told) for reason in run.manifest.not_recorded] == [True] * (not called)


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
    attn_mask: Tensor | None = None,
    s_aux: Tensor | None = None,
    training: bool = True,
) -> Tensor:
    """Stands in for flash-attn's function, for what it is given in these tests; [B, T, H, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    ahead = torch.arange(scores.shape[-1]) - torch.arange(scores.shape[-1])[:, None]
    scores = scores if alibi_slopes is None else scores + alibi_slopes[:, None, None] * ahead
    left, right = (side if side >= 0 else len(ahead) for side in window_size)
    hidden = (ahead < -left) | (ahead > (0 if causal else right))
    hidden = hidden if attn_mask is None else hidden | ~attn_mask
    scores = scores.masked_fill(hidden, -torch.inf)
    sinks = scores[..., :0] if s_aux is None else s_aux[:, None, None].expand_as(scores[..., :1])
    p = torch.cat((scores, sinks), -1).softmax(-1)[..., : len(ahead)]
    return (F.dropout(p, dropout_p, training) @ v).transpose(1, 2)


def called_with(*positional: Any, **options: Any) -> nn.Module:
    return Model(lambda *qkv: flash(*(x.transpose(1, 2) for x in qkv), *positional, **options).transpose(1, 2))


LOWER = torch.ones(12, 12, dtype=torch.bool).tril()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "causal"),
    [
        (called_with(0.0, None, True, (-1, -1), 0.0), True),
        (called_with(dropout_p=0.1, training=False), False),
        (called_with(window_size=(11, 0), causal=True), True),
        (called_with(window_size=(-1, 0)), True),
        (called_with(window_size=(11, 30)), False),
        (called_with(attn_mask=LOWER), True),
        (called_with(attn_mask=torch.ones_like(LOWER)), False),
        (called_with(attn_mask=torch.ones(1, 1, 1, 12, dtype=torch.bool), causal=True), True),
    ],
)
def test_an_argument_that_changes_nothing_leaves_the_call_in(tmp_path: Path, model: nn.Module, causal: bool) -> None:
    run = loop(tmp_path, model, captured, steps=1, functions=[f"{__name__}:flash@bthd"])
    (call,) = read_calls(tmp_path / "own")
    assert call.form.is_causal is causal
    assert diagnose(call).findings == ()
    assert run.manifest.not_recorded == ()


class Mask:
    """A block mask of flex_attention, for what is known of it: no tensor."""

    def __init__(self, seen: Tensor) -> None:
        self.seen = seen


def flexible(query: Tensor, key: Tensor, value: Tensor, block_mask: Mask | None = None, prefix: int = 0) -> Tensor:
    """Stands in for PyTorch's flex_attention, which has no backward pass on a CPU."""
    seen = torch.ones(12, 12, dtype=torch.bool).tril() if block_mask is None else block_mask.seen.clone()
    seen[..., :prefix] = True
    return F.scaled_dot_product_attention(query, key, value, seen)


def faulty(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, **_: Any) -> Tensor:
    out = attend(q, k, v, causal)
    return torch.cat((out[:, :, :8], out[:, :, 8:].roll(1, -1)), 2)


def any_options(*qkv: Any, **options: Any) -> Tensor:
    return flexible(*qkv, **options)


OF_THREE = LOWER.repeat(3, 1, 1, 1)
OF_THREE[1, ..., 8:, :2] = False
OBJECTS = {
    "a prefix": (LOWER | (torch.arange(12) < 4), None),
    "two documents": (LOWER & ((torch.arange(12) < 3) == (torch.arange(12) < 3)[:, None]), None),
    "a window": (LOWER.triu(-8), None),
    "two documents in the second sequence": (OF_THREE, None),
    "causal": (LOWER, True),
    "all": (torch.ones_like(LOWER), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("word", ["flexible", "any_options"])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_mask_that_is_no_tensor_is_known_from_nearly_all_rows(tmp_path: Path, name: str, word: str) -> None:
    """Most of these leave more than half of the rows as a causal mask does."""
    seen, causal = OBJECTS[name]
    mask = Mask(seen)
    run = loop(
        tmp_path,
        Model(lambda q, k, v: globals()[word](q, k, v, block_mask=mask)),
        captured,
        steps=2,
        functions=[f"{__name__}:{word}"],
    )
    if causal is None:
        (reason,) = run.manifest.not_recorded
        assert reason.startswith(f"{__name__}:{word}: O is not softmax(QKᵀ·scale)V, ")
        assert "what block_mask means is not known" in reason
    else:
        (call,) = read_calls(tmp_path / "own")
        assert call.form.is_causal is causal
        assert diagnose(call).findings == ()


def rounding(q: Tensor, k: Tensor, v: Tensor, block_mask: Mask) -> Tensor:
    scores = (q.bfloat16() @ k.bfloat16().mT * q.shape[-1] ** -0.5).masked_fill(~block_mask.seen, -torch.inf)
    return scores.softmax(-1) @ v.bfloat16()


def test_rounded_scores_beside_a_mask_are_not_taken_for_the_masks(tmp_path: Path) -> None:
    """Scores of 60 nats err by an eighth of a nat in BF16, which moves O far more than the rounding of P̄ does."""
    model = Model(lambda q, k, v: rounding(60 * q, k, v, block_mask=Mask(LOWER)).float())
    run = loop(tmp_path, model, captured, steps=2, functions=[f"{__name__}:rounding"])
    assert run.manifest.not_recorded == ()
    (call,) = read_calls(tmp_path / "own")
    assert call.form.is_causal


@pytest.mark.parametrize(("prefix", "kept"), [(4, False), (1, True)])
def test_a_number_that_may_be_a_mask_is_known_from_nearly_all_rows(tmp_path: Path, prefix: int, kept: bool) -> None:
    model = Model(lambda q, k, v: flexible(q, k, v, prefix=prefix))
    run = loop(tmp_path, model, captured, steps=2, functions=[f"{__name__}:flexible"])
    assert (tmp_path / "own/captures").exists() is kept
    assert ["what prefix means is not known" in reason for reason in run.manifest.not_recorded] == [True] * (not kept)


def options_of(function: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(function).parameters} - {"q", "k", "v", "training", "attn_mask"}


def test_who_names_an_option_otherwise_is_told_all_names_that_are_known(tmp_path: Path) -> None:
    """Every option of this file's flash, by whose names the same calls are recorded, stands in the refusal."""
    run = loop(
        tmp_path, Model(lambda q, k, v: flexible(q, k, v, prefix=4)), steps=1, functions=[f"{__name__}:flexible"]
    )
    (reason,) = run.manifest.not_recorded
    known = {re.sub(r"\W", "", word) for word in reason.partition("one of these names: ")[2].split()}
    assert options_of(flash) <= known
    assert {"score_mod", "block_mask", "bias"} <= known


class Part(NoMask):
    """Of whatever the caller has."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deterministic", "sm_scale", "backend", "part", "layer_idx", "n_head"])
def test_an_option_that_is_no_mask_leaves_a_faulty_attention_in(tmp_path: Path, name: str) -> None:
    """Beside a mask, a fault in so many rows could be the mask's."""
    options = {
        "deterministic": True,
        "sm_scale": 8**-0.5,
        "backend": "fa2",
        "part": Part(),
        "layer_idx": 1,
        "n_head": 2,
    }
    given = options[name]
    model = Model(lambda q, k, v: faulty(q, k, v, **{name: given}))
    run = loop(tmp_path, model, captured, steps=2, functions=[f"{__name__}:faulty"])
    assert run.manifest.not_recorded == ()
    assert [one.kind for one in diagnose(read_calls(tmp_path / "own")[0]).findings] == ["out_rows"]
