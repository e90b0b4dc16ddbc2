"""Attentions with a planted fault are named; the ones without are not accused."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashpoint.cli.diagnose_tables import tables
from flashpoint.diagnosis.bias import DeltaBias, ignited
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.faults import BLOCK, KINDS, Fault, faulty_attention
from flashpoint.diagnosis.measured import measured
from flashpoint.diagnosis.measures import Results, out_of_rounded_probs, over_sequences
from flashpoint.diagnosis.probe import Function, probe, results_of
from flashpoint.diagnosis.verdict import diagnose
from flashpoint.drop_in import attention
from flashpoint.numerics.variant import AttentionVariant

HEADS, LENGTH, SIZE = 4, 96, 32
WITHOUT_THE_ATTENTION = {
    "logsumexp_block": "gradients_off",
    "stale_maximum": "out_rows",
    "dropped_tile": "out_rows",
    "random_row": "out_rows",
}
"""What is said of these where there are only the results of one call."""


def inputs(
    seed: int, factor: float = 1.0, heads_kv: int = HEADS, offset: float = 0.0, sequences: int = 6
) -> list[Tensor]:
    """q, k, v and dO; every key has a part ``offset`` in common."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sequences, heads, LENGTH, SIZE) for heads in (HEADS, heads_kv, heads_kv, HEADS)]
    q, k, v, grad_out = (torch.randn(shape, generator=generator) for shape in shapes)
    k[..., 0] += offset
    return [x.bfloat16() for x in (q * factor, k, v, grad_out)]


def call_of(function: Function, tensors: list[Tensor], scale: float = SIZE**-0.5) -> AttentionCall:
    q, k, v, grad_out = tensors
    call = AttentionCall(q, k, v, grad_out, None, None, None, None, True, scale, layer=2, step=7, attention="f")
    found = results_of(function, call)
    return AttentionCall(q, k, v, grad_out, found.out, found.grad_q, found.grad_k, found.grad_v, True, scale, 2, 7, "f")


def by_position(function: Callable[..., Tensor]) -> Function:
    return lambda q, k, v, is_causal, scale: function(q, k, v, is_causal=is_causal, scale=scale)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
@pytest.mark.parametrize("head", [None, 2])
def test_a_planted_fault_is_named(kind: str, head: int | None) -> None:
    if kind == "rounded_head" and head is None:
        pytest.skip("every FlashAttention takes δ from a rounded O in all heads")
    function = by_position(faulty_attention(Fault(kind, head=head, seed=11)))
    call = call_of(function, inputs(seed=len(kind), factor=3000 if kind == "fp16_overflow" else 1))
    heads = (1, 2, 3, 4) if head is None else (3,)
    for asked, expected in ((function, kind), (None, WITHOUT_THE_ATTENTION.get(kind, kind))):
        findings = diagnose(call, asked).findings
        assert [(finding.kind, finding.heads, finding.layer) for finding in findings] == [(expected, heads, 2)]


