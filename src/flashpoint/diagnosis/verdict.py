"""What is wrong with an attention call, in plain words with its evidence."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.call import AttentionCall, identities_of
from flashpoint.diagnosis.delta_bias import DeltaBias, DeltaSample, ignited
from flashpoint.diagnosis.exact import exact, with_scale_of_dropout
from flashpoint.diagnosis.factors import Factors, factor_findings, factors_of
from flashpoint.diagnosis.finding import (
    DEAD_ROWS,
    FOLLOWS,
    FP32_COARSE,
    FP32_STEPS,
    Finding,
    Make,
    as_rounded,
    beyond_rounding,
    cut_off,
    explained,
    follows,
    fp32_error,
    maker,
    margin_by_rows,
    mean_and_margin,
    mean_square,
    ratio_by_chance,
    surely_off,
    told_range,
)
from flashpoint.diagnosis.large_faults import (
    differing_rows,
    fp16_underflow,
    lost_logsumexp,
    nonfinite,
    other_denominator,
    rounded_logsumexp,
    underflows,
    untold_scale,
    wrong_delta,
    wrong_rows,
    wrong_weights,
)
from flashpoint.diagnosis.measures import Measures, Probed, Results, by_sequence, of_inputs, without_empty_rows
from flashpoint.diagnosis.probe import Function, delta_error_of_row_sums, probe, probed_measures, results_of
from flashpoint.diagnosis.result_measures import BF16, ROW_OFF, of_results
from flashpoint.diagnosis.sink import sink_finding, with_sink

if TYPE_CHECKING:
    from flashpoint.numerics.variant import AttentionVariant

_LENGTH_OFF = 5e-4
"""Of the length error's root mean square beyond what is expected; a BF16 ℓ adds 1e-3 or more."""
_EXPLAINED = 0.25
"""Of the mean of row sums, that the response of O to a shift of all scores accounts for. Of a bias of δ it is 0."""
_MOST_BY_ROUNDING = 2**-7
"""Of |dO||O|, what BF16 roundings of Ō and of O add to δ at most: by Cauchy and Schwarz half an ulp at 1 each."""
_CUT_MAKES = 2**-9, 2**-8
"""Of itself, what a number loses on average that is cut off to BF16: half of the spacing 2⁻⁷, of 2 and of 1."""
_MANY = 1_000
"""Standard errors beyond which their number tells nothing more."""
_OF_DELTA = frozenset(
    (
        *table.GRAD_DELTA.names,
        *(row.name for row in (table.FOLLOWS_OUT, table.DELTA_ROUNDING, table.DELTA_FACTOR, *table.OF_DELTA.values())),
        *(row.name for row in (table.OF_DELTA_ROWS, *table.OF_DELTA_SPREAD.values())),
    )
)
"""Measures of δ by dQ."""
_ROUNDED = 1.5
"""Times the squared error of O that the rounding of P̄ and O makes. Beyond, the error of O is not of their rounding
alone, and that δ does not follow it says nothing."""


@dataclass(frozen=True)
class Diagnosis:
    """Measures and findings of one layer.

    Attributes:
        measures: by name, [N, H].
        bias: of δ, in the call's sequences and in further ones; None where nothing tells of δ's error.
        probed: whether the attention was asked with features of its own.
        empty_rows: how many rows see no key, of which nothing is judged, and to how many of them a gradient came.
        with_keys: whether dK and dV have a part of these, and are not judged either.
        hidden: the heads [H], bool, whose δ is not judged: rounded scores move dQ as an error of δ does.
    """

    call: AttentionCall
    measures: Measures
    bias: DeltaBias | None
    probed: bool
    hidden: Tensor
    findings: tuple[Finding, ...]
    empty_rows: tuple[int, int] = (0, 0)
    with_keys: bool = False

    @property
    def otherwise_called(self) -> list[str]:
        """In words, what the call has beside softmax(QKᵀ/√d), causal, save a sink that a finding tells; rows that see
        no key, too."""
        form, usual, (empty, with_gradient) = self.call.form, self.call.q.shape[-1] ** -0.5, self.empty_rows
        found = {one.kind for one in self.findings}
        told = [what for what in form.described if what != "a sink" or "sink" not in found]
        if not math.isclose(form.scale, usual, rel_tol=1e-3):
            told.insert(0, f"scale {form.scale:.3g}, where 1/√d is {usual:.3g},")
        if self.call.k.shape[-2] != self.call.q.shape[-2]:
            told.append(f"{self.call.k.shape[-2]:,} keys")
        if empty:
            keys = ", and dK and dV for them" if self.with_keys else ""
            told.append(f"{empty:,} rows (gradients came to {with_gradient:,}) see no key and are left out{keys}")
        return told

    @property
    def fp32_error(self) -> Tensor:
        """The relative error [H] of weights that FP32's rounding of scores accounts for."""
        return fp32_error(self.measures)


