"""Attention functions that are named, however they are called: the loop gets what they return, and goes on."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpoint.capture.captures import read_calls
from flashpoint.capture.interceptor import Interceptor
from flashpoint.capture.watched import Watch
from flashpoint.errors import UserError
from tests.capture.loops import Pair, loop, plain


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
    assert read_calls(tmp_path / "own")[0].scale == 0.25


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

    place = {"forward": "interceptor.InterceptedCall", "mask": "call_mode.masking"}.get(of)
    with contextlib.ExitStack() as entered:
        if place:
            monkeypatch.setattr(f"flashpoint.capture.{place}", full)
        else:
            Interceptor.replace(entered, torch.Tensor, "clone", _but_in_backward(Tensor.clone, full))
        model = Model(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(12, 12, dtype=torch.bool)))
        assert loop(tmp_path, model if of == "mask" else Pair()).verdict == "stable to 4"
    assert tries
    assert capsys.readouterr().err.count("no memory for its copies; give a smaller sequences=") == 1
    assert json.loads((tmp_path / "own/outcome.json").read_text())["step"] == 4


def _but_in_backward(clone: Callable[..., Any], full: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **options: (clone if torch._C._current_graph_task_id() == -1 else full)(*given, **options)


def test_why_attentions_are_left_out_is_written_down_once(tmp_path: Path) -> None:
    """For who diagnoses the run later: there is no capture, and the line in the loop is gone."""
    model = Model(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1))
    run = loop(tmp_path, nn.Sequential(model, Model(CALLS["packed"])), functions=[f"{__name__}:packed"])
    dropout, given = run.manifest["not_recorded"]
    assert dropout == "scaled_dot_product_attention: dropout, where only 0 is recorded"
    assert given.startswith(f"{__name__}:packed: called without q, k, v")
    assert run.folder is not None
    with pytest.raises(UserError, match=r"its attention was not recorded \(scaled_dot_product_attention: dropout"):
        read_calls(run.folder.path)
    assert loop(tmp_path / "none", nn.Linear(32, 32)).manifest["not_recorded"][0].startswith("the watched model called")
    whole = loop(tmp_path / "all", Pair())
    assert whole.folder is not None
    assert whole.manifest["not_recorded"] == []
    with pytest.raises(UserError, match=r"watched\.capture\(\) in the loop makes one"):
        read_calls(whole.folder.path)
