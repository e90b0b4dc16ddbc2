"""The variant of the attention, shared by configuration, model, kernels, run folder and report."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from flashpoint.numerics import contradictions
from flashpoint.numerics.choices import (
    NEAREST,
    UNROUNDED,
    DeltaError,
    Heads,
    ResidualFormat,
    Rounding,
    Shift,
    distinct,
    heads_in,
    selected_heads,
    take_rounding,
)
from flashpoint.numerics.delta_rules import RULES, DeltaName
from flashpoint.numerics.delta_rules.rule import SavedOut
from flashpoint.typed import check_literals
from flashpoint_kernels.codes import BF16_BITS

RoundingPoint = Literal[
    "scores", "probs", "out_unnormalized", "denominator", "out", "grad_probs", "grad_scores", "grad_blocks"
]  # fmt: skip
ROUNDING_POINTS: dict[RoundingPoint, str] = {
    "scores": "S", "probs": "P", "out_unnormalized": "Ō", "denominator": "ℓ", "out": "O", "grad_probs": "dP",
    "grad_scores": "dS", "grad_blocks": "blocks of dQ, dK, dV"
}  # fmt: skip
"""The fields that hold a :class:`Rounding`, with what the paper calls the values."""


@dataclass(frozen=True, kw_only=True)
class AttentionVariant:
    """One value of every numerical choice of an attention. The defaults are FlashAttention-2's.

    Rounding points and choices, in the notation of Qiu & Yao (arXiv 2510.04212):

        S = α·QKᵀ,  m = rowmax(S) + shift,  P̄ = exp(S − m),  ℓ = rowsum(P̄),  Ō = P̄V,  O = Ō/ℓ,  L = m + ln ℓ
        δ = rowsum(dO∘O),  P = exp(S − L),  dP = dO·Vᵀ,  dS = α·P∘(dP − δ),  dQ = dS·K,  dK = dSᵀQ,  dV = PᵀdO

    Layers and heads are counted from 1, as in the paper.

    Raises:
        ValueError: a field has a value outside its range, or two fields contradict each other.
    """

    name: str = "custom"

    kernel: Literal[
        "flash",
        "sdpa",
        "sdpa_flash",
        "sdpa_cudnn",
        "sdpa_efficient",
        "sdpa_math",
        "flex",
        "flash_attn",
        "fa4",
        "xformers",
    ] = "flash"
    """``flash`` makes every choice below. The others are production attentions
    (:mod:`flashpoint.numerics.production`), and make those of the next paragraph alone; ``flex`` and ``fa4`` that of
    ``delta=out_fp32``, too (:mod:`flashpoint.numerics.outside_delta`). What they would not read is refused, but for
    mantissa bits, which an experiment sets for any attention."""

    # In front of any kernel
    shift_keys: Shift = "none"
    """K − c instead of K, with a vector c for each head that softmax does not see. c is the mean over the sequence,
    with its gradient or without, or the mean over batch and tokens without it."""
    shift_values: Shift = "none"
    """attention(q, k, v − c) + c, which exact arithmetic does not see."""
    fp16_inside: bool = False
    """q, k, v and dO in FP16, dO times a power of two; O and gradients back in BF16. For production attentions."""

    # Rounding points
    scores: Rounding = UNROUNDED
    """S, forward and backward."""
    probs: Rounding = NEAREST
    """P̄ as the operand of P̄V, and P as the operand of PᵀdO."""
    out_unnormalized: Rounding = UNROUNDED
    """Ō."""
    out_unnormalized_when: Literal["final", "per_block", "per_product"] = "final"
    """Round Ō once after the last key block, or after every key block, when that block's P̄V is added. ``per_product``
    rounds each block's P̄V before FP32 arithmetic rescales and adds it: the paper's released code, compiled."""
    denominator: Rounding = UNROUNDED
    """ℓ, once, after the last key block. O is divided by it, and L has its logarithm."""
    out_divisor: Literal["denominator", "unrounded_in_first_block"] = "denominator"
    """What O is divided by: ℓ as rounded, or in the first ``block_k`` rows ℓ as summed, as torch.compile has it in the
    paper's released fix."""
    out: Rounding = NEAREST
    """O. Where it does not fit BF16 the attention returns FP32, and δ is of that; a projection under autocast takes it
    in BF16 all the same."""
    grad_probs: Rounding = UNROUNDED
    """dP, as a matrix product that returns BF16 hands it on."""
    grad_scores: Rounding = NEAREST
    """P∘(dP − δ) as the operand of dQ and dK, before the factor α, as FlashAttention-2 does."""
    grad_blocks: Rounding = UNROUNDED
    """What a block of ``block_k`` keys adds to dQ, and a block of as many queries to dK and dV, before the blocks are
    added in FP32."""

    # Choices
    shift: Literal["rowmax", "offset", "dynamic_max"] = "rowmax"
    """m: the row maximum; that plus ``shift_offset``; or the paper's Algorithm 1 (``beta`` and below)."""
    shift_offset: float = 0.0
    """Nats added to the row maximum by ``shift=offset``; non-zero leaves no P̄ exactly 1."""
    beta: float = 7.0
    """β of Algorithm 1: tied rows with r_m > 0 take m = β·r_m."""
    gamma: float = 0.0
    """γ of Appendix C: tied rows with r_m < 0 take m = γ·r_m. Algorithm 1 has 0."""
    tie_tolerance: float = 0.0
    """Scores ≥ r_m − tie_tolerance count as maxima; the released code has 1e-3."""
    max_shift: float | None = 60.0
    """Guard: m − r_m never exceeds this many nats, so no row underflows whole. None removes it."""
    denominator_floor: float = 0.0
    """What a block of keys adds to ℓ is at least this; the released code has 1e-10. It is a floor under a row whose P̄
    all underflow: ℓ is not 0, O and P of the row vanish instead of becoming NaN."""
    masked_blocks: Literal["skip", "count"] = "skip"
    """Blocks of keys that come after a query: skipped, as FlashAttention-2 does, or counted, as the released code does.
    A counted block adds ``denominator_floor`` to ℓ, and ``shift=dynamic_max`` finds its maxima tied below 0: m = 0."""
    normalizer: Literal["unrounded", "rounded", "before_product"] = "unrounded"
    """ℓ of the unrounded or the rounded P̄; ``before_product`` rounds P̄/ℓ first: standard attention."""
    delta: DeltaName = "out"
    """The rule of δ: ``out`` is rowsum(dO∘O) of O as returned. Each rule says what it is in the file of its name in
    :mod:`flashpoint.numerics.delta_rules`."""
    out_residual_bits: int | None = None
    """How ``delta=out_fp32`` saves its O. Null: as a second O in FP32. A number from 1 to 8: as what O as returned
    lacks of it, in a byte an element, or in two where the residual can exceed one. It has so many mantissa bits beyond
    those of the coarser of the roundings of Ō and O."""
    delta_error: DeltaError = field(default_factory=DeltaError)
    """An error added to δ after ``delta`` and ``exact_row_sum`` have determined it."""
    exact_row_sum: bool = False
    """δ_i += Σ_j P_ij(dP_ij − δ_i) / Σ_j P_ij, which makes every row sum of dS zero up to FP32. That is
    Σ_j P_ij·dP_ij / Σ_j P_ij whatever δ was, so ``delta`` no longer matters."""
    exact_row_sum_passes: int = 2
    """Passes of dQ's kernel over the keys in which ``exact_row_sum`` does that. 2: δ first, then dQ. 1: dQ with the δ
    that ``delta`` says, from which the correction of δ takes its share of dQ, Σ_j P_ij K_j, afterwards."""
    center_keys: bool = False
    """K ← K − mean_T(K) per head and sequence, stored in K's dtype; softmax does not see it."""
    center_grad_q: bool = False
    """dQ_i = Σ_j dS_ij (K_j − k̄), k̄ = mean_T(K) per head and sequence, K − k̄ stored in K's dtype; S and dK are of K.
    Exact arithmetic does not see it, since Σ_j dS_ij = 0; of an error ε_i of δ it takes −α ε_i k̄ out of dQ_i."""
    block_k: int | None = 64
    """Keys per block of the online softmax; None is the whole sequence (no tiling)."""

    # Selection
    layers: tuple[int, ...] | None = None
    """Layers that take this variant; None means all."""
    heads: Heads | None = None
    """Heads that take this variant, in each selected layer; None means all. Or a list of heads for each of ``layers``,
    in their order."""
    elsewhere: AttentionVariant | None = None
    """The variant of every layer and head not selected."""

    key: str = field(init=False, repr=False, compare=False)
    """Canonical JSON of all choices: how the variant travels through a ``torch.library`` op. Made once, since
    torch.compile cannot trace the making of it."""
    draws: bool = field(init=False, repr=False, compare=False)
    """Whether something depends on random bits."""

    def __post_init__(self) -> None:
        check_literals(self, "attn")
        if self.layers is not None:
            object.__setattr__(self, "layers", distinct("layers", self.layers))
        if self.heads is not None:
            object.__setattr__(self, "heads", selected_heads(self.layers, self.heads))
        contradictions.check(vars(self), _DEFAULTS)
        rounds = any(getattr(self, point).mode == "stochastic" for point in ROUNDING_POINTS)
        elsewhere = self.elsewhere is not None and self.elsewhere.draws
        object.__setattr__(self, "draws", rounds or self.delta_error.kind == "noise" or elsewhere)
        object.__setattr__(self, "key", json.dumps(self.to_dict(), sort_keys=True))

    def __hash__(self) -> int:
        """Return that of the key, which Python keeps: every call of an attention asks for it."""
        return hash(self.key)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> AttentionVariant:
        """Return the inverse of :meth:`to_dict`; a field that is left out has its default, and so has a part of a
        rounding.

        Raises:
            ValueError: a field has a value outside its range, or two fields contradict each other.
        """
        fields = dict(fields)
        for point in ROUNDING_POINTS:
            fields[point] = take_rounding(fields, point, _DEFAULTS[point])
        if isinstance(fields.get("delta_error"), dict):
            fields["delta_error"] = DeltaError(**fields["delta_error"])
        if isinstance(fields.get("elsewhere"), dict):
            fields["elsewhere"] = cls.from_dict(fields["elsewhere"])
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as the run folder stores them; roundings and other fields with parts are mappings."""

        def plain(value: Any) -> Any:
            if isinstance(value, AttentionVariant):
                return value.to_dict()
            return dataclasses.asdict(value) if isinstance(value, Rounding | DeltaError) else value

        return {choice.name: plain(getattr(self, choice.name)) for choice in dataclasses.fields(self) if choice.init}

    def in_formats_of(self, other: AttentionVariant) -> AttentionVariant:
        """Return the same choices with the mantissa bits of ``other`` at every rounding point."""
        formats = {
            point: dataclasses.replace(getattr(self, point), bits=getattr(other, point).bits)
            for point in ROUNDING_POINTS
        }
        return dataclasses.replace(self, **formats)

    @property
    def injected(self) -> bool:
        """Whether some δ carries an injected error, so that a run is an experiment on δ."""
        injects = self.delta_error.kind != "none" and self.delta_error.size != 0
        return injects or (self.elsewhere is not None and self.elsewhere.injected)

    @property
    def title(self) -> str:
        """The name that people read. It shows injected errors, and formats of ours other than BF16."""
        variants = [one for one in (self, self.elsewhere) if one is not None and one.kernel == "flash"]
        formats = {
            f"{symbol} of {rounding.bits} mantissa bit{'s' if rounding.bits > 1 else ''}": None  # each once, in order
            for variant in variants
            for point, symbol in ROUNDING_POINTS.items()
            if (rounding := getattr(variant, point)).mode != "none" and rounding.bits != BF16_BITS
        }
        name = f"{self.name} injected" if self.injected else self.name
        return f"{name}, {', '.join(formats)}" if formats else name

    @property
    def returns_fp32(self) -> bool:
        """Whether O does not fit BF16."""
        return not self.out.fits_bf16

    @property
    def corrects_in_one_pass(self) -> bool:
        """Whether exact row sums take one pass over the keys, in which PK is summed beside dQ."""
        return self.exact_row_sum and self.exact_row_sum_passes == 1

    @property
    def saved_out(self) -> SavedOut:
        """Which O the forward pass has to save for δ beside the one that it returns."""
        return RULES[self.delta].saved_out

    @property
    def runs_kernels_of_ours(self) -> bool:
        """Whether this package's kernels compute something of it."""
        return self.kernel == "flash" or self.delta != "out"

    @property
    def stabilizes(self) -> bool:
        """Whether something stands in front of the kernel."""
        return self.fp16_inside or self.shift_keys != "none" or self.shift_values != "none"

    @property
    def takes_score_cap(self) -> bool:
        """Whether scores can be capped: FlexAttention does so. Softmax of capped scores sees a shift of the keys."""
        return self.kernel == "flex" and self.delta == "out" and self.shift_keys == "none"

    @property
    def out_residual(self) -> ResidualFormat | None:
        """The format of what is saved beside O as returned; None where that is another O, in FP32, or nothing."""
        if self.out_residual_bits is None:
            return None
        return ResidualFormat.of(self.out_unnormalized, self.out, self.out_residual_bits)

    def groups(self, layer: int, n_head: int) -> Groups:
        """Return the variants that run in ``layer`` (from 1), each with its heads as indices from 0."""
        every_head = tuple(range(n_head))
        if self.elsewhere is None:
            return ((self, every_head),)
        if self.layers is not None and layer not in self.layers:
            return ((self.elsewhere, every_head),)
        chosen = heads_in(layer, self.layers, self.heads)
        if chosen is None:
            return ((self, every_head),)
        selected = tuple(head for head in every_head if head + 1 in chosen)
        others = tuple(head for head in every_head if head + 1 not in chosen)
        return ((self, selected), (self.elsewhere, others)) if others else ((self, selected),)


