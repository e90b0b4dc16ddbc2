"""What is wrong with an attention call, in plain words with its evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpoint.diagnosis.bias import DeltaBias, ignited
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_sample import DeltaSample
from flashpoint.diagnosis.measured import measured
from flashpoint.diagnosis.measures import Measures, Results
from flashpoint.diagnosis.probe import Function, Probed, probe, results_of
from flashpoint.numerics.variant import AttentionVariant

_FP16_MAX = 65_504.0
_WEIGHT_OFF = 0.01
"""Weights and masses: the rounding of P̄ and O to BF16 accounts for 0.004, FP32's of S and L for the rest
(:func:`_of_fp32`)."""
_GRADIENT_OFF = 0.02
"""Relative error of dK and dV: BF16's roundings account for 0.005, FP32's of S and L for the rest."""
_LENGTH_OFF = 5e-4
"""Of the length error's root mean square beyond what is expected; a BF16 ℓ adds 1e-3 or more."""
_FOLLOWS = 0.5
_FEW = 3
"""Sequences without which nothing is said of δ's bias."""
_DEAD_ROWS = 0.001
"""Share of rows that are switched off. Nothing else makes |O| half as long."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in some heads of a layer.

    Attributes:
        kind: as docs/watching.md lists them.
        layer: from 1.
        heads: from 1.
        text: what is wrong and the figures that show it, one sentence.
    """

    kind: str
    layer: int
    heads: tuple[int, ...]
    text: str


_Make = Callable[[str, Tensor, str], Finding]
"""Makes a finding of a kind, the heads [H] that have it, and a text."""


@dataclass(frozen=True)
class Diagnosis:
    """Measures and findings of one layer.

    Attributes:
        measures: by name, [N, H].
        bias: of δ, in the call's sequences and in further ones; None where nothing tells of δ's error.
        probed: whether the attention was asked with features of its own.
    """

    call: AttentionCall
    measures: Measures
    bias: DeltaBias | None
    probed: bool
    findings: tuple[Finding, ...]

    @property
    def of_fp32(self) -> Tensor:
        """The relative error [H] of weights that FP32's rounding of scores accounts for."""
        return _of_fp32(self.measures)


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
    results = Results.kept(call) if function is None else results_of(function, call)
    if results.out is None:
        raise ValueError("the call holds no O: name the attention that computes it")
    probed = probe(function, call) if function else None
    differing = _differing_rows(function, call, results)
    measures = measured(call, results, probed, declared)
    bias = DeltaBias.of(measures, call.step, sample)
    findings = _findings(call, measures, bias, probed, differing, declared is not None)
    return Diagnosis(call, measures, bias, probed is not None, tuple(findings))


def delta_finding(layer: int, bias: DeltaBias | None) -> Finding | None:
    """Return the finding that δ of a layer is biased, by its errors alone."""
    return _biased(bias, {}, _maker(layer))


def _maker(layer: int) -> _Make:
    def finding(kind: str, heads: Tensor, text: str) -> Finding:
        return Finding(kind, layer, tuple((heads.nonzero().flatten() + 1).tolist()), text)

    return finding


def _differing_rows(function: Function | None, call: AttentionCall, results: Results) -> Tensor:
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
            off = ~((one - other).norm(dim=-1) <= _GRADIENT_OFF * torch.maximum(sizes, usual))
            rows |= _differs(one, other).any(-1) & off
    return rows


def _differs(one: Tensor, other: Tensor) -> Tensor:
    return (one != other) & ~(one.isnan() & other.isnan())


