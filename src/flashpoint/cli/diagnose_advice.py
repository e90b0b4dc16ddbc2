"""What ``flashpoint diagnose`` advises to do about what it found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flashpoint.errors import layer_told
from flashpoint.files import CONFIGS

if TYPE_CHECKING:
    from flashpoint.cli.diagnose_run import Growth
    from flashpoint.diagnosis.finding import Finding
    from flashpoint.diagnosis.verdict import Diagnosis

_WORDS = {
    "random_row": "a second call returns something else",
    "nonfinite": "a number is not finite",
    "fp16_overflow": "FP16 overflows",
    "fp16_underflow": "FP16 underflows",
    "dropped_tile": "a block of keys has no weight",
    "stale_maximum": "a block of keys has a wrong weight",
    "logsumexp_block": "L is wrong in the backward pass",
    "rounded_logsumexp": "L is rounded between the passes",
    "other_denominator": "ℓ has a constant added to it",
    "out_rows": "rows of O are wrong",
    "gradients_off": "gradients are wrong",
    "rounded_delta": "δ is held in 16 bits",
    "delta_bias": "δ is biased",
    "rounded_head": "δ follows the rounding of O, and not in other heads",
    "other_scores": "the scores are others",
    "dead_rows": "rows of O are too short",
    "rounded_denominator": "ℓ is rounded, or P after its division by ℓ",
    "coarse_rounding": "O is rounded more than BF16 asks for",
    "sink": "one more key without a value takes part",
}
"""What is seen, in a few words, by kind of finding, the gravest first; the last ones are no fault where they are meant.
"""
_OF_DELTA = frozenset(("delta_bias", "rounded_head"))
_BY_DESIGN = frozenset(("out_rows", "other_scores", "coarse_rounding", "dropped_tile", "stale_maximum", "dead_rows"))
"""What is found of a function that does without a fault something else than softmax(QKᵀ·scale)V."""
FIXED, MATH = "flash_fixed", "PyTorch's math backend"
"""Attentions whose δ is not of a rounded O."""
_EXCHANGES = {
    FIXED: (
        "flashpoint.attention(q, k, v, variant='flash_fixed') takes δ from an O that is not rounded. To keep your "
        "kernel, train in `with flashpoint.stabilize(model):`, which puts FP16 inside. docs/own_run.md tells of it."
    ),
    MATH: (
        "Train in `with flashpoint.stabilize(model):`, which puts FP16 inside your kernel: the rounding of O is an "
        "eighth. flash_fixed takes no mask, no bias, and no other lengths or widths of k and v; a mask that "
        "closes padding at the ends of causal sequences alone can be left out. PyTorch's math backend takes δ from no "
        "O: torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    ),
    "": (
        "flash_fixed takes no soft cap, sink or dropout. If this is no attention computed line by line, "
        "`with flashpoint.stabilize(model, functions=['MODULE:NAME']):` puts FP16 inside. Its backward pass can also "
        "take δ from an O in FP32, or from P and dP."
    ),
}
"""What to do about a biased δ, by the attention that takes the call."""
_ELSEWHERE = "Look for a fault in the kernel's own δ and dS first: O's rounding does not make this bias."

_GIVEN = (
    "Where q, k or v hold NaN or infinity, every attention returns them: the fault lies before it. A backward pass of "
    "an earlier step can have made weights NaN while the loss was finite."
)
_MADE = "--attention flash_fp32 tells whether another kernel returns NaN or infinity on the same inputs, too."
"""What to do about NaN and infinity, which the attention was given or made."""
_INSIDE = (
    "With FP16 inside dQ and dK overflow where k or q are large: normalise q and k, or train without "
    "flashpoint.stabilize, which counts such backward passes and tells at the end of its block."
)
_ALONE = {
    "fp16_underflow": "Scale the loss (torch.amp.GradScaler) or train in BF16: FP16 holds no smaller gradients.",
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
        "rounded ℓ is one. --attention flash_fp32 tells what an attention without a fault returns."
    ),
    "rounded_logsumexp": (
        "The forward pass has to save L in FP32. In BF16 each row of P errs by up to 2⁻⁸ |L| in the backward pass, and "
        "dQ, dK and dV with it. --attention flash_fp32 tells what an attention without a fault returns."
    ),
    "rounded_delta": (
        "The backward pass has to hold δ in FP32. In BF16 each row of dS errs by up to 2⁻⁸ of δ, and by up to 2⁻⁷, all "
        "towards one side, where δ is cut off. --attention flash_fp32 tells what an attention without a fault returns."
    ),
    "other_denominator": (
        "ℓ has to be the sum of exp(S − max S) of the keys alone: look for an ε that is too large, an ℓ that does not "
        "begin at 0, or weights of padding. --attention flash_fp32 tells what an attention without a fault returns."
    ),
    "gradients_off": (
        "O is right, and gradients are not: the fault is in the backward pass. --attention flash_fp32 tells what one "
        "without a fault returns."
    ),
}
"""Advice where nothing else is found."""


class Exchange(NamedTuple):
    """What can stand in the place of the calls' attention.

    Attributes:
        attention: that takes all that the calls were told beside q, k and v: :data:`FIXED`, or :data:`MATH`, which
            takes a mask and a bias, too, and needs memory for all scores; empty where neither does.
        stabilizes: whether :func:`flashpoint.stabilize` may help: the calls are of BF16, and have no FP16 inside, and
            δ may be biased by the rounding of O.
        named: whether it has to be told of a function.
        stabilized: whether it has changed them.
        is_there: whether the calls have this attention already.
        beyond: whether the rounding of O surely does not account for a bias of δ.
    """

    attention: str
    stabilizes: bool
    named: bool = False
    stabilized: bool = False
    is_there: bool = False
    beyond: bool = False

    @property
    def remedy(self) -> str:
        """What to train with; empty where no other attention takes the calls."""
        if self.is_there:
            return ""
        inside = self.stabilizes and self.attention == MATH
        return "FP16 inside (flashpoint.stabilize)" if inside else self.attention

    @property
    def advice(self) -> str:
        """What to do about a biased δ."""
        if self.is_there:
            return (
                f"{FIXED} takes δ from an O that is not rounded: this bias has another source, or is by chance. "
                "Diagnose another capture."
            )
        text = f"{_ELSEWHERE} {_EXCHANGES[self.attention]}" if self.beyond else _EXCHANGES[self.attention]
        if not self.stabilizes:
            return _without("flashpoint.stabilize", text)
        functions = "flashpoint.stabilize(model, functions=[…])` with the functions of flashpoint.watch"
        return text.replace("flashpoint.stabilize(model):`", functions) if self.named else text


def suspects(diagnoses: Sequence[Diagnosis], attention: str | None) -> str:
    """Return the user's function that seems to be no softmax(QKᵀ·scale)V. Most heads err, and none in the direction of
    a row with one key, which no function of the scores turns, nor in the forward pass alone. Or in each head that errs
    both passes have the same other weights, as with a mask that was not told. Empty where none does.

    Args:
        diagnoses: of all layers.
        attention: that was called anew; None where the results are those that were recorded.
    """
    # A table without advice does without these.
    from flashpoint.diagnosis.finding import of_another_function, of_forward_alone
    from flashpoint.diagnosis.large_faults import first_row_turned

    heads: dict[str, int] = {}
    wrong: dict[str, int] = {}
    alike: dict[str, bool] = {}
    for diagnosis in diagnoses:
        name, measures = attention or diagnosis.call.attention, diagnosis.measures
        if ":" not in name or name.startswith("sdpa:"):  # MODULE:NAME, FILE.py:FUNCTION; no backend of PyTorch
            continue
        found = sorted({head - 1 for one in diagnosis.findings if one.kind in _BY_DESIGN for head in one.heads})
        meant = ~of_forward_alone(measures)[found] & (not first_row_turned(diagnosis.call, measures))
        heads[name] = heads.get(name, 0) + diagnosis.call.q.shape[1]
        wrong[name] = wrong.get(name, 0) + int(meant.sum())
        if found:
            alike[name] = alike.get(name, True) and bool(of_another_function(measures)[found].all())
    return next((name for name in heads if 2 * wrong[name] > heads[name] or alike.get(name)), "")


def exchange_for(diagnoses: Sequence[Diagnosis]) -> Exchange:
    """Return what can stand in the place of the calls with findings, or of all."""
    of = [one for one in diagnoses if one.findings] or diagnoses
    stabilizes = [
        one
        for one in of
        if one.call.is_bf16
        and (one.probed or not one.call.has_fp16_inside)
        and not any(found.beyond_rounding for found in one.findings)
        and not is_flashpoints(one.call.attention)
    ]
    named = any(":" in one.call.attention for one in stabilizes)
    stabilized = any(one.call.has_fp16_inside and not one.probed for one in of)
    attention = _attention_for(of)
    is_there = all(one.call.attention == attention and not one.probed for one in of)
    beyond = any(found.beyond_rounding and found.kind in _OF_DELTA for one in of for found in one.findings)
    return Exchange(attention, bool(stabilizes), named, stabilized, is_there, beyond)


def is_flashpoints(attention: str) -> bool:
    """Whether a kernel of flashpoint computed a call, by its variant's name: flashpoint.stabilize leaves it alone."""
    from flashpoint.numerics.named import variant_named, variant_names  # a table without advice does without

    files, name = CONFIGS / "attn", attention.split(" ", maxsplit=1)[0]
    return name in variant_names(files) and variant_named(name, files).kernel == "flash"