_DEFAULTS: dict[str, Any] = {
    choice.name: choice.default for choice in dataclasses.fields(AttentionVariant) if choice.init
}
Groups = tuple[tuple[AttentionVariant, tuple[int, ...]], ...]
"""The variants of one layer, at most two, each with its heads as indices from 0."""


def kernel_in(variant: AttentionVariant, layer: int) -> str:
    """Return what computes ``layer`` (from 1): a production attention computes all heads of a layer, or none.

    A function, because torch.compile calls no method of a variant that it takes for a constant.
    """
    if variant.elsewhere is None or variant.layers is None or layer in variant.layers:
        return variant.kernel
    return variant.elsewhere.kernel


def in_front(variant: AttentionVariant, layer: int) -> AttentionVariant:
    """Return the variant whose kernel and whose stabilisers ``layer`` (from 1) has."""
    if variant.elsewhere is None or variant.layers is None or layer in variant.layers:
        return variant
    return variant.elsewhere


def check_in_model(variant: AttentionVariant, n_layer: int, n_head: int) -> None:
    """Refuse layers and heads that the model does not have.

    Raises:
        ValueError: naming the field, the number and the range.
    """
    heads = itertools.chain.from_iterable([some] if isinstance(some, int) else some for some in variant.heads or ())
    for name, chosen, count in (("layers", variant.layers or (), n_layer), ("heads", heads, n_head)):
        if beyond := sorted({number for number in chosen if number > count}):
            raise ValueError(f"attn.{name}={beyond}: the model has {name} 1 to {count}")
    for error in (one.delta_error for one in (variant, variant.elsewhere) if one is not None):
        if beyond := [number for number in error.layers or () if number > n_layer]:
            raise ValueError(f"attn.delta_error.layers={beyond}: the model has layers 1 to {n_layer}")
        if error.trajectory is not None and len(error.trajectory) != n_layer:
            given = len(error.trajectory)
            raise ValueError(f"attn.delta_error.trajectory: factors for {given} layers, the model has {n_layer}")


@lru_cache(maxsize=256)
def variant_from_key(key: str) -> AttentionVariant:
    """Return the inverse of :attr:`AttentionVariant.key`."""
    return AttentionVariant.from_dict(json.loads(key))