def _findings(
    call: AttentionCall,
    of: Measures,
    bias: DeltaBias | None,
    probed: Probed | None,
    differing: Tensor,
    declares: bool,
) -> list[Finding]:
    """Return the findings. One that makes nonsense of the others is returned alone."""
    finding = _maker(call.layer)
    if (one := _nonfinite(call, of, finding)) is not None:
        return [one]
    if (heads := differing.any(-1).any(0)).any():
        rows = int(differing.sum())
        return [finding("random_row", heads, f"a second call on the same inputs returns {rows:,} rows that differ")]
    for named in (_wrong_weights(of, probed, finding), _wrong_rows(of, finding)):
        if named:
            return [named]
    length, expected = (of[name].square().mean(0) for name in ("length_error", "length_error_expected"))
    coarser = of["out_error"].square().mean(0) - of["out_error_expected"].square().mean(0)
    # A rounded ℓ makes rows of O longer or shorter; what else is rounded turns them, too.
    heads = (length - expected > _LENGTH_OFF**2) & (length > 4 * expected) & (length - expected > 0.5 * coarser)
    dead = of["dead_rows"].mean(0) > _DEAD_ROWS
    told_apart = ~dead & (_of_fp32(of) < 2**-9)  # beyond, P̄ of the largest score is not 1, and its rounding counts
    heads &= told_apart & ~_explained(of) if declares else told_apart
    found = [_biased(bias, of, finding)]
    rough = ~heads & told_apart & (coarser > 3 * of["out_error_expected"].square().mean(0))
    if not declares and rough.any():
        errs, explained = (float(of[name][:, rough].mean()) for name in ("out_error", "out_error_expected"))
        coarse = "S, P̄ or Ō is rounded to fewer bits" if call.q.dtype == torch.float32 else "S or Ō is rounded"
        text = f"O is off by {errs:.1e}, where the rounding of P̄ and O makes {explained:.1e}: {coarse}"
        found.append(finding("coarse_rounding", rough, text))
    if heads.any():
        errs, explained = (float(x[heads].mean().sqrt()) for x in (length, expected))
        text = f"the length of O's rows errs by {errs:.1e}, where an ℓ that is not rounded makes {explained:.1e}"
        found.append(finding("rounded_denominator", heads, text))
    found += [None if heads.any() else _rounded_head(of, finding), _dead(of, finding)]
    return [one for one in found if one is not None]