def diagnose(
    call: AttentionCall,
    function: Function | None = None,
    declared: AttentionVariant | None = None,
    sample: DeltaSample | None = None,
) -> Diagnosis:
    """Say what is wrong with a call.

    Args:
        call: with the results of the attention, unless ``function`` is given.
        function: the attention, which is called anew. It tells of row sums, weights and repeatability too.
        declared: what the attention says that it rounds. Errors of O of that size are no finding.
        sample: errors of δ of the same attention and layer in further sequences. The bias of δ is judged by these
            together with the call's; everything else by the call's.

    Raises:
        ValueError: there is neither a result in the call nor a function.
    """
    given = call
    call, results, empty = without_empty_rows(call, Results.kept(call))
    if function is not None:
        results = without_empty_rows(call, results_of(function, call))[1]
    if results.out is None:
        raise ValueError("the call holds no O")
    if function is not None:  # which was given the gradient of O alone
        call = dataclasses.replace(call, grad_logsumexp=None, other_gradients="")
    probed = probe(function, call) if function else None
    differing = differing_rows(function, call, results)
    told, call = call.form, _as_its_out_tells(call, results.out)
    compared = Results(results.out) if call.other_gradients else results
    measures, identities = measured(call, compared, probed, declared), identities_of(call)
    bias = DeltaBias.of(measures, identities, call.step, sample)
    if not call.is_of_out_alone:  # by dQ, an error of what came to the other output cannot be told from one of δ
        measures, bias = {name: of for name, of in measures.items() if name not in _OF_DELTA}, None
    factors = factors_of(measures, identities)
    finding, returned = maker(call.layer), results
    if function is None:
        returned = dataclasses.replace(results, grad_k=given.grad_k, grad_v=given.grad_v)
    alone = nonfinite(call, returned, measures, finding) or lost_logsumexp(call, compared, finding)
    alone = alone or (untold_scale(call, measures, finding) if function is None else None)
    alone = alone or _large_fault(call, measures, probed, factors, identities, differing)
    findings = [alone] if alone else _findings(call, measures, bias, factors, identities, declared is not None)
    if told.sink is None and (sink := sink_finding(call, finding)):
        findings.insert(0, sink)
    with_gradient = 0 if empty is None else int((empty & (given.grad_out != 0).any(-1)).sum())
    return Diagnosis(
        call=dataclasses.replace(call, form=dataclasses.replace(call.form, dropout=told.dropout)),
        measures=measures,
        bias=bias,
        probed=probed is not None,
        hidden=factors.of_rounding & (bias is not None and bias.of_grad_q),
        findings=tuple(findings),
        empty_rows=(0 if empty is None else int(empty.sum()), with_gradient),
        with_keys=bool(with_gradient) and results.grad_k is None and given.grad_k is not None,
    )


def _as_its_out_tells(call: AttentionCall, out: Tensor) -> AttentionCall:
    """Return the call with the scale of dropout and the sink that its O tells of."""
    call = with_sink(with_scale_of_dropout(call, out), out)
    if call.form.sink is not None and call.grad_logsumexp is not None:  # whether L counts the sink in, nobody says
        call = dataclasses.replace(call, grad_logsumexp=None, other_gradients="L beside a sink")
    return call


def delta_finding(layer: int, bias: DeltaBias | None) -> Finding | None:
    """Return the finding that δ of a layer is biased, by its errors alone."""
    return (
        None
        if bias is None or not bias.judges
        else _biased(bias, bias.igniting, None, torch.zeros_like(bias.igniting), maker(layer))
    )