@pytest.mark.parametrize("spoiled", ["a row", "all rows", "a row more"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_beside_large_scores_is_not_said_to_be_fp16s(dtype: torch.dtype, spoiled: str) -> None:
    """After an explosion scores beyond 65,504 are usual. FP16 makes NaN of the rows that have one, and of no others."""
    planted = faulty_attention(Fault("fp16_overflow", head=2))
    tensors = [x.to(dtype) for x in inputs(seed=3, factor=3000)]
    call = call_of(by_position(planted if spoiled == "a row more" else CLEAN["sdpa"]), tensors)
    assert call.out is not None
    out = call.out.clone()
    rows = ~out.isfinite().all(-1)
    out[0, 2, 0 if spoiled == "a row more" else slice(None) if spoiled == "all rows" else 5] = math.nan
    assert (call.q @ call.k.mT).abs().max() > 65_504
    assert not rows[0, 2, 0]
    (finding,) = diagnose(dataclasses.replace(call, out=out)).findings
    assert (finding.kind, finding.heads) == ("nonfinite", (3,))
    row = 6 if spoiled == "a row" else 1
    assert f"the first is row {row} of head 3 in sequence 1; if the kernel holds scores in FP16" in finding.text


def test_rows_that_all_overflow_do_not_tell_fp16_from_another_cause() -> None:
    q, k, v, grad_out = inputs(seed=3)
    q[..., 0], k[..., 0] = 4096.0, 4096.0
    call = call_of(by_position(CLEAN["sdpa"]), [q, k, v, grad_out])
    assert call.out is not None
    (finding,) = diagnose(dataclasses.replace(call, out=torch.full_like(call.out, math.nan))).findings
    assert finding.kind == "nonfinite"


def test_the_first_layer_is_not_sent_to_an_earlier_one() -> None:
    call = call_of(by_position(CLEAN["sdpa"]), inputs(seed=3))
    call.q[0, 0, 0] = math.nan
    told = [diagnose(dataclasses.replace(call, layer=layer)).findings[0].text for layer in (1, 2)]
    assert ["an earlier layer" in text for text in told] == [False, True]


CLEAN: dict[str, Callable[..., Tensor]] = {
    "no fault": faulty_attention(Fault("none")),
    "sdpa": torch.nn.functional.scaled_dot_product_attention,
    "exact row sums": lambda *qkv, **options: attention(*qkv, variant=AttentionVariant(exact_row_sum=True), **options),
    "flash_fp32": lambda *qkv, **options: attention(*qkv, variant="flash_fp32", **options),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize(("seed", "factor", "offset"), [(1, 1.0, 0.0), (2, 4.0, 3.0)])
def test_nothing_is_found_where_nothing_is(name: str, seed: int, factor: float, offset: float) -> None:
    function = by_position(CLEAN[name])
    call = call_of(function, inputs(seed, factor, offset=offset))
    assert diagnose(call).findings == ()
    assert diagnose(call, function).findings == ()


def test_a_gradient_of_v_that_cancels_is_no_finding() -> None:
    """All queries see one key alone, at 5e4 nats: P = exp2(S·log2 e − L·log2 e) of the backward pass errs by up to
    0.003 there, because FP32 numbers near 7e4 lie 0.008 apart. Rows of dO all but cancel in pairs, and with them the
    key's dV."""
    q, k, v, grad_out = inputs(4)
    q[..., 0], k[..., 0], k[..., 0, 0] = 512.0, 0.0, 560.0
    grad_out[..., 1::2, :] = -0.98 * grad_out[..., ::2, :]
    of_out, of_gradients = (
        call_of(
            by_position(lambda *qkv, fused=fused, **options: attention(*qkv, variant=fused, **options)),
            [q, k, v, grad_out],
        )
        for fused in (AttentionVariant(), AttentionVariant(fused_exponent=True))
    )
    call = dataclasses.replace(of_gradients, out=of_out.out)
    assert diagnose(call).findings == ()
    assert call.grad_v is not None
    true = exact(call, 0).grad_v
    assert (call.grad_v[0].double() - true).norm() > 0.02 * true.norm()


@pytest.mark.parametrize("keys", [slice(0, 1), slice(None)])
@pytest.mark.parametrize("name", ["sdpa", "exponent fused"])
def test_what_fp32_itself_does_to_weights_is_no_finding(name: str, keys: slice) -> None:
    """At 1.5e6 nats FP32 numbers of S·log2 e lie 0.25 apart: P of the backward pass errs by some percent, and of many
    keys with this offset in the forward pass, too."""
    q, k, v, grad_out = inputs(5)
    q[..., 0], k[..., 0], k[..., keys, 0] = 2896.0, 0.0, 2944.0
    fused = AttentionVariant(fused_exponent=True)
    function = by_position(CLEAN.get(name, lambda *qkv, **options: attention(*qkv, variant=fused, **options)))
    call = call_of(function, [q, k, v, grad_out])
    asked = diagnose(call, function)
    assert diagnose(call).findings == asked.findings == ()
    assert float(asked.measures["score_spacing"].min()) == pytest.approx(0.25 * math.log(2))
    assert float(asked.measures["mass_error"].max()) > 0.01 or name == "sdpa"
    dropped = by_position(faulty_attention(Fault("dropped_tile", head=2, seed=11)))  # by 28 %; FP32 itself may do 54 %
    assert diagnose(call, dropped).findings == ()


@pytest.mark.parametrize("kind", ["stale_maximum", "logsumexp_block", "rounded_denominator", "dropped_tile"])
def test_large_features_that_never_meet_excuse_no_fault(kind: str) -> None:
    """Queries and keys of 2,896 in one feature each, where the other has 0: scores are as small as without them."""
    q, k, v, grad_out = inputs(5)
    q[..., 0], k[..., 1] = 2896.0, 2896.0
    q[..., 1], k[..., 0] = 0.0, 0.0
    function = by_position(faulty_attention(Fault(kind, head=2, seed=11)))
    findings = diagnose(call_of(function, [q, k, v, grad_out]), function).findings
    assert [(finding.kind, finding.heads) for finding in findings] == [(kind, (3,))]


def test_a_finding_quotes_a_head_that_it_names() -> None:
    """FP32 accounts for the largest error of weights, in head 1, whose scores are large; head 3 drops a tile."""
    q, k, v, grad_out = inputs(5)
    q[:, 0, :, 0], k[:, 0, :, 0] = 2896.0, 2944.0
    function = by_position(faulty_attention(Fault("dropped_tile", head=2, seed=11)))
    found = diagnose(call_of(function, [q, k, v, grad_out]), function)
    (finding,) = found.findings
    assert (finding.kind, finding.heads) == ("dropped_tile", (3,))
    place = int(found.measures["weight_error"][:, 2].argmax())
    assert f"a weight of {float(found.measures['weight_found'][place, 2]):.3f} in place of" in finding.text


@pytest.mark.parametrize(("size", "named"), [(2**-7, False), (0.1, True)])
def test_another_order_of_the_sums_of_grad_q_is_no_finding(size: float, named: bool) -> None:
    """FlashAttention adds blocks of keys in the order in which they end: every dQ may differ by its rounding."""
    generator = torch.Generator().manual_seed(5)

    class AnyOrder(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_: object, grad: Tensor) -> Tensor:
            return grad * (1 + size * (2 * torch.rand(grad.shape, generator=generator) - 1))

    def function(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(AnyOrder.apply(q), k, v, is_causal=is_causal, scale=scale)

    found = diagnose(call_of(function, inputs(6)), function).findings
    assert [(one.kind, one.heads) for one in found] == [("random_row", (1, 2, 3, 4))] * named


def test_with_grouped_heads_of_keys_the_head_is_named() -> None:
    function = by_position(faulty_attention(Fault("delta_bias", head=1)))
    call = call_of(function, inputs(3, heads_kv=2))
    for asked in (function, None):
        assert [(found.kind, found.heads) for found in diagnose(call, asked).findings] == [("delta_bias", (2,))]


def test_a_switched_off_row_is_found() -> None:
    tensors = inputs(4, factor=8.0, offset=4.0)
    tensors[1][:, :, 1::2] = tensors[1][:, :, ::2]  # keys in pairs: every maximum is tied
    for variant, expected in (("released_fixed", True), ("released", False)):
        function = by_position(lambda *qkv, variant=variant, **options: attention(*qkv, variant=variant, **options))
        kinds = {found.kind for found in diagnose(call_of(function, tensors), function).findings}
        assert ("dead_rows" in kinds) is expected
        assert not kinds & {"out_rows", "gradients_off"}


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


@pytest.mark.parametrize("heads", [(3,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("what", NOTHING_TO_FOLLOW)
def test_heads_with_nothing_to_follow_do_not_make_the_others_rounded_heads(what: str, heads: tuple[int, ...]) -> None:
    tensors = inputs(4, sequences=CAPTURED)
    for head in heads:
        with_nothing_to_follow(tensors, what, head)
    function = by_position(torch.nn.functional.scaled_dot_product_attention)
    call = call_of(function, tensors)
    assert diagnose(call).findings == diagnose(call, function).findings == ()
    table = tables([diagnose(call)], "")[-1]
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


@pytest.mark.parametrize("follow", [(0,), (1, 3), (0, 1, 3)])
def test_however_many_heads_follow_they_are_named(follow: tuple[int, ...]) -> None:
    (found,) = diagnose(mixed(inputs(4, sequences=CAPTURED), follow)).findings
    assert (found.kind, found.heads) == ("rounded_head", tuple(head + 1 for head in follow))
    others = [head + 1 for head in range(HEADS) if head not in follow]
    named = "head" if len(others) == 1 else "heads"
    assert f"; in {named} {', '.join(map(str, others))} the slope is" in found.text


@pytest.mark.parametrize("what", NOTHING_TO_FOLLOW[1:])
def test_a_rounded_head_is_named_beside_heads_with_nothing_to_follow(what: str) -> None:
    tensors = inputs(4, sequences=CAPTURED)
    for head in (2, 3):
        with_nothing_to_follow(tensors, what, head)
    (found,) = diagnose(mixed(tensors, (0,))).findings
    assert (found.kind, found.heads) == ("rounded_head", (1,))
    assert "; in head 2 the slope is" in found.text


def test_sequences_without_loss_count_neither_for_nor_against_a_rounded_head() -> None:
    tensors = inputs(4, sequences=CAPTURED)
    alone = mixed([x[:-4] for x in tensors], (0,))
    tensors[3][-4:] = 0
    among = mixed(tensors, (0,))
    assert diagnose(among).measures["delta_follows_out"][-4:].isnan().all()
    (found,), (expected,) = diagnose(among).findings, diagnose(alone).findings
    assert found == expected


def test_sequences_without_loss_do_not_hide_a_gradient_that_is_off() -> None:
    """dK of head 3 is off by 5 %: more than 2 % of the sequences that have one, less than 2 % of all."""
    tensors = inputs(4)
    tensors[3][2:] = 0
    call = call_of(by_position(CLEAN["sdpa"]), tensors)
    assert call.grad_k is not None
    call.grad_k[:, 2] *= 1.05
    (found,) = diagnose(call).findings
    assert (found.kind, found.heads) == ("gradients_off", (3,))
    assert "dK is off by" in found.text


def test_two_sequences_are_too_few_to_be_sure_which_heads_follow() -> None:
    assert diagnose(mixed([x[:2] for x in inputs(4, sequences=CAPTURED)], (0,))).findings == ()


def erring(tensors: list[Tensor], shares: Tensor, rounding: torch.dtype) -> tuple[AttentionCall, Tensor]:
    """A call with FP64's O but for its rounding, and FP64's dQ but for an error of δ; and the term that the rounding
    adds to δ [N, H, T], of which the error is a share [H]. Worked out from the definitions of docs/watching.md."""
    q, k, v, grad_out = tensors
    call = AttentionCall(q, k, v, grad_out, None, None, None, None, True, SIZE**-0.5, 1, 0, "f")
    outs, grads, terms = [], [], []
    for n in range(len(q)):
        true = exact(call, n)
        out = true.out.to(rounding).double()
        term = (grad_out[n].double() * (out - out_of_rounded_probs(call, n))).sum(-1)
        outs.append(out)
        grads.append(true.grad_q - call.scale * (shares[:, None] * term)[..., None] * true.attended_keys)
        terms.append(term)
    return dataclasses.replace(call, out=torch.stack(outs), grad_q=torch.stack(grads)), torch.stack(terms)


def test_the_slope_is_the_share_of_the_rounding_that_delta_takes_and_unknown_where_nothing_shows_it() -> None:
    shares = torch.tensor([1.0, 0.3, 0.0, 1.0]).double()
    q, k, v, grad_out = inputs(4)
    k[:, 3, : LENGTH // 2], grad_out[:, :, LENGTH // 2 :: 3] = 0, 0  # PK is 0 in half of the rows of head 4
    grad_out[1] = 0
    call, terms = erring([q, k, v, grad_out], shares, torch.bfloat16)
    of = measured(call, Results.kept(call))
    expected = shares.expand(6, -1).clone()
    expected[1] = math.nan
    torch.testing.assert_close(of["delta_follows_out"], expected, equal_nan=True, rtol=0, atol=1e-9)
    torch.testing.assert_close(over_sequences(of)["delta_follows_out"], shares, rtol=0, atol=1e-9)
    true = exact(call, 0)
    rows = (true.bound > 0) & (true.attended_keys != 0).any(-1)
    sizes = [terms[0, head, rows[head]].norm() / true.bound[head, rows[head]].norm() for head in range(HEADS)]
    torch.testing.assert_close(of["delta_rounding"][0], torch.stack(sizes))


@pytest.mark.parametrize(("length", "known"), [(1, False), (3, False), (4, True)])
def test_of_as_many_rows_as_unknowns_the_slope_is_unknown(length: int, known: bool) -> None:
    call, _ = erring([x[:, :, :length] for x in inputs(4)], torch.ones(HEADS).double(), torch.bfloat16)
    assert measured(call, Results.kept(call))["delta_follows_out"].isnan().all() == (not known)


@pytest.mark.parametrize(("rounding", "named"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_rounding_as_small_as_what_fp32_does_to_scores_tells_of_no_head(rounding: torch.dtype, named: bool) -> None:
    shares = torch.tensor([1.0, 0, 0, 0]).double()
    call, _ = erring([x.double() for x in inputs(4)], shares, rounding)
    assert [one.heads for one in diagnose(call).findings if one.kind == "rounded_head"] == [(1,)] * named


def test_rows_that_have_no_output_are_not_switched_off() -> None:
    """V of head 4 is 0; the first half of head 1's is 0, and a quarter of the rows that see more are switched off."""
    q, k, v, grad_out = inputs(4)
    v[:, 3], v[:, 0, : LENGTH // 2] = 0, 0
    call = call_of(by_position(CLEAN["flash_fp32"]), [q, k, v, grad_out])
    assert diagnose(call).findings == ()
    assert call.out is not None
    call.out[:, 0, LENGTH // 2 :: 4] = 0
    (found,) = (one for one in diagnose(call).findings if one.kind == "dead_rows")
    assert found.heads == (1,)
    assert "25.0%" in found.text


def test_rounded_scores_are_told_from_a_rounded_denominator() -> None:
    for variant in ("flash_bf16", "standard"):
        function = by_position(lambda *qkv, variant=variant, **options: attention(*qkv, variant=variant, **options))
        for seed, factor in ((1, 4.0), (2, 16.0)):
            found = diagnose(call_of(function, inputs(seed, factor)), function).findings
            assert [one.kind for one in found] == ["coarse_rounding"]


@pytest.mark.parametrize(("variant", "rounded"), [("flash_unrounded_out", "P̄"), ("flash_exact_rowsum", "S, P̄ or Ō")])
def test_of_fp32_tensors_a_rounding_of_the_probabilities_counts(variant: str, rounded: str) -> None:
    """The drop-in rounds to BF16 whatever it is given."""
    plain = [x.float() for x in inputs(3)]
    found = diagnose(call_of(lambda q, k, v, c, s: attention(q, k, v, is_causal=c, scale=s, variant=variant), plain))
    assert [(one.kind, rounded in one.text) for one in found.findings if one.kind == "coarse_rounding"] == [
        ("coarse_rounding", True)
    ]


def test_a_short_sequence_and_few_sequences_are_no_error() -> None:
    function = by_position(CLEAN["flash_fp32"])
    tensors = [x[:2, :, :1] for x in inputs(5)]
    assert diagnose(call_of(function, tensors), function).findings == ()


def test_the_features_of_its_own_read_out_row_sums_weights_and_masses() -> None:
    """Of an attention that is exact in FP64, with an error put into δ and into L by hand."""

    class Erring(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, scale):  # type: ignore[no-untyped-def]
            scores = (q @ k.mT * scale).masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -math.inf)
            out = scores.softmax(-1) @ v
            ctx.save_for_backward(q, k, v, scores, out)
            ctx.scale = scale
            return out

        @staticmethod
        def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
            q, k, v, scores, out = ctx.saved_tensors
            p = scores.softmax(-1)
            p[:, 1, 20:] *= 0.9
            delta = (grad_out * out).sum(-1) + errors
            grad_s = p * (grad_out @ v.mT - delta[..., None]) * ctx.scale
            return grad_s @ k, grad_s.mT @ q, p.mT @ grad_out, None

    tensors = [x.double() for x in inputs(6)]
    errors = torch.randn(6, HEADS, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    errors[:, 1] = 0
    call = call_of(lambda q, k, v, _causal, scale: Erring.apply(q, k, v, scale), tensors)
    found = probe(lambda q, k, v, _causal, scale: Erring.apply(q, k, v, scale), call)
    assert found is not None
    torch.testing.assert_close(found.row_sums[:, 0], -errors[:, 0])
    true = [exact(call, n) for n in range(6)]
    block = found.block
    expected = torch.stack([one.probs.unflatten(-1, (-1, block)).sum(-1) for one in true])
    torch.testing.assert_close(found.weights, expected)
    assert found.masses[:, 0].sub(1).abs().max() < 1e-9
    rows = torch.where(torch.arange(LENGTH) >= 20, 0.9, 1.0).double().unflatten(0, (-1, block)).mean(-1)
    torch.testing.assert_close(found.masses[:, 1], rows.expand(6, -1))


def test_measures_are_what_they_say() -> None:
    """Errors of known size in O and dQ of an FP64 result."""
    tensors = [x.double() for x in inputs(8)]
    call = call_of(by_position(torch.nn.functional.scaled_dot_product_attention), tensors)
    true = exact(call, 0)
    longer = torch.linspace(0.01, 0.03, LENGTH, dtype=torch.float64)
    out = true.out * (1 + longer[:, None])
    shares = 1e-4 * true.bound
    grad_q = true.grad_q - call.scale * shares[..., None] * true.attended_keys
    of = measured(
        AttentionCall(*(x[:1] for x in tensors), None, None, None, None, True, call.scale, 1, 0, "f"),
        Results(out[None], grad_q[None], None, None),
    )
    delta = (tensors[3][0] * out).sum(-1) - (tensors[3][0] * true.out).sum(-1)
    torch.testing.assert_close(of["length_error"][0], longer[1:].std().expand(HEADS))
    torch.testing.assert_close(of["delta_bias"][0], delta.sum(-1) / true.bound.sum(-1))
    torch.testing.assert_close(of["delta_sum"][0], delta.sum(-1))
    torch.testing.assert_close(of["grad_delta_bias"][0], torch.full((HEADS,), 1e-4, dtype=torch.float64))
    torch.testing.assert_close(of["grad_delta_noise"][0], torch.full((HEADS,), 1e-4, dtype=torch.float64))


def test_of_sequences_with_one_bound_the_bias_is_a_mean_with_its_standard_error() -> None:
    """Three sequences, two heads; Student's t with 2 degrees of freedom and p 0.0005 a head has its limit at 44.7."""
    biases = torch.tensor([[1.0e-6, 3e-6], [2.0e-6, 3.01e-6], [6.0e-6, 2.99e-6]]).double()
    noises, bounds = (torch.full((3, 2), size).double() for size in (1e-4, 10.0))
    measures = {"delta_bias": biases, "delta_noise": noises, "delta_sum": 10 * biases, "delta_bound": bounds}
    bias = DeltaBias.of(measures)
    assert bias is not None
    torch.testing.assert_close(bias.mean, torch.tensor([3e-6, 3e-6]).double())
    torch.testing.assert_close(bias.error, torch.tensor([7**0.5, 1e-2]).double() * 1e-6 / 3**0.5)
    torch.testing.assert_close(bias.nats, torch.tensor([9e-5, 9e-5]).double())
    torch.testing.assert_close(bias.smallest / bias.error, torch.full((2,), 44.7).double(), rtol=1e-3, atol=0)
    assert bias.igniting.tolist() == [False, True]
    assert "3 of 4 runs" in ignited(3.5e-6)
    assert DeltaBias.of({}) is None


def test_a_call_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    call = call_of(by_position(CLEAN["no fault"]), inputs(9, heads_kv=2))
    call.write(tmp_path / "layer-02.safetensors")
    read = AttentionCall.read(tmp_path / "layer-02.safetensors")
    assert (read.layer, read.step, read.attention, read.scale, read.is_causal) == (2, 7, "f", call.scale, True)
    for name in ("q", "k", "v", "grad_out", "out", "grad_q", "grad_k", "grad_v"):
        assert torch.equal(getattr(read, name), getattr(call, name))


assert BLOCK < LENGTH