def _attention_for(of: Sequence[Diagnosis]) -> str:
    forms = [one.call.form for one in of]
    sinks = any(one.call.form.sink is not None and all(found.kind != "sink" for found in one.findings) for one in of)
    if sinks or any(form.softcap or form.dropout for form in forms):
        return ""
    as_many = all(one.call.q.shape[2:] == one.call.v.shape[2:] for one in of)
    return FIXED if as_many and all(form.is_plain for form in forms) else MATH


def _without(word: str, text: str) -> str:
    """Return a text without its sentences with a word."""
    kept = [sentence for sentence in text.removesuffix(".").split(". ") if word not in sentence]
    return "".join(f"{sentence}. " for sentence in kept).strip()


def _called_anew(text: str, exchange: Exchange) -> str:
    """Return a text that tells of ``--attention flash_fp32`` for a call that this takes; of another one with the
    attention that takes it, or without the sentences."""
    if exchange.attention:
        return text if exchange.attention == FIXED else text.replace("flash_fp32", "sdpa:math")
    return _without("--attention", text)


def _exchanges(kinds: Collection[str], suspected: str) -> bool:
    """Whether another attention is the remedy: of rows that are short by design a bias of δ follows."""
    return not _OF_DELTA.isdisjoint(kinds) and not (suspected and "dead_rows" in kinds)