def _nonfinite(call: AttentionCall, of: Measures, finding: _Make) -> Finding | None:
    """The first place with NaN or infinity: what the layer took, its O, what came back to it, its gradients."""
    inputs = torch.stack(
        [
            ~x.isfinite().all(-1).all(-1).repeat_interleave(call.q.shape[1] // x.shape[1], 1)
            for x in (call.q, call.k, call.v)
        ]
    ).any(0)
    if (heads := inputs.any(0).cpu()).any():
        return finding("nonfinite", heads, "q, k or v hold NaN or infinity: look at an earlier layer")
    if (heads := of["nonfinite_out"].sum(0) > 0).any():
        product = float((of["score_max"][:, heads] / call.scale).max())
        text = (
            f"{int(of['nonfinite_out'][:, heads].sum()):,} rows of O hold NaN or infinity; QKᵀ reaches {product:,.0f}"
        )
        if product > _FP16_MAX:
            return finding("fp16_overflow", heads, f"{text}, and FP16 ends at 65,504")
        return finding("nonfinite", heads, text)
    if (heads := ~call.grad_out.isfinite().all(-1).all(-1).all(0).cpu()).any():
        return finding("nonfinite", heads, "dO holds NaN or infinity: look at a later layer, or at the loss")
    if (heads := of["nonfinite"].sum(0) > 0).any():
        return finding(
            "nonfinite", heads, f"{int(of['nonfinite'][:, heads].sum()):,} rows of dQ, dK or dV hold NaN or infinity"
        )
    return None


def _wrong_weights(of: Measures, probed: Probed | None, finding: _Make) -> Finding | None:
    if probed is None:
        return None
    whole = ~_explained(of)
    weights, masses = (of[name] * whole for name in ("weight_error", "mass_error"))
    if (heads := weights.amax(0) > _WEIGHT_OFF + _of_fp32(of)).any():
        n, head = _largest(weights)
        queries, keys = (
            _span(int(of[name][n, head]), probed.block) for name in ("weight_error_queries", "weight_error_keys")
        )
        got, meant = float(of["weight_found"][n, head]), float(of["weight_exact"][n, head])
        text = f"queries {queries} give keys {keys} a weight of {got:.3f} in place of {meant:.3f}"
        return finding("dropped_tile" if got < 0.2 * meant else "stale_maximum", heads, text)
    if (heads := masses.amax(0) > _WEIGHT_OFF + _of_fp32(of)).any():
        n, head = _largest(masses)
        queries = _span(int(of["mass_error_block"][n, head]), probed.block)
        return finding(
            "logsumexp_block",
            heads,
            f"Σⱼ Pᵢⱼ of queries {queries} is off by {float(of['mass_error'][n, head]):.3f} in the backward pass, and "
            "weights of the forward pass are right: L is off",
        )
    return None


def _wrong_rows(of: Measures, finding: _Make) -> Finding | None:
    for name, kind, error in (
        ("out", "out_rows", "out_error"),
        ("grad_q", "gradients_off", "grad_q_unexplained"),
    ):
        if f"{name}_rows_off" in of and (heads := of[f"{name}_rows_off"].sum(0) > 0).any():
            # A few rows that almost cancel are far off for no fault; a head that is off as a whole is none of these.
            heads &= (of[error].amax(0) > _GRADIENT_OFF + _of_fp32(of)) & ~_explained(of)
            if heads.any():
                first = int(of[f"{name}_rows_off_first"][:, heads].clamp_min(0).amin()) + 1
                last = int(of[f"{name}_rows_off_last"][:, heads].amax()) + 1
                size = float(of[error][:, heads].mean())
                what = "O" if name == "out" else "dQ"
                return finding(kind, heads, f"{what} is off by {size:.1%}, in rows {first:,} to {last:,}")
    for name in ("grad_k_unexplained", "grad_v_error"):
        if name in of and (heads := (of[name].mean(0) > _GRADIENT_OFF + _of_fp32(of)) & ~_explained(of)).any():
            what = {"grad_k_unexplained": "dK", "grad_v_error": "dV"}[name]
            size = float(of[name][:, heads].mean())
            return finding("gradients_off", heads, f"{what} is off by {size:.1%}; BF16 accounts for 0.5 %")
    return None


def _of_fp32(of: Measures) -> Tensor:
    """Return the relative error [H] of P = exp(S − L) that S of either pass and L have from FP32, at its largest.

    A sum of FP32 errs by one number in each pass; L is rounded by half of one.
    """
    return torch.expm1(2.5 * of["score_spacing"].amax(0))


def _explained(of: Measures) -> Tensor:
    """Return the heads [H] whose errors follow from rounded scores, or from rows that are switched off."""
    coarse = of["out_error"].square().mean(0) > 2 * of["out_error_expected"].square().mean(0)
    as_rounded = of["out_error"].square().mean(0) < 4 * of["out_error_coarse"].square().mean(0)
    return (coarse & as_rounded) | (of["dead_rows"].mean(0) > _DEAD_ROWS)


def _biased(bias: DeltaBias | None, of: Measures, finding: _Make) -> Finding | None:
    if bias is None or bias.sequences < _FEW or not (heads := bias.igniting).any():
        return None
    worst = int((bias.mean.abs() * heads).argmax())
    size, sure, nats = (float(x[worst]) for x in (bias.mean, bias.mean / bias.error, bias.nats))
    source = ""
    if "delta_follows_out" in of:
        follows = float(of["delta_follows_out"][:, worst].mean()) > _FOLLOWS
        source = "its error follows the rounding of O; " if follows else "its error does not follow O's rounding; "
    text = (
        f"δ errs by {size:+.1e} of |dO||O| on average, {abs(sure):.0f} standard errors of {bias}, "
        f"and by {nats:+.1e} nats over them; its noise is {float(bias.noise[worst]):.1e}; {source}{ignited(size)}"
    )
    return finding("delta_bias", heads, text)


def _rounded_head(of: Measures, finding: _Make) -> Finding | None:
    if "delta_follows_out" not in of or len(of["delta_follows_out"]) < 2:  # one sequence has no spread
        return None
    follows = of["delta_follows_out"].mean(0)
    spread = of["delta_follows_out"].std(0) / len(of["delta_follows_out"]) ** 0.5
    heads, others = follows - 5 * spread > _FOLLOWS, follows + 5 * spread < _FOLLOWS
    if not heads.any() or heads.sum() > others.sum():  # all of them: as in every FlashAttention
        return None
    ours, theirs = float(follows[heads].mean()), float(follows[others].mean())
    return finding(
        "rounded_head",
        heads,
        f"δ follows the rounding of O with slope {ours:.2f}, in the other heads with {theirs:.2f}",
    )


def _dead(of: Measures, finding: _Make) -> Finding | None:
    heads = of["dead_rows"].mean(0) > _DEAD_ROWS
    if not heads.any():
        return None
    share = float(of["dead_rows"][:, heads].mean())
    return finding("dead_rows", heads, f"|O| of {share:.1%} of the rows is below half of exact attention's")


def _largest(of: Tensor) -> tuple[int, int]:
    place = int(of.argmax())
    return place // of.shape[1], place % of.shape[1]


def _span(block: int, size: int) -> str:
    return f"{block * size + 1:,} to {(block + 1) * size:,}"
