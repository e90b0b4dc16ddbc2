"""What ``flashpoint diagnose`` advises to do about what it found."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from flashpoint.diagnosis.measure_table import FIRST_ROW_TURNED

if TYPE_CHECKING:
    from flashpoint.diagnosis.verdict import Diagnosis

_BY_DESIGN = frozenset(("out_rows", "other_scores", "coarse_rounding", "dropped_tile", "stale_maximum", "dead_rows"))
"""What is found of a function that does without a fault something else than softmax(QKᵀ·scale)V."""
_TURNED = 0.02
"""A first row of O that turns by more is no matter of scores: it has one key. BF16's rounding turns it by 0.002."""

_ALONE = {
    "fp16_underflow": "Scale the loss (torch.amp.GradScaler) or train in BF16: FP16 holds no smaller gradients.",
    "nonfinite": (
        "Where q, k or v hold NaN or infinity, every attention returns them: the fault lies before it. Elsewhere "
        "--attention flash_fp32 tells whether another kernel returns NaN or infinity on the same inputs, too."
    ),
    "other_scores": (
        "Another scale inside, a temperature or a soft cap is no fault where it is meant. With another scale or a "
        "temperature δ can be judged by --attention alone, which asks the attention for row sums of dS; with a soft "
        "cap by nothing. Where none is meant, --attention flash_fp32 tells what an attention without a fault returns."
    ),
    "coarse_rounding": (
        "Rounding to fewer bits is no fault where it is meant, as of an attention in BF16 in a loop in FP32, of TF32, "
        "or of scores in BF16. Where it is not meant, compare with one that rounds nothing else: "
        "--attention flash_fp32 in BF16, --attention sdpa:math in FP32."
    ),
    "rounded_denominator": (
        "Attention that is computed line by line usually rounds P after its division by ℓ, which is no fault. A "
        "rounded ℓ is one: --attention flash_fp32 tells what an attention without a fault returns."
    ),
    "gradients_off": (
        "O is right, and gradients are not: the fault is in the backward pass. --attention flash_fp32 tells what one "
        "without a fault returns."
    ),
}
"""Advice where nothing else is found."""


def suspects(diagnoses: Sequence[Diagnosis], attention: str | None) -> str:
    """Return the user's function that seems to be no softmax(QKᵀ·scale)V. Most heads err, and none in the direction of
    a row with one key, which no function of the scores turns. Empty where none does.

    Args:
        diagnoses: of all layers.
        attention: that was called anew; None where the results are those that were recorded.
    """
    heads: dict[str, int] = {}
    wrong: dict[str, int] = {}
    for diagnosis in diagnoses:
        name = attention or diagnosis.call.attention
        of_users = ":" in name and not name.startswith("sdpa:")  # MODULE:NAME, FILE.py:FUNCTION; no backend of PyTorch
        of_users &= not (diagnosis.call.is_causal and float(diagnosis.measures[FIRST_ROW_TURNED.name].mean()) > _TURNED)
        found = {head for one in diagnosis.findings if one.kind in _BY_DESIGN for head in one.heads}
        heads[name] = heads.get(name, 0) + diagnosis.call.q.shape[1]
        wrong[name] = wrong.get(name, 0) + (len(found) if of_users else 0)
    return next((name for name, count in wrong.items() if 2 * count > heads[name]), "")


def advice(kinds: Collection[str], suspected: str) -> str:
    """Return what to do next about findings of these kinds, of which there are some.

    Args:
        suspected: a function that :func:`suspects` names.
    """
    kinds = set(kinds)
    if kinds == {"sink"}:
        return (
            "Nothing else was found. A sink is no fault where it is meant, as a learned one or softmax-off-by-one. "
            "Where none is, the normaliser counts keys that are none, such as padding whose scores are not masked."
        )
    kinds.discard("sink")
    other = bool(suspected) and "dead_rows" in kinds  # of which a bias of δ follows
    if kinds & {"delta_bias", "rounded_head"} and not other:
        return (
            "flashpoint.attention(q, k, v, variant='flash_unrounded_out') takes δ from an O that is not rounded: "
            "docs/own_run.md has the attentions that hold, and what they cost."
        )
    if "fp16_overflow" in kinds:
        return "FP16 ends at 65,504: train in BF16, and hold scores in FP32."
    meant = bool(suspected) and kinds == {"coarse_rounding"}  # what is no softmax can look so
    if len(kinds) == 1 and not meant and (alone := _ALONE.get(min(kinds))):
        return alone
    if suspected:
        return (
            f"Most heads of {suspected} return something else than softmax(QKᵀ·scale)V. If it was so from the first "
            "step on, the function probably computes something else on purpose, as with ALiBi, a soft cap, a norm of q "
            "or k, a window, a gate, a sink that depends on q, or another scale inside, and these findings are no "
            "fault. Then watch the attention that it calls, on the q and k that this is given, by "
            "functions=['MODULE:NAME']; the function itself cannot be diagnosed. If it is meant to be "
            "softmax(QKᵀ·scale)V, it computes something wrong: --attention flash_fp32 tells what an attention without "
            "a fault returns."
        )
    return "The attention computes something wrong: --attention flash_fp32 tells whether another kernel does, too."
