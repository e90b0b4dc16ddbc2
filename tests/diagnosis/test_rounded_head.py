"""Heads in which δ takes the rounding of O are told from the others, and from heads that do not tell."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from flashpoint.cli.diagnose_tables import tables
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.measures import Results, over_sequences
from flashpoint.diagnosis.roundings import out_of_rounded_probs
from flashpoint.diagnosis.verdict import diagnose, measured
from tests.diagnosis.calls import HEADS, LENGTH, SIZE, by_position, call_of, inputs

CAPTURED = 16
"""Sequences of a capture."""


def with_nothing_to_follow(tensors: list[Tensor], what: str, head: int) -> None:
    """Spoil a head so that δ has no rounding there, or that dQ does not show it."""
    q, k, v, grad_out = tensors
    if what == "v is one row":
        v[:, head] = v[:, head, :1]
    elif what == "every query sees its own key alone":
        q[:, head] = k[:, head] = 64 * torch.eye(SIZE).repeat(LENGTH // SIZE, 1) * torch.arange(1, LENGTH + 1)[:, None]
    else:
        {"q": q, "k": k, "v": v, "grad_out": grad_out}[what][:, head] = 0


NOTHING_TO_FOLLOW = ("q", "k", "v", "grad_out", "v is one row", "every query sees its own key alone")


# What is wrong with a head decides whether it tells, head by head; how many do not tell, what is concluded of them all.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "heads"), list(zip(NOTHING_TO_FOLLOW, itertools.cycle([(3,), (0, 1), (0, 1, 2)]), strict=False))
)
def test_heads_with_nothing_to_follow_do_not_make_the_others_rounded_heads(what: str, heads: tuple[int, ...]) -> None:
    tensors = inputs(4, sequences=CAPTURED)
    for head in heads:
        with_nothing_to_follow(tensors, what, head)
    function = by_position(torch.nn.functional.scaled_dot_product_attention)
    call = call_of(function, tensors)
    diagnosis = diagnose(call)
    assert diagnosis.findings == diagnose(call, function).findings == ()
    table = tables([diagnosis], "", None)[1][-1]
    shown = [row[table.columns.index("follows O")].text for row in table.rows]
    assert what == "q" or [head for head in range(HEADS) if shown[head] == ""] == list(heads)


def mixed(tensors: list[Tensor], follow: tuple[int, ...]) -> AttentionCall:
    """A call in which δ comes from the rounded O in some heads, and from an FP32 O in the others."""
    rounded, exactly = (
        call_of(by_position(faulty_attention(Fault(kind))), tensors) for kind in ("rounded_head", "none")
    )
    assert rounded.grad_q is not None
    assert exactly.grad_q is not None
    chosen = torch.zeros(HEADS, 1, 1, dtype=torch.bool)
    chosen[list(follow)] = True
    return dataclasses.replace(exactly, grad_q=rounded.grad_q.where(chosen, exactly.grad_q))


@pytest.mark.slow
@pytest.mark.parametrize("follow", [(0,), (1, 3), (0, 1, 3)])
def test_however_many_heads_follow_they_are_named(follow: tuple[int, ...]) -> None:
    (found,) = diagnose(mixed(inputs(4, sequences=CAPTURED), follow)).findings
    assert (found.kind, found.heads) == ("rounded_head", tuple(head + 1 for head in follow))
    others = [head + 1 for head in range(HEADS) if head not in follow]
    named = "head" if len(others) == 1 else "heads"
    assert f"; in {named} {', '.join(map(str, others))} the slope is" in found.text


@pytest.mark.slow
@pytest.mark.parametrize("what", NOTHING_TO_FOLLOW[1:])
def test_a_rounded_head_is_named_beside_heads_with_nothing_to_follow(what: str) -> None:
    tensors = inputs(4, sequences=CAPTURED)
    for head in (2, 3):
        with_nothing_to_follow(tensors, what, head)
    (found,) = diagnose(mixed(tensors, (0,))).findings
    assert (found.kind, found.heads) == ("rounded_head", (1,))
    assert "; in head 2 the slope is" in found.text


@pytest.mark.slow
def test_sequences_without_loss_count_neither_for_nor_against_a_rounded_head() -> None:
    tensors = inputs(4, sequences=CAPTURED)
    alone = mixed([x[:-4] for x in tensors], (0,))
    tensors[3][-4:] = 0
    among = mixed(tensors, (0,))
    assert diagnose(among).measures["delta_follows_out"][-4:].isnan().all()
    (found,), (expected,) = diagnose(among).findings, diagnose(alone).findings
    assert found == expected


def test_two_sequences_are_too_few_to_be_sure_which_heads_follow() -> None:
    assert diagnose(mixed([x[:2] for x in inputs(4, sequences=CAPTURED)], (0,))).findings == ()


def erring(tensors: list[Tensor], shares: Tensor, rounding: torch.dtype) -> tuple[AttentionCall, Tensor]:
    """A call with FP64's O but for its rounding, and FP64's dQ but for an error of δ; and the term that the rounding
    adds to δ [N, H, T]. The error is a share [N, H] of this term, half of what the rounding of P̄ adds, and a bias.
    Worked out from the definitions of docs/watching.md."""
    q, k, v, grad_out = tensors
    call = AttentionCall(q, k, v, grad_out, Form(True, SIZE**-0.5), 1, 0, "f")
    outs, grads, terms = [], [], []
    for n in range(len(q)):
        true = exact(call, n)
        out = true.out.to(rounding).double()
        of_probs = out_of_rounded_probs(call, n)
        term, other = ((grad_out[n].double() * x).sum(-1) for x in (out - of_probs, of_probs - true.out))
        error = shares[n, :, None] * term + 0.5 * other + 1e-3 * true.bound
        outs.append(out)
        grads.append(true.grad_q - call.form.scale * error[..., None] * true.attended_keys)
        terms.append(term)
    return dataclasses.replace(call, out=torch.stack(outs), grad_q=torch.stack(grads)), torch.stack(terms)


def test_the_slope_is_the_share_of_the_rounding_that_delta_takes_and_unknown_where_nothing_shows_it() -> None:
    q, k, v, grad_out = inputs(4)
    shares = torch.tensor([1.0, 0.3, 0.0, 1.0]).double() * 0.9 ** torch.arange(len(q))[:, None]
    k[:, 3, : LENGTH // 2], grad_out[:, :, LENGTH // 2 :: 3] = 0, 0  # PK is 0 in half of the rows of head 4
    grad_out[1] = 0
    call, terms = erring([q, k, v, grad_out], shares, torch.bfloat16)
    of = measured(call, Results.kept(call))
    expected = shares.clone()
    expected[1] = torch.nan
    torch.testing.assert_close(of["delta_follows_out"], expected, rtol=0, atol=1e-9, equal_nan=True)
    together = over_sequences(of)["delta_follows_out"]
    torch.testing.assert_close(together, shares[[0, 2, 3, 4, 5]].mean(0), rtol=0, atol=1e-9)
    true = exact(call, 0)
    rows = (true.bound > 0) & (true.attended_keys != 0).any(-1)
    sizes = [terms[0, head, rows[head]].norm() / true.bound[head, rows[head]].norm() for head in range(HEADS)]
    torch.testing.assert_close(of["delta_rounding"][0], torch.stack(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("block_k", [64, 128, None])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_slope_is_of_what_tiles_like_those_of_the_attention_leave_to_round(
    is_causal: bool, block_k: int | None, share: float
) -> None:
    """P̄ of other tiles is rounded otherwise: O less that O has more in it than O's own rounding."""
    generator = torch.Generator().manual_seed(5)
    q, k, v, grad_out = (torch.randn(1, HEADS, 200, SIZE, generator=generator).bfloat16() for _ in range(4))
    call = AttentionCall(3 * q, k, v, grad_out, Form(is_causal, SIZE**-0.5), 1, 0, "f")
    true, of_probs = exact(call, 0), out_of_rounded_probs(call, 0, block_k)
    out = of_probs.bfloat16().double()
    term, other = ((grad_out[0].double() * x).sum(-1) for x in (out - of_probs, of_probs - true.out))
    error = share * term + other
    grad_q = true.grad_q - call.form.scale * error[..., None] * true.attended_keys
    call = dataclasses.replace(call, out=out[None], grad_q=grad_q[None])
    found = measured(call, Results.kept(call))["delta_follows_out"]
    torch.testing.assert_close(found, torch.full((1, HEADS), share).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("length", "known"), [(1, False), (3, False), (4, True)])
def test_of_as_many_rows_as_unknowns_the_slope_is_unknown(length: int, known: bool) -> None:
    tensors = [x[:, :, :length] for x in inputs(4)]
    call, _ = erring(tensors, torch.ones(len(tensors[0]), HEADS).double(), torch.bfloat16)
    assert measured(call, Results.kept(call))["delta_follows_out"].isnan().all() == (not known)


@pytest.mark.parametrize(("rounding", "named"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_rounding_as_small_as_what_fp32_does_to_scores_tells_of_no_head(rounding: torch.dtype, named: bool) -> None:
    tensors = [x.double() for x in inputs(4)]
    shares = torch.tensor([1.0, 0, 0, 0]).double().expand(len(tensors[0]), HEADS)
    call, _ = erring(tensors, shares, rounding)
    assert [one.heads for one in diagnose(call).findings if one.kind == "rounded_head"] == [(1,)] * named
