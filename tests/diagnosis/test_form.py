"""A call's form is kept in its file, and one that does not fit its scores is refused in one line."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall, joined
from flashpoint.diagnosis.form import Form
from flashpoint.errors import UserError

N, H, QUERIES, KEYS = 2, 4, 5, 7


def call_with(form: Form) -> AttentionCall:
    """A call of cross-attention whose values have another width, and two heads of keys."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((H, QUERIES, 8), (2, KEYS, 8), (2, KEYS, 12), (H, QUERIES, 12))
    q, k, v, grad_out = (torch.randn(N, *size, generator=generator) for size in sizes)
    return AttentionCall(q, k, v, grad_out, form, 1, 0, "f")


def whole() -> Form:
    generator = torch.Generator().manual_seed(1)
    return Form(
        is_causal=False,
        scale=0.3,
        softcap=50.0,
        bias=torch.randn(1, H, QUERIES, KEYS, generator=generator),
        mask=torch.rand(N, 1, 1, KEYS, generator=generator) > 0.3,
        sink=torch.randn(H, generator=generator),
        dropout=0.25,
        kept=torch.rand(N, H, QUERIES, KEYS, generator=generator) > 0.25,
    )


def same(one: Form, other: Form) -> bool:
    told = [(form.is_causal, form.scale, form.softcap, form.dropout) for form in (one, other)]
    return told[0] == told[1] and all(torch.equal(x, other.tensors[name]) for name, x in one.tensors.items())


def test_a_file_holds_the_whole_form(tmp_path: Path) -> None:
    call = call_with(whole())
    call.write(tmp_path / "call.safetensors")
    read = AttentionCall.read(tmp_path / "call.safetensors")
    assert same(call.form, read.form)
    assert same(read.form, call.form)


def test_heads_of_a_call_have_their_part_of_its_form() -> None:
    form = call_with(whole()).of_heads(slice(1, 2)).form
    assert {name: list(x.shape) for name, x in form.tensors.items()} == {
        "bias": [1, 2, QUERIES, KEYS],
        "mask": [N, 1, 1, KEYS],
        "sink": [2],
        "kept": [N, 2, QUERIES, KEYS],
    }
    assert form.sink is not None
    assert torch.equal(form.sink, whole().tensors["sink"][2:])


def test_calls_on_other_sequences_are_joined_with_their_forms() -> None:
    call = call_with(whole())
    form = joined([call, call, call]).form
    assert {name: len(x) for name, x in form.tensors.items()} == {"bias": 1, "mask": 6, "sink": H, "kept": 6}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"bias": torch.zeros(H, QUERIES, KEYS)}, r"bias \[4, 5, 7\] float32; it needs \[2, 4, 5, 7\]"),
        ({"mask": torch.ones(N, 1, QUERIES, 1, dtype=torch.bool)}, r"mask \[2, 1, 5, 1\] bool; it needs"),
        ({"mask": torch.ones(N, 1, QUERIES, KEYS)}, "mask .* float32; it needs bool"),
        ({"sink": torch.zeros(2)}, r"sink \[2\] float32; it needs \[4\]"),
        ({"kept": None}, "dropout 0.25 without a tensor kept; give both or neither"),
        ({"dropout": 0.0}, "dropout 0 beside a tensor kept; give both or neither"),
    ],
)
def test_a_form_that_does_not_fit_is_refused(tmp_path: Path, changed: dict[str, Tensor | None], told: str) -> None:
    call_with(dataclasses.replace(whole(), **changed)).write(tmp_path / "call.safetensors")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=told):
        AttentionCall.read(tmp_path / "call.safetensors")


def test_rows_that_see_no_key_are_found_head_by_head() -> None:
    mask = torch.ones(1, H, QUERIES, KEYS, dtype=torch.bool)
    mask[0, 2, 3] = False
    for form in (Form(False, 1.0, mask=mask), Form(True, 1.0, mask=mask, bias=torch.zeros(N, 1, 1, KEYS))):
        empty = form.empty_rows((N, H, QUERIES, KEYS), mask.device)
        assert empty is not None
        assert empty.nonzero().tolist() == [[0, 2, 3], [1, 2, 3]]