def told_first(findings: Sequence[Finding], growth: Growth | None) -> tuple[list[Finding], list[Finding]]:
    """Return the findings that are told, the first one first, and those that are not put beside them. The latter are a
    bias of δ in a layer whose W_Q did not grow, where it is biased in one whose W_Q did."""
    grown = growth.layers if growth else frozenset()
    order = list(_WORDS)
    findings = sorted(
        findings, key=lambda one: (one.inherited, one.layer not in grown, order.index(one.kind), one.layer)
    )
    explained = any(one.kind in _OF_DELTA and one.layer in grown for one in findings)
    beside = [one for one in findings if explained and one.kind in _OF_DELTA and one.layer not in grown]
    return [one for one in findings if one not in beside], beside


def of_other_outputs(diagnoses: Sequence[Diagnosis]) -> str:
    """Return in which layers gradients came through other outputs than O, and what is not judged there."""
    parts, calls = [], [one.call for one in diagnoses]
    if layers := ", ".join(str(call.layer) for call in calls if call.grad_logsumexp is not None):
        parts.append(
            f"In layer {layers} a gradient came through L, too, the logsumexp that is returned beside O: it was "
            "counted in, and δ was not judged, whose errors look like those of that gradient."
        )
    if of := {str(call.layer): call.other_gradients for call in calls if call.other_gradients}:
        parts.append(
            f"In layer {', '.join(of)} a gradient came through another output than O, too "
            f"({', '.join(dict.fromkeys(of.values()))}), which no capture holds: dQ, dK, dV and δ were not judged "
            "there. --attention judges those that an attention makes of dO alone."
        )
    return " ".join(parts)


