"""Faults that make nonsense of finer measures: NaN, results that do not repeat, weights and rows that are far off."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.call import AttentionCall, identities_of
from flashpoint.diagnosis.exact import exact
from flashpoint.diagnosis.factors import Factors
from flashpoint.diagnosis.finding import (
    FOLLOWS,
    FP32_COARSE,
    Finding,
    Make,
    as_rounded,
    beyond_rounding,
    by_cap,
    explained,
    explained_gradient,
    fp32_error,
    mean_and_margin,
    mean_square,
    of_forward_alone,
)
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.measures import Measures, Probed, Results, by_sequence, over_sequences
from flashpoint.diagnosis.probe import Function, results_of
from flashpoint.diagnosis.result_measures import FP16_MAX, FP16_STEP, delta_error_of
from flashpoint.errors import listed

_NEAR = 1e-3
"""Of :data:`FP16_MAX`: a score so near may or may not overflow, by how it is rounded."""
_WEIGHT_OFF = 0.01
"""Weights and masses: the rounding of P̄ and O to BF16 accounts for 0.004, FP32's of S and L for the rest
(:func:`fp32_error`)."""
_GRADIENT_OFF = 0.02
"""Relative error of dK and dV: BF16's roundings account for 0.005, FP32's of S and L for the rest."""
_BEYOND_ROUNDING = 5.0
"""Times the error of δ that roundings make; that of P̄, O, dP, dS and dQ to BF16 makes up to 3."""
_DELTA_OFF = 0.01
"""Relative error of dQ from where such an error of δ is told: it lies along PK, as no other one does."""
_TURNED = 0.25
"""Share of the squared error of O that is across O, from where its rows are not just short."""
_FIRST_TURNED = 0.02
"""Of a first row of O, from where it is turned."""
_LOST = 0.5
"""How far the share of L's gradient that is lost may be from all of it, and what of δ's error this may leave."""
_GRADIENTS = {"dQ": table.GRAD_Q, "dK": table.GRAD_K, "dV": table.GRAD_V}
_CAPS = {"dQ": table.GRAD_Q_CAP, "dK": table.GRAD_K_CAP}
_SHORT = {"bfloat16": "BF16", "float16": "FP16"}
_MIDDLE = 2.0**-4
"""Of FP16's range, whose numbers are from 2⁻²⁴ to 2¹⁶. A loss whose dO is larger leaves less room above than below."""


def differing_rows(function: Function | None, call: AttentionCall, results: Results) -> Tensor:
    """Return the rows [N, H, T] in which a second call returns another O, or a dQ that differs by more
    than rounding.

    Of O every bit counts. FlashAttention adds up dQ in the order in which blocks of keys finish, unless PyTorch's
    deterministic algorithms are on: dQ may differ by rounding.
    """
    assert results.out is not None
    rows = torch.zeros(results.out.shape[:-1], dtype=torch.bool, device=results.out.device)
    if function is not None:
        again = results_of(function, call)
        assert again.out is not None
        rows = _differs(results.out, again.out).any(-1)
        if results.grad_q is not None and again.grad_q is not None:
            one, other = results.grad_q.double(), again.grad_q.double()
            sizes = one.norm(dim=-1)
            usual = sizes.square().nanmean(-1, keepdim=True).sqrt()  # a row that almost cancels may differ by itself
            numbers = torch.finfo(results.grad_q.dtype)
            # By this dQ of the dtype's smallest numbers differs, or not at all.
            least = numbers.smallest_normal * numbers.eps * results.grad_q.shape[-1] ** 0.5
            off = ~((one - other).norm(dim=-1) <= _GRADIENT_OFF * torch.maximum(sizes, usual) + least)
            rows |= _differs(one, other).any(-1) & off
    return rows


def _differs(one: Tensor, other: Tensor) -> Tensor:
    return (one != other) & ~(one.isnan() & other.isnan())