def measured(
    call: AttentionCall, results: Results, probed: Probed | None = None, declared: AttentionVariant | None = None
) -> Measures:
    """Return the measures of a call by name, [N, H] float64 on the CPU.

    Those of inputs, of results, and where ``probed`` is given of what the attention said when it was asked.
    ``declared`` is what the attention says that it rounds.
    """
    return by_sequence(call, results, probed, functools.partial(_of_heads, declared=declared))


def _of_heads(
    call: AttentionCall, results: Results, probed: Probed | None, n: int, declared: AttentionVariant | None
) -> Measures:
    from flashpoint.diagnosis.roundings import RoundedOut, of_delta  # a loop that is watched does without

    true, rounded = exact(call, n), None if results.out is None else RoundedOut(call, results.out, n)
    found = of_inputs(true)
    found |= of_results(call, results, true, n, rounded, declared)
    if probed is not None and rounded is not None:
        found |= probed_measures(call, probed, true, n)
        noise = true.grad_scores.norm(dim=-1)  # of a key's feature that is 1, whatever K is
        found |= of_delta(rounded, delta_error_of_row_sums(probed, true, n), noise, true)
    return found


def _large_fault(
    call: AttentionCall,
    measures: Measures,
    probed: Probed | None,
    factors: Factors,
    identities: Sequence[str],
    differing: Tensor,
) -> Finding | None:
    """Return the finding of finite results that makes nonsense of finer ones."""
    finding = maker(call.layer)
    if (heads := differing.any(-1).any(0)).any():
        rows = int(differing.sum())
        return finding("random_row", heads, f"a second call on the same inputs returns {rows:,} rows that differ")
    faults = (
        other_denominator(measures, identities, factors, finding),
        wrong_weights(call, measures, probed, factors, finding),
        rounded_logsumexp(measures, identities, factors, finding),
        wrong_rows(call, measures, factors, finding),
        fp16_underflow(measures, finding),
    )
    return next((one for one in faults if one), None)


def _findings(
    call: AttentionCall,
    measures: Measures,
    bias: DeltaBias | None,
    factors: Factors,
    identities: Sequence[str],
    declares: bool,
) -> list[Finding]:
    """Return the findings of results without a large fault."""
    finding = maker(call.layer)
    declared = explained(measures) if declares else torch.zeros_like(factors.either)
    dead = (measures[table.DEAD_ROWS.name].mean(0) > DEAD_ROWS) & ~factors.account
    told_apart = ~dead & (fp32_error(measures) < FP32_COARSE)  # beyond, P̄ of the largest score is not 1
    of_length = _length_errs(measures) & told_apart & ~declared
    following = _following(call, measures, factors, identities)
    told = torch.full_like(of_length, bias is not None and bias.judges)
    if bias is not None and bias.of_grad_q:
        # Where O as a whole is off, so are P and dQ, by more than an error of δ.
        told &= ~factors.either & (mean_square(measures, table.OUT_ERROR).sqrt() < ROW_OFF) & ~underflows(measures)
    biased = told if bias is None else bias.igniting & told
    responds = _responds(measures, bias, biased, identities)
    biased &= ~responds
    held, of_bits = _held_delta(measures, identities, told & ~responds & told_apart, finding)
    wrong = wrong_delta(measures, ~biased & ~of_bits & ~factors.either, finding)
    factor = _factor_of_delta(measures, identities).where(told & ~responds & told_apart & ~of_bits, 0.0)
    found = [held, None if bias is None else _biased(bias, biased, following, of_bits | (factor != 0), finding)]
    found += [_not_of_softmax(responds, finding), wrong or _told_factor(factor, finding)]
    found += factor_findings(factors, measures, finding)
    if not declares:
        fine = ~of_length & ~factors.of_scores & told_apart
        found += _out_of_roundings(call, measures, fine, identities, finding)
    of_rows = _rounded_denominator(measures, of_length, finding)
    found += [of_rows or _rounded_head(following, finding), _dead(measures, dead, finding)]
    return [one for one in found if one is not None]


