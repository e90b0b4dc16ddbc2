"""What a diagnosis finds: the kinds, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in some heads of a layer.

    Attributes:
        kind: of :data:`KINDS`.
        layer: from 1.
        heads: from 1.
        text: what is wrong and the figures that show it, one sentence.
    """

    kind: str
    layer: int
    heads: tuple[int, ...]
    text: str


KINDS = {
    "fp16_overflow": "scores overflow FP16",
    "nonfinite": "NaN or infinity",
    "random_row": "results that differ from call to call",
    "dropped_tile": "keys that get no weight",
    "stale_maximum": "blocks of keys with wrong weights",
    "logsumexp_block": "L is off",
    "out_rows": "rows of O are off",
    "gradients_off": "gradients are off",
    "delta_bias": "δ is biased",
    "rounded_denominator": "ℓ is rounded",
    "coarse_rounding": "more is rounded than P̄ and O",
    "rounded_head": "δ of some heads takes the rounding of O",
    "dead_rows": "rows are switched off",
}
"""Each kind of finding, from what hides others to what does not."""