def nonfinite(call: AttentionCall, results: Results, measures: Measures, finding: Make) -> Finding | None:
    """The first place with NaN or infinity: what the layer took, its O, what came back to it, its gradients."""
    named, rows = _nonfinite_rows(call, {"q": call.q, "k": call.k, "v": call.v})
    if (what := _nonfinite_form(call.form)) and not named:
        text = f"{what} holds NaN or infinity: look at what makes it"
        heads = torch.ones(call.q.shape[1], dtype=torch.bool)
        return dataclasses.replace(finding("nonfinite", heads, text), inherited=True)
    if named:
        before = "an earlier layer, or weights" if call.layer > 1 else "the batch, embeddings, or weights"
        text = f"{_hold(named)} NaN or infinity: look at {before}, which gradients of an earlier step can have made NaN"
        return dataclasses.replace(finding("nonfinite", rows.any(-1).any(0), text), inherited=True)
    assert results.out is not None
    if (heads := measures[table.NONFINITE_OUT.name].sum(0) > 0).any():
        return _nonfinite_out(call, ~results.out.isfinite().all(-1), heads, measures, finding)
    of_rows = None if call.grad_logsumexp is None else call.grad_logsumexp[..., None]
    named, rows = _nonfinite_rows(call, {"dO": call.grad_out, "dL": of_rows})
    if named:
        text = f"{_hold(named)} NaN or infinity: look at a later layer, or at the loss"
        return dataclasses.replace(finding("nonfinite", rows.any(-1).any(0), text), inherited=True)
    return _nonfinite_gradients(call, results, finding)


def _nonfinite_gradients(call: AttentionCall, results: Results, finding: Make) -> Finding | None:
    """Say in which of dQ, dK and dV NaN or infinity is, where what the backward pass took holds none that counts. The O
    of a call may hold it in rows that see no key."""
    gradients = {"dQ": results.grad_q, "dK": results.grad_k, "dV": results.grad_v}
    named, rows = _nonfinite_rows(call, gradients)
    if not named:
        return None
    text = f"{_hold(named)} NaN or infinity in {int(rows.sum()):,} rows"
    if call.out is not None and (lone := int((~call.out.isfinite().all(-1)).sum())):
        source = f"it comes from O, NaN in {lone:,} rows that see no key"
        text = f"{text}; {source}: make the weights of these rows 0, as by nan_to_num"
        return finding("nonfinite", rows.any(-1).any(0), text)
    n, head, row = (place + 1 for place in rows.nonzero()[0].tolist())
    made = "the backward pass of this attention made it"
    if call.other_gradients:
        made = f"it came through {call.other_gradients}, or the backward pass of this attention made it"
    finite = [name for name in ("dQ", "dK", "dV") if gradients[name] is not None and name not in named]
    text = (
        f"{text}, the first is row {row:,} of head {head} in sequence {n}; "
        f"{listed(['q', 'k', 'v', 'O', 'dO', *finite])} are finite: {made} at step {call.step:,}"
    )
    if call.q.dtype == torch.float16:
        text += "; in FP16 a loss that is scaled too much does so, too"
    return finding("nonfinite", rows.any(-1).any(0), text)


def _nonfinite_form(form: Form) -> str:
    """Return which tensor of a form holds what closes no pair and is no finite number; empty where none does."""
    added = {"the bias of the scores": form.bias, "the sink": form.sink}
    return next((what for what, x in added.items() if x is not None and not (x < torch.inf).all()), "")