def _out_of_roundings(
    call: AttentionCall, measures: Measures, heads: Tensor, identities: Sequence[str], finding: Make
) -> list[Finding | None]:
    """Say which roundings O of some heads [H] has beside those of P̄ and of itself."""
    of_scores, slope = follows(measures, table.OF_SCORES.values(), identities)
    rough, cut = heads & _out_errs(measures), heads & cut_off(measures, identities)
    return [
        _coarse_rounding(call, measures, rough, finding),
        _rounded_scores(slope.where(heads & ~rough & ~cut, 0.0), finding),
        _cut_off(measures, cut, finding),
        _rounded_sums(measures, heads & ~rough & ~of_scores & ~cut, identities, finding),
    ]


def _length_errs(measures: Measures) -> Tensor:
    """Return the heads [H] in which rows of O are longer or shorter than roundings make them, and hardly turned.

    A rounded ℓ does that, as rounding P after its division by ℓ does, by which a row of P no longer sums to 1. What
    else is rounded turns rows, too.
    """
    length, expected = mean_square(measures, table.LENGTH_ERROR), mean_square(measures, table.LENGTH_ERROR_EXPECTED)
    coarser = mean_square(measures, table.OUT_ERROR) - mean_square(measures, table.OUT_ERROR_EXPECTED)
    by_chance = ratio_by_chance(measures, table.LENGTH_ERROR, table.LENGTH_ROWS)
    heads = (length - expected > _LENGTH_OFF**2) & (length > by_chance.clamp_min(4) * expected)
    return heads & (length - expected > 0.5 * coarser)


def _out_errs(measures: Measures) -> Tensor:
    """Return the heads [H] whose O errs by more than the rounding of P̄, of O and of FP32's scores makes."""
    by_rounding = mean_square(measures, table.OUT_ERROR_EXPECTED)
    by_fp32 = (FP32_STEPS + fp32_error(measures)).square()
    coarser = mean_square(measures, table.OUT_ERROR) - by_rounding
    return beyond_rounding(measures) & (coarser > 3 * by_rounding + by_fp32)


def _rounded_denominator(measures: Measures, heads: Tensor, finding: Make) -> Finding | None:
    if not heads.any():
        return None
    errs, normal = (
        float(mean_square(measures, one)[heads].mean().sqrt())
        for one in (table.LENGTH_ERROR, table.LENGTH_ERROR_EXPECTED)
    )
    told = "ℓ is rounded, or P after its division by ℓ"
    text = f"the length of O's rows errs by {errs:.1e}, where the rounding of P̄ and O makes {normal:.1e}: {told}"
    return finding("rounded_denominator", heads, text)


@dataclass(frozen=True)
class _Following:
    """Whether δ takes the rounding of O, by head [H].

    Attributes:
        slope: of δ's error on what the rounding of O adds to rowsum(dO∘O), the mean over sequences.
        surely, surely_not: bool. A head that does not tell is neither.
        rounding: RMS of what the rounding of O adds, in |dO||O|.
    """

    slope: Tensor
    surely: Tensor
    surely_not: Tensor
    rounding: Tensor


def _following(
    call: AttentionCall, measures: Measures, factors: Factors, identities: Sequence[str]
) -> _Following | None:
    if table.FOLLOWS_OUT.name not in measures:
        return None
    mean, margin = mean_and_margin(measures[table.FOLLOWS_OUT.name], identities)
    rounding = mean_square(measures, table.DELTA_ROUNDING).sqrt()
    told = (rounding > fp32_error(measures)) & ~factors.either
    expected = mean_square(measures, table.OUT_ERROR_EXPECTED)
    if call.q.dtype in (torch.float32, torch.float64):  # whose O may be held in BF16 all the same
        expected = expected.clamp_min(BF16**2)
    only_rounded = mean_square(measures, table.OUT_ERROR) < _ROUNDED * expected
    surely, surely_not = mean - margin > FOLLOWS, mean + margin < FOLLOWS
    return _Following(mean, told & surely, told & surely_not & only_rounded, rounding)


