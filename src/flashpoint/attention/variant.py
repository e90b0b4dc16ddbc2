"""The variant: the one word that configuration, model, kernels, run folder and report share."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from flashpoint.typed import check_literals

Rounding = Literal["none", "nearest", "stochastic"]
RoundingPoint = Literal["scores", "probs", "out_unnormalized", "out", "grad_scores"]
BF16_BITS = 7
"""Explicit mantissa bits of BF16."""
_POINTS: dict[RoundingPoint, str] = {
    "scores": "S", "probs": "P", "out_unnormalized": "Ō", "out": "O", "grad_scores": "dS"
}  # fmt: skip
"""What the paper calls them."""


@dataclass(frozen=True, kw_only=True)
class DeltaError:
    """An error put into δ on purpose, after δ is computed: δ_i ← δ_i + size·|dO_i|₂·|O_i|₂·z.

    Raises:
        ValueError: a field has a value outside its range, or errors are described that ``kind=none`` does not make.
    """

    kind: Literal["none", "bias", "noise"] = "none"
    """z: 1 for ``bias``; for ``noise`` a random sign, one draw a row, of zero mean and unit variance."""
    size: float = 0.0
    """Share of |dO_i|₂·|O_i|₂, the largest |δ_i| that these norms allow; O as the forward pass returned it."""
    layers: tuple[int, ...] | None = None
    """Layers, from 1, whose δ takes the error; None means all."""
    into: Literal["both", "grad_q", "grad_k"] = "both"
    """Which gradient is made with the δ that has the error: dQ and dK, or one of them, the other with δ as it was."""

    def __post_init__(self) -> None:
        check_literals(self, "attn.delta_error")
        if not math.isfinite(self.size):
            raise ValueError(f"attn.delta_error.size={self.size}: give a finite number")
        if self.kind == "none" and (self.size or self.layers is not None or self.into != "both"):
            raise ValueError("attn.delta_error.kind=none injects nothing, of whatever size: set it to bias or noise")
        if self.layers is not None:
            object.__setattr__(self, "layers", _distinct("delta_error.layers", self.layers))

    def size_in(self, layer: int) -> float:
        """``size`` in a layer, from 1, that takes the error, 0 in the others."""
        return self.size if self.layers is None or layer in self.layers else 0.0


@dataclass(frozen=True, kw_only=True)
class AttentionVariant:
    """One value of every numerical choice of an attention. The defaults are FlashAttention-2's.

    Rounding points (``none`` keeps FP32; ``nearest`` is to nearest even; ``stochastic`` adds a counter-based
    random offset) and choices, in the notation of Qiu & Yao (arXiv 2510.04212):

        S = α·QKᵀ,  m = rowmax(S) + shift,  P̄ = exp(S − m),  ℓ = rowsum(P̄),  Ō = P̄V,  O = Ō/ℓ,  L = m + ln ℓ
        δ = rowsum(dO∘O),  P = exp(S − L),  dP = dO·Vᵀ,  dS = α·P∘(dP − δ),  dQ = dS·K,  dK = dSᵀQ,  dV = PᵀdO

    A rounding point's format has ``_bits`` explicit mantissa bits, 1 to 10, and BF16's and FP32's 8 bits of exponent:
    7 is BF16, 10 is TF32, and each bit less doubles the ulp, 2^(⌊log2 |x|⌋ − bits). A value with more than 7 is
    no BF16 number: it is held and multiplied in FP32. Where nothing is rounded the bits say nothing.

    Layers and heads are counted from 1, as in the paper.

    Raises:
        ValueError: a field has a value outside its range, or two fields contradict each other.
    """

    name: str = "custom"

    kernel: Literal["flash", "sdpa"] = "flash"
    """``flash`` makes every choice below; ``sdpa`` is PyTorch's production kernel and makes none."""

    # Rounding points
    scores: Rounding = "none"
    """S, forward and backward."""
    scores_bits: int = BF16_BITS
    probs: Rounding = "nearest"
    """P̄ as the operand of P̄V, and P as the operand of PᵀdO."""
    probs_bits: int = BF16_BITS
    out_unnormalized: Rounding = "none"
    """Ō."""
    out_unnormalized_bits: int = BF16_BITS
    out_unnormalized_when: Literal["final", "per_block"] = "final"
    """Round Ō once after the last key block, or after every key block (the paper's released code)."""
    out: Rounding = "nearest"
    """O. With ``none``, or more bits than BF16's, the attention returns FP32, and δ is of that; a projection under
    autocast takes it in BF16 all the same."""
    out_bits: int = BF16_BITS
    grad_scores: Rounding = "nearest"
    """P∘(dP − δ) as the operand of dQ and dK, before the factor α, as FlashAttention-2 does."""
    grad_scores_bits: int = BF16_BITS

    # Choices
    shift: Literal["rowmax", "offset", "dynamic_max"] = "rowmax"
    """m: the row maximum; that plus ``shift_offset``; or the paper's Algorithm 1 (``beta`` and below)."""
    shift_offset: float = 0.0
    """Nats added to the row maximum by ``shift=offset``; non-zero leaves no P̄ exactly 1."""
    beta: float = 7.0
    """β of Algorithm 1: tied rows with r_m > 0 take m = β·r_m."""
    tie_tolerance: float = 0.0
    """Scores ≥ r_m − tie_tolerance count as maxima; the released code has 1e-3."""
    max_shift: float | None = 60.0
    """Guard: m − r_m never exceeds this many nats, so no row underflows whole. None removes it."""
    normalizer: Literal["unrounded", "rounded", "before_product"] = "unrounded"
    """ℓ of the unrounded or the rounded P̄; ``before_product`` rounds P̄/ℓ first: standard attention."""
    delta: Literal["out", "out_fp32", "p_dp", "out_independent"] = "out"
    """δ from O as returned; from O of the same P̄ with Ō and O unrounded; rowsum(P∘dP); or rowsum(dO∘O′), where O′ is
    O of the same P̄ with random bits of its own in every stochastic rounding of Ō and O."""
    delta_error: DeltaError = field(default_factory=DeltaError)
    """An error injected into δ, whatever ``delta`` and ``exact_row_sum`` make of it."""
    exact_row_sum: bool = False
    """δ_i += Σ_j P_ij(dP_ij − δ_i) / Σ_j P_ij, which makes every row sum of dS zero up to FP32. That is
    Σ_j P_ij·dP_ij / Σ_j P_ij whatever δ was, so ``delta`` no longer matters."""
    center_keys: bool = False
    """K ← K − mean_T(K) per head and sequence, stored in K's dtype; softmax does not see it."""
    center_grad_q: bool = False
    """dQ_i = Σ_j dS_ij (K_j − k̄), k̄ = mean_T(K) per head and sequence, K − k̄ stored in K's dtype; S and dK are of K.
    Exact arithmetic does not see it, since Σ_j dS_ij = 0; of an error ε_i of δ it takes −α ε_i k̄ out of dQ_i."""
    fused_exponent: bool = False
    """exp2 of fma(S, log2 e, −m·log2 e), as production kernels do: P̄ at the maximum need not be 1."""
    block_k: int | None = 64
    """Keys per block of the online softmax; None is the whole sequence (no tiling)."""

    # Selection
    layers: tuple[int, ...] | None = None
    """Layers that take this variant; None means all."""
    heads: tuple[int, ...] | None = None
    """Heads that take this variant, in each selected layer; None means all."""
    elsewhere: AttentionVariant | None = None
    """The variant of every layer and head not selected."""

    key: str = field(init=False, repr=False, compare=False)
    """Canonical JSON of all choices: how the variant travels through a ``torch.library`` op. Made once, since
    torch.compile cannot trace the making of it."""

    def __post_init__(self) -> None:
        check_literals(self, "attn")
        self._check_selection_fields()
        self._check_formats()
        if self.block_k is not None and self.block_k < 1:
            raise ValueError(f"attn.block_k={self.block_k}: give at least 1, or null for no tiling")
        if self.beta < 1:
            raise ValueError(f"attn.beta={self.beta}: below 1 the shift falls under the row maximum")
        if self.tie_tolerance < 0:
            raise ValueError(f"attn.tie_tolerance={self.tie_tolerance}: give 0 or more")
        if self.max_shift is not None and self.max_shift < 0:
            raise ValueError(f"attn.max_shift={self.max_shift}: give 0 or more, or null for no guard")
        if not -60 <= self.shift_offset <= 60:
            raise ValueError(f"attn.shift_offset={self.shift_offset}: beyond ±60 nats rows over- or underflow")
        if self.delta == "out_independent" and "stochastic" not in (self.out_unnormalized, self.out):
            raise ValueError(
                "attn.delta=out_independent finds no stochastic rounding of Ō or O to draw again: set "
                "attn.out_unnormalized=stochastic or attn.out=stochastic, or attn.delta=out"
            )
        if self.center_grad_q and self.center_keys:
            raise ValueError("attn.center_grad_q=true: attn.center_keys=true centres dQ's keys already; choose one")
        if self.normalizer == "before_product" and self.block_k is not None:
            raise ValueError("attn.normalizer=before_product needs the whole row: set attn.block_k=null")
        if not isinstance(self.delta_error, DeltaError):
            raise ValueError(f"attn.delta_error={self.delta_error}: give kind, size and layers, each a key of its own")
        self._check_delta_error()
        object.__setattr__(self, "key", json.dumps(self.to_dict(), sort_keys=True))

    def _check_formats(self) -> None:
        for point in _POINTS:
            bits = getattr(self, f"{point}_bits")
            if not 1 <= bits <= 10:
                raise ValueError(f"attn.{point}_bits={bits}: give 1 to 10 mantissa bits; {BF16_BITS} are BF16's")

    def _check_delta_error(self) -> None:
        if self.delta_error.kind == "none":
            return
        if self.kernel == "sdpa":
            raise ValueError("attn.delta_error: kernel=sdpa computes δ out of reach; take attn=flash_fp32")
        if self.delta_error.into != "both" and self.center_keys:
            raise ValueError(
                "attn.delta_error.into: with attn.center_keys=true dQ and dK share one row sum of dS; take "
                "attn=flash_exact_rowsum"
            )
        injected = self.delta_error.layers
        if injected is not None and self.layers is not None and not set(injected) <= set(self.layers):
            raise ValueError(
                f"attn.delta_error.layers={list(injected)}: only attn.layers={list(self.layers)} take this variant"
            )

    def _check_selection_fields(self) -> None:
        for name in ("layers", "heads"):
            chosen = getattr(self, name)
            if chosen is not None:
                object.__setattr__(self, name, _distinct(name, chosen))
        selects = self.layers is not None or self.heads is not None
        if selects and self.elsewhere is None:
            raise ValueError(
                "attn.elsewhere is missing: name the variant of the layers and heads that "
                "attn.layers and attn.heads leave out, e.g. attn.elsewhere=flash_fp32"
            )
        if self.elsewhere is not None and not selects:
            raise ValueError("attn.elsewhere needs attn.layers or attn.heads: nothing is left for it")
        if self.elsewhere is not None and self.heads is not None and "sdpa" in (self.kernel, self.elsewhere.kernel):
            raise ValueError("attn.heads: kernel=sdpa computes whole layers; take flash_fp32 for single heads")
        if self.elsewhere is not None and self.elsewhere.elsewhere is not None:
            raise ValueError(f"attn.elsewhere={self.elsewhere.name}: that variant selects layers itself")

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> AttentionVariant:
        """Inverse of :meth:`to_dict`; ``delta_error`` and ``elsewhere`` are nested mappings, the latter or None."""
        fields = dict(fields)
        if isinstance(fields.get("delta_error"), dict):
            fields["delta_error"] = DeltaError(**fields["delta_error"])
        if isinstance(fields.get("elsewhere"), dict):
            fields["elsewhere"] = cls.from_dict(fields["elsewhere"])
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only: what the run folder stores."""
        values = {choice.name: getattr(self, choice.name) for choice in dataclasses.fields(self) if choice.init}
        nested = {
            "delta_error": dataclasses.asdict(self.delta_error),
            "elsewhere": self.elsewhere and self.elsewhere.to_dict(),
        }
        return {**values, **nested}

    @property
    def effective_choices(self) -> dict[str, Any]:
        """The values of :meth:`to_dict`, the name and those apart that say nothing beside the others."""
        silent = {"name"} | {f"{point}_bits" for point in _POINTS if getattr(self, point) == "none"}
        if self.out_unnormalized == "none":
            silent.add("out_unnormalized_when")
        if self.shift != "offset":
            silent.add("shift_offset")
        if self.shift != "dynamic_max":
            silent |= {"beta", "tie_tolerance", "max_shift"}
        if self.exact_row_sum:
            silent.add("delta")
        return {name: value for name, value in self.to_dict().items() if name not in silent}

    @property
    def injected(self) -> bool:
        """Whether some δ carries an error put in on purpose, so that a run is an experiment on δ, not a numerics."""
        injects = self.delta_error.kind != "none" and self.delta_error.size != 0
        return injects or (self.elsewhere is not None and self.elsewhere.injected)

    @property
    def title(self) -> str:
        """The name that people read: with injected errors and with formats that are not BF16 it says so."""
        variants = [self, *filter(None, [self.elsewhere])]
        formats = {
            f"{symbol} of {bits} mantissa bit{'s' if bits > 1 else ''}": None  # each once, in this order
            for variant in variants
            for point, symbol in _POINTS.items()
            if getattr(variant, point) != "none" and (bits := getattr(variant, f"{point}_bits")) != BF16_BITS
        }
        name = f"{self.name} injected" if self.injected else self.name
        return f"{name}, {', '.join(formats)}" if formats else name

    @property
    def returns_fp32(self) -> bool:
        """Whether O does not fit BF16."""
        return self.out == "none" or self.out_bits > BF16_BITS

    @property
    def saves_out_for_delta(self) -> bool:
        """Whether δ is of another O than the one returned, so that the forward pass has to save it."""
        return self.delta in ("out_fp32", "out_independent")

    def check_selection(self, n_layer: int, n_head: int) -> None:
        """Refuse layers and heads that the model does not have.

        Raises:
            ValueError: naming the field, the number and the range.
        """
        for name, count in (("layers", n_layer), ("heads", n_head)):
            beyond = [number for number in getattr(self, name) or () if number > count]
            if beyond:
                raise ValueError(f"attn.{name}={beyond}: the model has {name} 1 to {count}")
        for variant in (self, *filter(None, [self.elsewhere])):
            beyond = [number for number in variant.delta_error.layers or () if number > n_layer]
            if beyond:
                raise ValueError(f"attn.delta_error.layers={beyond}: the model has layers 1 to {n_layer}")

    def groups(self, layer: int, n_head: int) -> Groups:
        """The variants that run in ``layer`` (from 1), each with its heads as indices from 0."""
        every_head = tuple(range(n_head))
        if self.elsewhere is None:
            return ((self, every_head),)
        if self.layers is not None and layer not in self.layers:
            return ((self.elsewhere, every_head),)
        if self.heads is None:
            return ((self, every_head),)
        selected = tuple(head for head in every_head if head + 1 in self.heads)
        others = tuple(head for head in every_head if head + 1 not in self.heads)
        return ((self, selected), (self.elsewhere, others)) if others else ((self, selected),)


def _distinct(name: str, numbers: Sequence[int]) -> tuple[int, ...]:
    if not numbers or min(numbers) < 1 or len(set(numbers)) != len(numbers):
        raise ValueError(f"attn.{name}={list(numbers)}: give distinct numbers counted from 1")
    return tuple(numbers)


Groups = tuple[tuple[AttentionVariant, tuple[int, ...]], ...]
"""The variants of one layer, at most two, each with its heads as indices from 0."""


@lru_cache(maxsize=256)
def variant_from_key(key: str) -> AttentionVariant:
    """Inverse of :attr:`AttentionVariant.key`."""
    return AttentionVariant.from_dict(json.loads(key))