def _nonfinite_rows(call: AttentionCall, tensors: Mapping[str, Tensor | None]) -> tuple[list[str], Tensor]:
    """Return which tensors have NaN or infinity, and the rows [N, H, T] in which one of them does, of queries or of
    keys."""
    longest = max(call.q.shape[2], call.k.shape[2])
    named, rows = [], torch.zeros((*call.q.shape[:2], longest), dtype=torch.bool)
    for name, tensor in tensors.items():
        if tensor is not None and (here := ~tensor.isfinite().all(-1)).any():
            named.append(name)
            rows[..., : here.shape[2]] |= here.repeat_interleave(call.q.shape[1] // tensor.shape[1], 1).cpu()
    return named, rows


def _hold(named: Sequence[str]) -> str:
    return f"{listed(named)} {'hold' if len(named) > 1 else 'holds'}"


def _nonfinite_out(call: AttentionCall, rows: Tensor, heads: Tensor, measures: Measures, finding: Make) -> Finding:
    """Say of rows [N, H, T] of O, in some heads [H], where they begin, and whether scores in FP16 made them."""
    largest = float((measures[table.LARGEST_SCORE.name][:, heads] / call.form.scale).max())
    product = f"{largest:,.0f}" if largest < 1e9 else f"{largest:.1e}"
    n, head, row = (place + 1 for place in rows.nonzero()[0].tolist())
    text = (
        f"{int(rows.sum()):,} rows of O hold NaN or infinity, the first is row {row:,} of head {head} in sequence {n}"
    )
    if largest <= FP16_MAX:
        return finding("nonfinite", heads, f"{text}; QKᵀ reaches {product}")
    if call.q.dtype == torch.float16:
        return finding("fp16_overflow", heads, f"{text}; QKᵀ reaches {product}, and FP16 ends at 65,504")
    if not call.form.softcap and _as_fp16_overflows(call, rows, heads):
        just = "these are just the rows whose QKᵀ overflows in FP16, which ends at 65,504"
        return finding("fp16_overflow", heads, f"{text}; QKᵀ reaches {product}: {just}")
    perhaps = f"if the kernel holds scores in FP16 they overflow: the largest QKᵀ is {product}"
    return finding("nonfinite", heads, f"{text}; {perhaps}")


def _as_fp16_overflows(call: AttentionCall, rows: Tensor, heads: Tensor) -> bool:
    """Whether of some heads [H] just those rows [N, H, T] are given whose QKᵀ leaves FP16's range, and not all are.

    A score of infinity makes its row NaN; one of minus infinity is a weight of 0, unless all of the row are.
    """
    some_hold = False
    nothing = torch.zeros(1, call.q.shape[-2], call.k.shape[-2], device=rows.device)
    for n in range(len(rows)):
        closed = call.form.scores(nothing.clone(), n) == -torch.inf
        for head in heads.nonzero().flatten().tolist():
            products = call.q[n, head].double() @ call.k[n, head // call.groups].double().mT
            hidden = closed[head % len(closed)]
            size = products.masked_fill_(hidden, -torch.inf).amax(-1).abs()
            sure = ((size - FP16_MAX).abs() > _NEAR * FP16_MAX) & ~hidden.all(-1)
            if (sure & ((size > FP16_MAX) != rows[n, head])).any():
                return False
            some_hold |= bool((sure & ~rows[n, head]).any())
    return some_hold


def lost_logsumexp(call: AttentionCall, results: Results, finding: Make) -> Finding | None:
    """The heads whose dQ lacks the gradient that came to L: its error along PK is just that gradient."""
    if call.grad_logsumexp is None or results.grad_q is None:
        return None
    measures = by_sequence(call, results, None, _of_logsumexp)
    mean, margin = mean_and_margin(measures["slope"], identities_of(call))
    left = measures["left"].nanmean(0)
    heads = (mean - margin > 1 - _LOST) & (mean + margin < 1 + _LOST) & (left < _LOST)
    if not heads.any():
        return None
    text = (
        "dQ lacks the gradient that came to L, the logsumexp that the attention returns beside O: of "
        f"{float(mean[heads].mean()):.0%} of it nothing came back"
    )
    return finding("gradients_off", heads, text)


def _of_logsumexp(call: AttentionCall, results: Results, _probed: Probed | None, n: int) -> Measures:
    """Return the slope [H] of δ's error on the gradient of L, and the share of its square sum that this leaves."""
    assert results.grad_q is not None
    assert call.grad_logsumexp is not None
    true = exact(call, n)
    size = true.attended_keys.norm(dim=-1)  # of what an error of 1 makes in a row of dQ
    error = delta_error_of(results.grad_q[n].double(), true) * size
    lost = call.grad_logsumexp[n].double() * size
    slope = (error * lost).sum(-1) / lost.square().sum(-1)
    left = (error - lost).square().sum(-1) / error.square().sum(-1)
    return {"slope": slope, "left": left}


def wrong_weights(
    call: AttentionCall, measures: Measures, probed: Probed | None, factors: Factors, finding: Make
) -> Finding | None:
    """The heads whose weights or masses are off; not those in which a factor of the scores accounts for O."""
    if probed is None:
        return None
    whole = ~explained(measures) & ~factors.account
    weights, masses = (measures[one.name] * whole for one in (table.WEIGHT_ERROR, table.MASS_ERROR))
    if (heads := weights.amax(0) > _WEIGHT_OFF + fp32_error(measures)).any():
        n, head = _largest(weights * heads)
        queries, keys = (
            _span(int(measures[one.name][n, head]), probed.block)
            for one in (table.WEIGHT_ERROR_QUERIES, table.WEIGHT_ERROR_KEYS)
        )
        got, meant = (float(measures[one.name][n, head]) for one in (table.WEIGHT_FOUND, table.WEIGHT_EXACT))
        text = f"queries {queries} give keys {keys} a weight of {got:.3f} in place of {meant:.3f}"
        if meant == 0 and not (call.form.is_plain and not call.form.is_causal):
            text += f": the {'causal ' if call.form.is_plain else ''}mask hides these keys"
        return finding("dropped_tile" if got < 0.2 * meant else "stale_maximum", heads, text)
    if (heads := masses.amax(0) > _WEIGHT_OFF + fp32_error(measures)).any():
        n, head = _largest(masses * heads)
        queries = _span(int(measures[table.MASS_ERROR_BLOCK.name][n, head]), probed.block)
        off = float(measures[table.MASS_ERROR.name][n, head])
        text = (
            f"Σⱼ Pᵢⱼ of queries {queries} is off by {off:.3f} in the backward pass, and weights of the forward pass "
            "are right: L is off, or the backward pass has another mask, or dV alone is wrong"
        )
        return finding("logsumexp_block", heads, text)
    return None


def fp16_underflow(measures: Measures, finding: Make) -> Finding | None:
    """The heads whose gradients FP16 cannot hold, however the attention computes them, as dO of the layer is small.

    Where it is not, the softmax makes gradients small, as one key or a sink has all weight. No scale of the loss helps.
    """
    heads = underflows(measures)
    if not heads.any():
        return None
    of_all = measures[table.GRAD_OUT_SIZE.name].square().nanmean().sqrt()  # a scale of the loss is one of all heads
    if of_all >= _MIDDLE:
        return None
    size = float(measures[table.GRAD_OUT_SIZE.name][:, heads].nan_to_num(torch.inf).min())
    known = {what: measures[one.error.name] for what, one in _GRADIENTS.items() if one.error.name in measures}
    errors = {what: float(error[:, heads].nan_to_num(0.0).max()) for what, error in known.items()}
    worst = max(errors, key=lambda what: errors[what], default="")
    off = f": {worst} is off by up to {errors[worst]:.1%}" if worst else ""
    text = f"dO is {size:.1e} in the root mean square, where FP16's smallest numbers lie {FP16_STEP:.1e} apart{off}"
    return finding("fp16_underflow", heads, text)


def _rounding(measures: Measures, what: str, off: float = _GRADIENT_OFF) -> Tensor:
    """Return the relative error [N, H] of O, dQ, dK or dV that roundings account for: ``off``, and what FP32's add."""
    of_all = (off + fp32_error(measures)).expand_as(measures[table.LARGEST_SCORE.name])
    return of_all + by_cap(measures, _CAPS[what]) if what in _CAPS else of_all


def underflows(measures: Measures) -> Tensor:
    """Return the heads [H] in which FP16's smallest numbers make gradients err, or dO itself, and nothing more does.

    A number that is rounded to a step errs by step/√12 in the root mean square. Of gradients as much as twice the error
    counts that FP16 makes where dP, dS and what is returned are held in it.
    """
    if table.GRAD_OUT_SIZE.name not in measures:
        return torch.zeros(measures[table.LARGEST_SCORE.name].shape[1], dtype=torch.bool)
    size = measures[table.GRAD_OUT_SIZE.name].square().nanmean(0).sqrt()
    lost, accounted = _GRADIENT_OFF * size < FP16_STEP / 12**0.5, torch.ones_like(size, dtype=torch.bool)
    for what, one in _GRADIENTS.items():
        if one.error.name in measures:
            error, fp16 = measures[one.error.name], measures[one.fp16.name]
            lost |= ((error > _GRADIENT_OFF) & (fp16 > _GRADIENT_OFF)).any(0)
            accounted &= ~(error > 2 * fp16 + _rounding(measures, what)).any(0)
    return lost & accounted


def rounded_logsumexp(measures: Measures, identities: Sequence[str], factors: Factors, finding: Make) -> Finding | None:
    """The heads whose dQ is as of an L of 16 bits. BF16 comes first: what it makes has what FP16 makes in it."""
    for (dtype, _), one in table.OF_L.items():
        if one.name not in measures:
            continue
        slope, margin = mean_and_margin(measures[one.name], identities)
        heads = (slope - margin > FOLLOWS) & (fp32_error(measures) < FP32_COARSE) & ~factors.another
        if heads.any():
            off = float(over_sequences(measures)[table.GRAD_Q.error.name][heads].mean())
            text = (
                f"dQ is off by {off:.1e}, and its rows have the factors that an L in {_SHORT[dtype]} makes, with slope "
                f"{float(slope[heads].mean()):.2f}: L is rounded between the two passes"
            )
            return finding("rounded_logsumexp", heads, text)
    return None


def other_denominator(measures: Measures, identities: Sequence[str], factors: Factors, finding: Make) -> Finding | None:
    """The heads whose O is that of an ℓ with a constant added to it: beside that O errs by rounding alone."""
    added, margin = mean_and_margin(measures[table.DENOMINATOR_ADDED.name], identities)
    expected, left = (mean_square(measures, one) for one in (table.OUT_ERROR_EXPECTED, table.OUT_ERROR_ADDED))
    heads = (added.abs() > margin) & beyond_rounding(measures) & ~factors.account & (left < 4 * expected)
    heads &= fp32_error(measures) < FP32_COARSE
    if not heads.any():
        return None
    off, told = float(over_sequences(measures)[table.OUT_ERROR.name][heads].mean()), float(added[heads].mean())
    text = (
        f"O is off by {off:.1%}, as of an ℓ + {told:.3g} in the place of ℓ, the row's sum of exp(S − max S): each row "
        "has another length by what this constant makes, and no other direction"
    )
    return finding("other_denominator", heads, text.replace("+ -", "− "))


def untold_scale(call: AttentionCall, measures: Measures, finding: Make) -> Finding | None:
    """The heads of a user's function whose dQ and dK are of another scale, where scores are so small that O errs no
    more with it than without: W_Q is 0 before the first step of some models."""
    if ":" not in call.attention or table.GRAD_Q_BESIDE_FACTOR.name not in measures:
        return None
    factor = 1 + measures[table.GRAD_Q_FACTOR.name]
    tells = ~factor.isnan()
    if not tells.any():
        return None
    usual = float(factor[tells].median())
    allowed = _rounding(measures, "dQ")
    alike = (usual > 0) & (abs(usual - 1) > _GRADIENT_OFF) & ((factor / usual - 1).abs() <= allowed)
    for of in (table.GRAD_Q_BESIDE_FACTOR, table.GRAD_K_BESIDE_FACTOR):
        alike &= measures[of.name].nan_to_num(0.0) <= allowed if of.name in measures else alike
    of_rounding = torch.maximum(measures[table.OUT_ERROR.name], measures[table.OUT_ERROR_EXPECTED.name])
    alike &= measures[table.OUT_BESIDE_FACTOR.name] <= 2 * of_rounding
    if not alike[tells].all():
        return None
    text = (
        f"dQ is {usual:.3g} times what it should be, as of scale {usual * call.form.scale:.3g} in the place of "
        f"{call.form.scale:.3g}, in every head; scores are too small for O to show which one is inside"
    )
    return finding("other_scores", tells.any(0), text)


def wrong_rows(call: AttentionCall, measures: Measures, factors: Factors, finding: Make) -> Finding | None:
    """The heads whose O is off in some rows, or else whose gradients are; not those in which a factor of the scores
    accounts for either, nor an O whose rows are switched off or short. Heads that share one of keys share dK and dV,
    too."""
    together, lost = over_sequences(measures), underflows(measures)
    for all_rows, error, kind, what in (
        (table.OUT_ROWS_OFF, table.OUT_ERROR, "out_rows", "O"),
        (table.GRAD_Q_ROWS_OFF, table.GRAD_Q_UNEXPLAINED, "gradients_off", "dQ"),
    ):
        rows = all_rows
        if rows.count.name not in measures:
            continue
        heads = measures[rows.count.name].sum(0) > 0
        # A few rows that almost cancel are far off for no fault; a head that is off as a whole is none of these.
        heads &= (measures[error.name].nan_to_num(0.0) > _rounding(measures, what)).any(0)
        if what == "O":
            turned, whole = (measures[one.name].square().sum(0) for one in (table.OUT_TURNED, table.OUT_ERROR))
            spared = explained(measures) & ((turned < _TURNED * whole) | as_rounded(measures))
            heads &= beyond_rounding(measures) & ~spared & ~factors.account
            few = measures[table.OUT_ROWS_TURNED.count.name].sum(0) > 0
            few &= (fp32_error(measures) < FP32_COARSE) & ~factors.account & ~heads
            heads, rows = heads | few, table.OUT_ROWS_TURNED if few.any() else rows
        else:
            heads &= ~lost & ~explained_gradient(measures, together[error.name]) & ~factors.of_scores & ~factors.another
        if heads.any():
            first, last = measures[rows.first.name][:, heads], measures[rows.last.name][:, heads]
            where = _rows_told(int(first[first >= 0].amin()), int(last.amax()))
            size = float(together[error.name][heads].mean())
            text = f"{what} is off by {size:.1%}, in {where}"
            if what == "O" and of_forward_alone(measures)[heads].all():
                text += "; dV is right, so P of the backward pass is"
            if what == "O" and factors.another[heads].all() and first_row_turned(call, measures):
                text += "; row 1 is not V of its one key: rows see later keys"
            return finding(kind, heads, text)
    for error, what in ((table.GRAD_Q_UNEXPLAINED, "dQ"), (table.GRAD_K_UNEXPLAINED, "dK"), (table.GRAD_V.error, "dV")):
        if error.name not in measures:
            continue
        spared = explained_gradient(measures, together[error.name]) | lost | factors.of_scores | factors.another
        if what != "dQ":
            spared = spared.unflatten(0, (-1, call.groups)).any(-1).repeat_interleave(call.groups)
        heads = (together[error.name] > _rounding(measures, what).mean(0)) & ~spared
        if heads.any():
            size = float(together[error.name][heads].mean())
            return finding("gradients_off", heads, f"{what} is off by {size:.1%}; BF16 accounts for 0.5 %")
    return None


def first_row_turned(call: AttentionCall, measures: Measures) -> bool:
    """Return whether the first row of O of a causal call, which has one key, has another direction than its V. That is
    no matter of scores. BF16's rounding turns the row by 0.002."""
    turned = measures[table.FIRST_ROW_TURNED.name].mean()
    return call.form.is_causal and float(turned) > _FIRST_TURNED


def _rows_told(first: int, last: int) -> str:
    return f"row {first + 1:,}" if first == last else f"rows {first + 1:,} to {last + 1:,}"


def wrong_delta(measures: Measures, heads: Tensor, finding: Make) -> Finding | None:
    """Which of some heads [H] have errors of δ far beyond its rounding, so that dQ is off; their mean may be 0."""
    if table.GRAD_DELTA.noise.name not in measures:
        return None
    noise, of_out, of_grad_q = (
        measures[one.name].square().nanmean(0).sqrt()
        for one in (table.GRAD_DELTA.noise, table.DELTA.noise, table.GRAD_DELTA_ROUNDING)
    )
    off = over_sequences(measures)[table.GRAD_Q.error.name]
    heads = heads & (noise > _BEYOND_ROUNDING * (of_out.square() + of_grad_q.square()).sqrt())
    least = _rounding(measures, "dQ", _DELTA_OFF).mean(0)
    heads &= (off > least) & ~explained_gradient(measures, off) & ~underflows(measures)
    if not heads.any():
        return None
    errs, normal = (float(x[heads].max()) for x in (noise, of_out))
    text = (
        f"dQ is off by {float(off[heads].mean()):.1%}, along PK, as by a wrong δ: its error is {errs:.1e} of |dO||O| "
        f"in the root mean square, where the rounding of O makes {normal:.1e}"
    )
    return dataclasses.replace(finding("gradients_off", heads, text), beyond_rounding=True)


def _largest(values: Tensor) -> tuple[int, int]:
    place = int(values.argmax())
    return place // values.shape[1], place % values.shape[1]


def _span(block: int, size: int) -> str:
    return f"{block * size + 1:,} to {(block + 1) * size:,}"