def _held_delta(
    measures: Measures, identities: Sequence[str], heads: Tensor, finding: Make
) -> tuple[Finding | None, Tensor]:
    """Say in which of some heads [H] δ is held in 16 bits, and return them. BF16 comes first: what it makes has what
    FP16 makes in it. Of the ways to hold it in one dtype the slope is largest on that which is so."""
    none = torch.zeros_like(heads)
    if table.OF_DELTA_ROWS.name not in measures:
        return None, none
    slopes_of_all = {key: _surely_follows(measures, key, identities) * heads for key in table.OF_DELTA}
    for dtype, name in (("bfloat16", "BF16"), ("float16", "FP16")):
        slopes = {key: slope for key, slope in slopes_of_all.items() if key[1] == dtype}
        (_, _, cut), largest = max(slopes.items(), key=lambda one: float(one[1].sum()))
        if (found := torch.stack([*slopes.values()]).amax(0) > 0).any():
            how = f"cut off to {name}, not rounded to nearest" if cut else f"rounded to {name}"
            text = f"δ is {how}: its error has slope {float(largest[largest > 0].mean()):.2f} on what that makes"
            return finding("rounded_delta", found, text), found
    return None, none


def _surely_follows(measures: Measures, held: tuple[str, str, bool], identities: Sequence[str]) -> Tensor:
    """Return the slope [H] of δ's error on what holding it so makes, where it is surely above :data:`.FOLLOWS`; 0 in
    other heads."""
    slope = mean_and_margin(measures[table.OF_DELTA[held].name], identities)[0]
    spreads, rows = measures[table.OF_DELTA_SPREAD[held].name], measures[table.OF_DELTA_ROWS.name]
    return slope.where(slope - margin_by_rows(spreads, rows, identities) > FOLLOWS, 0.0)


def _factor_of_delta(measures: Measures, identities: Sequence[str]) -> Tensor:
    """Return the factor of δ, less 1, in the heads [H] where it surely is none; 0 in the others."""
    if table.DELTA_FACTOR.name not in measures:
        return torch.zeros_like(fp32_error(measures))
    return surely_off(measures[table.DELTA_FACTOR.name], identities, _CUT_MAKES[0])


def _told_factor(factors: Tensor, finding: Make) -> Finding | None:
    heads = factors != 0
    if not heads.any():
        return None
    least, most = _CUT_MAKES
    text = f"δ is {told_range(1 + factors[heads], '.4f')} times what it should be"
    if ((-factors[heads] >= least) & (-factors[heads] <= most)).all():
        text += ", as of a δ, or a P or dP behind it, that is cut off to BF16, not rounded"
    return finding("gradients_off", heads, text)


def _biased(
    bias: DeltaBias, heads: Tensor, following: _Following | None, told: Tensor, finding: Make
) -> Finding | None:
    """Say that δ is biased in some heads [H]; None where there are none. Of heads ``told`` [H] another finding tells
    where the error comes from."""
    if not heads.any():
        return None
    worst = int((bias.mean.abs() * heads).argmax())
    size, sure, nats = (float(x[worst]) for x in (bias.mean, bias.mean / bias.error, bias.nats))
    source, beyond = "", False
    if told[worst]:
        source, beyond = "the other finding tells its source; ", True
    elif following and following.surely[worst] and abs(size) > (rounding := float(following.rounding[worst])):
        source = f"it follows the rounding of O, which adds {rounding:.1e}: the bias has another source; "
        beyond = True
    elif following and following.surely[worst]:
        source = "its error follows the rounding of O; "
    elif following and following.surely_not[worst]:
        source, beyond = "its error does not follow O's rounding; ", True
    elif following and abs(size) > max(_MOST_BY_ROUNDING, float(following.rounding[worst])):
        source = f"no rounding of O to BF16 adds more than {_MOST_BY_ROUNDING:.1e}: the bias has another source; "
        beyond = True
    errors = f"{abs(sure):,.0f}" if abs(sure) < _MANY else f"more than {_MANY:,}"
    text = (
        f"δ errs by {size:+.1e} of |dO||O| on average, {errors} standard errors of {bias}, "
        f"and by {nats:+.1e} nats over them; its noise is {float(bias.noise[worst]):.1e}; {source}{ignited(size)}"
    )
    return dataclasses.replace(finding("delta_bias", heads, text), beyond_rounding=beyond)


