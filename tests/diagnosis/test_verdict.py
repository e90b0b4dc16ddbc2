"""Attentions with a planted fault are named; the ones without are not accused."""

import dataclasses
import functools
import math

import pytest
import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_bias import DeltaBias, ignited
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.faults import BLOCK, KINDS, Fault, faulty_attention
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.measures import Results
from flashpoint.diagnosis.probe import probe
from flashpoint.diagnosis.verdict import diagnose, measured
from flashpoint.drop_in import attention, variant_of
from flashpoint.numerics.choices import NEAREST
from tests.diagnosis.calls import CLEAN, HEADS, LENGTH, attention_with_fused_exponent, by_position, call_of, inputs

WITHOUT_THE_ATTENTION = {
    "logsumexp_block": "gradients_off",
    "stale_maximum": "out_rows",
    "dropped_tile": "out_rows",
    "random_row": "out_rows",
}
"""What is said of these where there are only the results of one call."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
@pytest.mark.parametrize("head", [None, 2])
def test_a_planted_fault_is_named(kind: str, head: int | None) -> None:
    if kind == "rounded_head" and head is None:
        pytest.skip("every FlashAttention takes δ from a rounded O in all heads")
    function = by_position(faulty_attention(Fault(kind, head=head, seed=11)))
    # By dQ a slope on what rounds δ has a standard error of 0.2 in 64 rows.
    sequences = 16 if kind == "rounded_delta" else 6
    factor = 3000 if kind == "fp16_overflow" else 1
    call = call_of(function, inputs(seed=len(kind), factor=factor, sequences=sequences))
    heads = (1, 2, 3, 4) if head is None else (3,)
    for asked, expected in ((function, kind), (None, WITHOUT_THE_ATTENTION.get(kind, kind))):
        findings = diagnose(call, asked).findings
        assert [(finding.kind, finding.heads, finding.layer) for finding in findings] == [(expected, heads, 2)]


@pytest.mark.slow
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
        call_of(by_position(attention), [q, k, v, grad_out])
        for attention in (CLEAN["flash_fp32"], attention_with_fused_exponent)
    )
    call = dataclasses.replace(of_gradients, out=of_out.out)
    assert diagnose(call).findings == ()
    assert call.grad_v is not None
    true = exact(call, 0).grad_v
    assert (call.grad_v[0].double() - true).norm() > 0.02 * true.norm()


@pytest.mark.slow
@pytest.mark.parametrize("keys", [slice(0, 1), slice(None)])
@pytest.mark.parametrize("name", ["sdpa", "exponent fused"])
def test_what_fp32_itself_does_to_weights_is_no_finding(name: str, keys: slice) -> None:
    """At 1.5e6 nats FP32 numbers of S·log2 e lie 0.25 apart: P of the backward pass errs by some percent, and of many
    keys with this offset in the forward pass, too."""
    q, k, v, grad_out = inputs(5)
    q[..., 0], k[..., 0], k[..., keys, 0] = 2896.0, 0.0, 2944.0
    function = by_position(CLEAN.get(name, attention_with_fused_exponent))
    call = call_of(function, [q, k, v, grad_out])
    asked = diagnose(call, function)
    assert diagnose(call).findings == asked.findings == ()
    assert float(asked.measures["score_spacing"].min()) == pytest.approx(0.25 * math.log(2))
    assert float(asked.measures["mass_error"].max()) > 0.01 or name == "sdpa"
    dropped = by_position(faulty_attention(Fault("dropped_tile", head=2, seed=11)))  # by 28 %; FP32 itself may do 54 %
    assert diagnose(call, dropped).findings == ()


@pytest.mark.slow
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


@pytest.mark.parametrize("kind", ["dropped_tile", "stale_maximum"])
def test_weight_that_many_keys_lack_and_few_have_is_told_by_those_that_lack_it(kind: str) -> None:
    """Keys 17 to 32 have 0.3 too much, which keys 33 to 48 and 49 to 64 lack: the largest error is no loss."""
    function = by_position(faulty_attention(Fault(kind, head=2)))
    (finding,) = diagnose(call_of(function, inputs(4, factor=4.0)), function).findings
    assert (finding.kind, finding.heads) == (kind, (3,))


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


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "sure"), [(torch.bfloat16, True), (torch.float32, False)])
def test_that_an_error_follows_the_rounding_of_o_is_said_only_where_its_slope_is_sure(
    dtype: torch.dtype, sure: bool
) -> None:
    """A planted bias of δ, far larger than what the rounding of O adds: the bias has another source, though δ follows
    the rounding, too. In FP32 the rounding is so small beside the bias that the slope on it is chance: there the size
    tells, 0.1, of which a rounding adds 2⁻⁸ at most. In BF16 it is sure of 24 sequences, and of 6 with some seeds."""
    call = call_of(by_position(CLEAN["sdpa"]), [x.to(dtype) for x in inputs(1, sequences=24)])
    assert call.out is not None
    assert call.grad_q is not None
    assert call.grad_k is not None
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    probs = (call.q.double() @ call.k.double().mT * call.form.scale).masked_fill(later, -math.inf).softmax(-1)
    bound = call.grad_out.double().norm(dim=-1, keepdim=True) * call.out.double().norm(dim=-1, keepdim=True)
    grad_scores = -0.1 * bound * probs * call.form.scale
    biased = dataclasses.replace(
        call,
        grad_q=(call.grad_q + grad_scores @ call.k.double()).to(dtype),
        grad_k=(call.grad_k + grad_scores.mT @ call.q.double()).to(dtype),
    )
    (found,) = diagnose(biased).findings
    assert found.kind == "delta_bias"
    assert ("it follows the rounding" in found.text) == sure
    assert "the bias has another source" in found.text
    assert found.beyond_rounding


def test_a_switched_off_row_is_found() -> None:
    tensors = inputs(4, factor=8.0, offset=4.0)
    tensors[1][:, :, 1::2] = tensors[1][:, :, ::2]  # keys in pairs: every maximum is tied
    for variant, expected in (("released_fixed", True), ("released", False)):
        function = by_position(lambda *qkv, variant=variant, **options: attention(*qkv, variant=variant, **options))
        kinds = {found.kind for found in diagnose(call_of(function, tensors), function).findings}
        assert ("dead_rows" in kinds) is expected
        assert not kinds & {"out_rows", "gradients_off"}


def test_a_row_that_is_short_by_chance_hides_no_wrong_mask() -> None:
    """Of few features some wrong row lies along the right one, and is half as long. Each query sees the next key."""

    def leaks(q: Tensor, k: Tensor, v: Tensor, _causal: bool, scale: float) -> Tensor:
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1)
        scores = (q.float() @ k.float().mT * scale).masked_fill(~seen, -math.inf)
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    (found,) = diagnose(call_of(leaks, [x[..., :3] for x in inputs(seed=0)])).findings
    assert (found.kind, found.heads) == ("out_rows", (1, 2, 3, 4))
    assert "in rows 1 to 63" in found.text


@pytest.mark.parametrize(("tile", "named"), [(4, True), (1, False)])
def test_a_few_rows_with_another_mask_are_named_among_right_ones(tile: int, named: bool) -> None:
    """The last tile is without a mask. O as a whole errs by less than rounding may, and row 1 has no other key."""

    def leaks(q: Tensor, k: Tensor, v: Tensor, _causal: bool, scale: float) -> Tensor:
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        seen[-tile:, -tile:] = True
        scores = (q.float() @ k.float().mT * scale).masked_fill(~seen, -math.inf)
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    found = diagnose(call_of(leaks, inputs(14))).findings
    assert [(one.kind, one.heads) for one in found] == [("out_rows", (1, 2, 3, 4))] * named
    assert not named or "in rows 61 to 63" in found[0].text


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["grad_q", "grad_k", "grad_v"])
def test_rounded_scores_hide_no_gradient_that_is_off(wrong: str) -> None:
    """Rounding S makes gradients err about as much as O does, and not a hundred times as much."""
    rounds = dataclasses.replace(variant_of("flash_fp32"), scores=NEAREST)
    call = call_of(by_position(functools.partial(attention, variant=rounds)), inputs(seed=4, factor=3))
    assert "gradients_off" not in {one.kind for one in diagnose(call).findings}
    found = diagnose(dataclasses.replace(call, **{wrong: getattr(call, wrong) * 2.5})).findings
    assert [one.heads for one in found if one.kind == "gradients_off"] == [(1, 2, 3, 4)]


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


@pytest.mark.slow
def test_rounded_scores_are_told_from_a_rounded_denominator() -> None:
    for variant in ("flash_bf16", "standard"):
        function = by_position(lambda *qkv, variant=variant, **options: attention(*qkv, variant=variant, **options))
        for seed, factor in ((1, 4.0), (2, 16.0)):
            found = diagnose(call_of(function, inputs(seed, factor)), function).findings
            assert [one.kind for one in found] == ["coarse_rounding"]


def test_a_rounding_of_the_divided_probabilities_is_named_beside_that_of_the_denominator() -> None:
    """As in a softmax in FP32 that is cast to BF16: rows of P no longer sum to 1, and O does not tell why."""

    def eager(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        scores = (q.double() @ k.double().mT * scale).masked_fill(torch.ones(LENGTH, LENGTH).triu(1) > 0, -torch.inf)
        return (scores.softmax(-1).bfloat16().double() @ v.double()).bfloat16()

    (found,) = diagnose(call_of(eager, inputs(1, 4.0))).findings
    assert (found.kind, found.heads) == ("rounded_denominator", (1, 2, 3, 4))
    assert "or P after its division" in found.text


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "delta_bias", "rounded_head"])
def test_findings_do_not_depend_on_the_scale_of_the_loss(kind: str) -> None:
    """As with a GradScaler, or with a loss that is divided for gradient accumulation: nats alone change."""
    call = call_of(by_position(faulty_attention(Fault(kind, head=2))), inputs(3))
    gradients = {name: getattr(call, name) * 2.0**16 for name in ("grad_out", "grad_q", "grad_k", "grad_v")}
    one, other = diagnose(call), diagnose(dataclasses.replace(call, **gradients))
    assert [(found.kind, found.heads) for found in one.findings] == [
        (found.kind, found.heads) for found in other.findings
    ]
    assert one.bias is not None
    assert other.bias is not None
    torch.testing.assert_close(other.bias.mean, one.bias.mean)
    torch.testing.assert_close(other.bias.nats, one.bias.nats * 2**16)


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
    grad_q = true.grad_q - call.form.scale * shares[..., None] * true.attended_keys
    of = measured(
        AttentionCall(*(x[:1] for x in tensors), Form(True, call.form.scale), 1, 0, "f"),
        Results(out[None], grad_q[None]),
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
    measures["delta_rows"] = torch.full((3, 2), 1e6).double()
    bias = DeltaBias.of(measures, ("",) * len(measures["delta_sum"]))
    assert bias is not None
    torch.testing.assert_close(bias.mean, torch.tensor([3e-6, 3e-6]).double())
    torch.testing.assert_close(bias.error, torch.tensor([7**0.5, 1e-2]).double() * 1e-6 / 3**0.5)
    torch.testing.assert_close(bias.nats, torch.tensor([9e-5, 9e-5]).double())
    torch.testing.assert_close(bias.smallest / bias.error, torch.full((2,), 44.7).double(), rtol=1e-3, atol=0)
    assert bias.igniting.tolist() == [False, True]
    assert "3 of 4 runs" in ignited(3.5e-6)
    assert DeltaBias.of({}, ()) is None


def test_a_call_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    call = call_of(by_position(CLEAN["no fault"]), inputs(9, heads_kv=2))
    call.write(tmp_path / "layer-02.safetensors")
    read = AttentionCall.read(tmp_path / "layer-02.safetensors")
    assert (read.layer, read.step, read.attention, read.form.scale, read.form.is_causal) == (
        2,
        7,
        "f",
        call.form.scale,
        True,
    )
    for name in ("q", "k", "v", "grad_out", "out", "grad_q", "grad_k", "grad_v"):
        assert torch.equal(getattr(read, name), getattr(call, name))


assert BLOCK < LENGTH