def verdict(
    findings: Sequence[Finding],
    growth: Growth | None,
    captured: Collection[int],
    suspected: str,
    nothing: str,
    modules: Mapping[int, str],
    exchange: Exchange,
) -> str:
    """Return what was found and what to try, in one sentence.

    Args:
        findings: the most important one first.
        captured: layers that were diagnosed.
        growth: what W_Q did; None where nobody knows, or it did nothing.
        suspected: a function that :func:`suspects` names.
        nothing: is said where nothing was found.
        modules: names of the modules that call the attentions, by layer, as far as they are known.
        exchange: of :func:`exchange_for`.
    """
    grown = growth.layers if growth else frozenset()
    where = f"W_Q grew in layer {', '.join(map(str, sorted(grown)))}"
    if grown.isdisjoint(captured):
        where += ", which is not among these"
    elif findings:
        where += ", where nothing was found"
    if not findings:
        return f"{nothing[:-1]}, and {where}." if grown else nothing
    first = findings[0]
    of_layer, heads = layer_told(first.layer, modules.get(first.layer, "")), ", ".join(map(str, first.heads))
    place = f"{of_layer}, head{'s' * (len(first.heads) > 1)} {heads}"
    told = f"{place}: {_WORDS[first.kind]}"
    if growth and first.layer in grown:
        own = (growth.layer, growth.head) in [(first.layer, head) for head in first.heads]
        told += ", and its W_Q grew" if own else ", and W_Q of the layer grew"
    elif grown:
        told += f", and {where}"
    kinds = {one.kind for one in findings}
    if first.kind in _OF_DELTA and _exchanges(kinds, suspected):
        source = "O's rounding is not the cause: look at the backward pass, or " * first.beyond_rounding
        return f"{told}; {source}try {exchange.remedy}." if exchange.remedy else f"{told}."
    return f"{told}; {suspected} may mean to be so." if suspected else f"{told}."


def advice(
    kinds: Collection[str], suspected: str, exchange: Exchange, inherited: Collection[bool] = (True, False)
) -> str:
    """Return what to do next about findings of these kinds, of which there are some.

    Args:
        suspected: a function that :func:`suspects` names.
        exchange: of :func:`exchange_for`.
        inherited: of the findings of NaN or infinity.
    """
    kinds = set(kinds)
    if kinds == {"sink"}:
        return (
            "Nothing else was found. A sink is no fault where it is meant, as a learned one or softmax-off-by-one. "
            "Where none is, the normaliser counts keys that are none, such as padding whose scores are not masked."
        )
    if kinds == {"rounded_delta", "delta_bias"}:
        kinds.remove("delta_bias")
    if _exchanges(kinds, suspected):
        return exchange.advice
    kinds.discard("sink")
    if "fp16_overflow" in kinds:
        return _INSIDE if exchange.stabilized else "FP16 ends at 65,504: train in BF16, and hold scores in FP32."
    meant = bool(suspected) and kinds == {"coarse_rounding"}  # what is no softmax can look so
    of_nonfinite = _of_nonfinite(inherited)
    alone = {**_ALONE, "nonfinite": f"{of_nonfinite} {_INSIDE}" if exchange.stabilized else of_nonfinite}
    if len(kinds) == 1 and not meant and (told := alone.get(min(kinds))):
        return _called_anew(told, exchange)
    if suspected:
        return _called_anew(
            f"{suspected} returns something else than softmax(QKᵀ·scale)V. If it was so from the first step on, it "
            "probably computes something else on purpose, as with ALiBi, a soft cap, a norm of q or k, a prefix or "
            "another mask, a gate, a sink that depends on q, or another scale inside, and these findings are no fault. "
            "Then give it the mask, bias, cap or scale as an argument, or watch the attention that it calls, on the q "
            "and k that this is given, by functions=['MODULE:NAME']; as it is it cannot be diagnosed. If it is meant "
            "to be softmax(QKᵀ·scale)V, it computes something wrong. --attention flash_fp32 tells what an attention "
            "without a fault returns.",
            exchange,
        )
    wrong = "The attention computes something wrong. --attention flash_fp32 tells whether another kernel does, too."
    return _called_anew(wrong, exchange)


def _of_nonfinite(inherited: Collection[bool]) -> str:
    if True not in inherited:
        return _MADE
    return f"{_GIVEN} Elsewhere {_MADE}" if False in inherited else _GIVEN


def to_be_sure_of(exchange: Exchange) -> str:
    """Return how a training tells what tensors do not; empty where no attention takes the calls."""
    if not exchange.remedy:
        return ""
    return (
        f"To be sure, train twice on the same batches from a checkpoint before W_Q grew, with this attention and with "
        f"{exchange.remedy}: if only the first explodes, the attention had a part in it."
    )