def _responds(measures: Measures, bias: DeltaBias | None, biased: Tensor, identities: Sequence[str]) -> Tensor:
    """Return the biased heads [H] whose row sums of dS have a mean that the response of O accounts for, at least in
    part. One of them has to be sure: what is inside an attention is so in all heads."""
    if bias is None or table.SHIFT_BIAS.name not in measures:
        return torch.zeros_like(biased)
    mean, margin = mean_and_margin(measures[table.SHIFT_BIAS.name], identities)
    responds = biased & (mean.abs() >= _EXPLAINED * bias.mean.abs())
    return responds & (responds & (mean.abs() > margin)).any()


def _not_of_softmax(heads: Tensor, finding: Make) -> Finding | None:
    if not heads.any():
        return None
    text = (
        "O changes where all scores of a row grow alike, which a softmax does not notice: a soft cap is inside, or "
        "something else that is not linear; row sums of dS tell nothing of δ there"
    )
    return finding("other_scores", heads, text)


def _rounded_head(following: _Following | None, finding: Make) -> Finding | None:
    """In every FlashAttention δ follows in all heads that tell; where it comes from an exact O, in none."""
    if following is None or not (following.surely.any() and following.surely_not.any()):
        return None
    others = following.surely_not
    ours, theirs = float(following.slope[following.surely].mean()), float(following.slope[others].mean())
    which = ", ".join(map(str, (others.nonzero().flatten() + 1).tolist()))
    named = "head" if others.sum() == 1 else "heads"
    text = f"δ follows the rounding of O with slope {ours:.2f}; in {named} {which} the slope is {theirs:.2f}"
    return finding("rounded_head", following.surely, text)


def _rounded_sums(measures: Measures, heads: Tensor, identities: Sequence[str], finding: Make) -> Finding | None:
    """Say in which of some heads [H] Ō is surely rounded at each tile of keys, which may move O by less than P̄ does."""
    share, margin = mean_and_margin(measures[table.SUMS_ROUNDED.name], identities)
    heads = heads & (share - margin > 0)
    if not heads.any():
        return None
    text = (
        f"Ō is rounded at each tile of keys: of the numbers of O which that changes, {float(share[heads].mean()):.0%} "
        "more are as with it than as without"
    )
    return finding("coarse_rounding", heads, text)


def _rounded_scores(slopes: Tensor, finding: Make) -> Finding | None:
    """Say in which heads S is surely rounded, by slopes [H] that are 0 in the others."""
    if not (heads := slopes > 0).any():
        return None
    text = f"S is rounded: O's error has slope {float(slopes[heads].mean()):.2f} on what that makes"
    return finding("coarse_rounding", heads, text)


def _cut_off(measures: Measures, heads: Tensor, finding: Make) -> Finding | None:
    if not heads.any():
        return None
    share = float(measures[table.OUT_CUT.name][:, heads].nanmean())
    text = f"O is cut off, not rounded to nearest: of the numbers which that changes, {share:.0%} more are as cut off"
    return finding("coarse_rounding", heads, text)


def _coarse_rounding(call: AttentionCall, measures: Measures, heads: Tensor, finding: Make) -> Finding | None:
    if not heads.any():
        return None
    errs, normal, coarse = (
        float(measures[one.name][:, heads].mean())
        for one in (table.OUT_ERROR, table.OUT_ERROR_EXPECTED, table.OUT_ERROR_COARSE)
    )
    told = "S, P̄ or Ō is rounded to fewer bits" if call.q.dtype == torch.float32 else "S or Ō is rounded"
    if not as_rounded(measures)[heads].all():
        told = f"S or Ō is rounded more than once, which makes {coarse:.1e}, or the scores are others"
    text = f"O is off by {errs:.1e}, where the rounding of P̄ and O makes {normal:.1e}: {told}"
    return finding("coarse_rounding", heads, text)


def _dead(measures: Measures, heads: Tensor, finding: Make) -> Finding | None:
    if not heads.any():
        return None
    share = float(measures[table.DEAD_ROWS.name][:, heads].mean())
    return finding("dead_rows", heads, f"|O| of {share:.1%} of the rows is below half of exact attention's")
