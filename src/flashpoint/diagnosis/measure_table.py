"""The vocabulary of measures: what a diagnosis computes of each head, in a sequence and over several.

Columns of ``flashpoint diagnose``, their units and docs/watching.md (``scripts/docs/list_metrics.py``) read it here.
All are against FP64 on the same Q, K, V and dO. e is the error of δ in a row.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from flashpoint.runs.metric_table import (
    GRAD_Q_ALONG_MEAN_KEY,
    HALF_NORM_ROWS,
    OUT_DEVIATION,
    ROW_SUM,
    SCORE_MAX,
    TIED_ROWS,
    Metric,
    Per,
)

Pooling = Literal["mean", "mean where known", "largest", "of sums"]
"""What several sequences say together. A gradient is not known without loss. ``of sums``: :func:`.of_errors`."""


@dataclass(frozen=True, kw_only=True)
class Measure(Metric):
    """One measure of a head; its ``words`` are the column of ``flashpoint diagnose``, where it has one."""

    per: Per = "head"
    measured_by: str = "`flashpoint diagnose`"
    pooled: Pooling = "mean"
    logged_as: Metric | None = None
    """The same quantity in a run's metrics, if a watched loop logs it."""


@dataclass(frozen=True)
class DeltaErrorMeasures:
    """What is said of one error e of δ: by O, by dQ or by row sums of dS."""

    bias: Measure
    noise: Measure
    sum: Measure
    bound: Measure
    rows: Measure

    @property
    def all(self) -> tuple[Measure, Measure, Measure, Measure, Measure]:
        return self.bias, self.noise, self.sum, self.bound, self.rows

    @property
    def names(self) -> tuple[str, ...]:
        """Of all, as files have them."""
        return tuple(measure.name for measure in self.all)


@dataclass(frozen=True)
class RowsOff:
    """Rows of a result that are far off."""

    count: Measure
    first: Measure
    last: Measure


@dataclass(frozen=True)
class GradientMeasures:
    """What is said of one gradient."""

    error: Measure
    fp16: Measure


def _error_of_delta(source: str, by: str) -> DeltaErrorMeasures:
    """Return the rows of an error of δ; ``source`` begins their names, ``by`` says what tells of the error."""
    measure = partial(Measure, measured_by=f"`flashpoint diagnose`, by {by}", pooled="of sums")
    return DeltaErrorMeasures(
        bias=measure(
            f"{source}_bias",
            "δ bias",
            symbol="Σe / Σ|dO||O|",
            unit="|dO||O|",
            trouble="away from 0",
            sentence="Over the rows of all sequences; sequences without loss (dO = 0) do not count.",
        ),
        noise=measure(
            f"{source}_noise",
            "δ noise",
            symbol="(Σe² / Σ(|dO||O|)²)^½",
            unit="|dO||O|",
            sentence="Root mean square in each sequence; over sequences, too, which weigh by (Σ|dO||O|)².",
        ),
        sum=measure(
            f"{source}_sum",
            "δ error",
            symbol="Σe",
            unit="nats",
            trouble="away from 0",
            sentence=(
                "Over all tokens: by so much, to first order, the error of O changes the loss as `backward` was called "
                "on it."
            ),
        ),
        bound=measure(
            f"{source}_bound", "size of δ's terms", symbol="Σ|dO||O|", unit="nats", sentence="The unit of the bias."
        ),
        rows=measure(
            f"{source}_rows",
            "rows that tell δ's bias",
            symbol="(Σ|dO||O|)² / Σ(|dO||O|)²",
            sentence="How many rows of one size would tell the bias as surely.",
        ),
    )


def _rows_off(name: str, symbol: str, off: str = "off", beside: str = "") -> RowsOff:
    """Return the rows of the table about rows of a result that are far off, in a way; ``beside`` ends a sentence."""
    pooled: Pooling = "mean where known" if name == "grad_q" else "mean"
    return RowsOff(
        count=Measure(
            f"{name}_rows_{off}",
            f"rows of {symbol} that are {off}",
            trouble="up",
            pooled=pooled,
            sentence=f"How many are {off} by more than a tenth of their length{beside}.",
        ),
        first=Measure(
            f"{name}_rows_{off}_first",
            f"first row of {symbol} that is {off}",
            pooled=pooled,
            sentence="From 0; −1 for none.",
        ),
        last=Measure(
            f"{name}_rows_{off}_last",
            f"last row of {symbol} that is {off}",
            pooled=pooled,
            sentence="From 0; −1 for none.",
        ),
    )


def _gradient(name: str, symbol: str) -> GradientMeasures:
    """Return the rows of the table about a gradient."""
    error = Measure(
        f"{name}_error",
        f"{symbol} error",
        symbol=f"‖Δ{symbol}‖ / ‖{symbol}‖",
        trouble="up",
        pooled="mean where known",
        sentence="Against FP64, and of gradients that cancel less; mean over the sequences with loss.",
    )
    fp16 = Measure(
        f"{name}_fp16",
        f"{symbol} error by FP16",
        trouble="up",
        pooled="mean where known",
        sentence="The error of a backward pass that holds dP, dS and its results in FP16.",
    )
    return GradientMeasures(error, fp16)


def _unexplained(name: str, symbol: str) -> Measure:
    """Return the row of what an error of δ does not explain in a gradient."""
    return Measure(
        f"{name}_unexplained",
        f"{symbol} error beside δ",
        trouble="up",
        pooled="mean where known",
        sentence="The error without the part that an error of δ makes.",
    )


def _cap(name: str, symbol: str) -> Measure:
    """Return the row of what rounding a soft cap makes of a gradient."""
    return Measure(
        f"{name}_cap",
        f"{symbol} error by the soft cap",
        trouble="up",
        pooled="mean where known",
        sentence="What rounding the cap's tanh and its argument to the inputs' dtype makes at most: of 1 − tanh² none "
        "may be left.",
    )


TIES = Measure(
    "tied_rows",
    "ties",
    trouble="up",
    logged_as=TIED_ROWS,
    sentence=(
        "Share of rows whose two largest scores round to one BF16 number, of rows with two keys or more; empty where "
        "q, k or v hold NaN or infinity."
    ),
)
LARGEST_SCORE = Measure(
    "score_max",
    "largest score",
    symbol="max |S|",
    unit="nats",
    trouble="up",
    pooled="largest",
    logged_as=SCORE_MAX,
    sentence="Over all rows and keys; empty where q, k or v hold NaN or infinity.",
)
SCORE_OFFSET = Measure(
    "score_offset",
    "offset",
    unit="nats",
    trouble="up",
    sentence="Mean over rows of |mean S| of the keys that the row sees.",
)
SCORE_SPACING = Measure(
    "score_spacing",
    "FP32 spacing of scores",
    unit="nats",
    trouble="up",
    sentence="How far apart FP32 numbers lie at the largest α Σ|qₑkₑ|: no partial sum of S is larger.",
)
MEAN_KEY_SHARE = Measure(
    "mean_key_share",
    "share of the mean key",
    symbol="|mean K|² / mean |K|²",
    trouble="up",
    sentence="1 where all keys are one.",
)

NONFINITE = Measure("nonfinite", "rows not finite", trouble="up", sentence="Rows with NaN or infinity in any result.")
NONFINITE_OUT = Measure(
    "nonfinite_out", "rows of O not finite", trouble="up", sentence="Rows with NaN or infinity in O."
)
OUT_ERROR = Measure(
    "out_error",
    "O error",
    symbol="‖ΔO‖ / ‖O‖",
    trouble="up",
    logged_as=OUT_DEVIATION.rms,
    sentence="Norm of the difference from FP64, over the norm in FP64; mean over sequences.",
)
OUT_ERROR_EXPECTED = Measure(
    "out_error_expected", "O error of FlashAttention-2", sentence="By this package's reference, which rounds P̄ and O."
)
OUT_ERROR_COARSE = Measure(
    "out_error_coarse",
    "O error of a coarser attention",
    sentence="Of the declared variant, or of one that rounds S and Ō, too.",
)
SUMS_ROUNDED = Measure(
    "sums_rounded",
    "O as of a rounded Ō",
    trouble="up",
    pooled="mean where known",
    sentence=(
        "Of numbers of O that the rounding of Ō at each tile of keys changes, the share that is so less the share that "
        "is as without; NaN where none tells."
    ),
)
OUT_CUT = Measure(
    "out_cut",
    "O as cut off",
    trouble="up",
    pooled="mean where known",
    sentence=(
        "Of numbers of O that rounding and cutting off make different, the share that is as cut off less the share "
        "that is as rounded; NaN where none tells."
    ),
)
OF_SCORES = {
    (before, after, in_a_nat): Measure(
        f"scores_rounded{name}",
        f"O as of rounded scores{of}",
        trouble="up",
        pooled="mean where known",
        sentence="Slope of O's error on what holding scores in 16 bits makes; NaN where it makes nothing.",
    )
    for before, after, in_a_nat, name, of in (
        (False, True, 1.0, "", ""),
        (False, True, math.log2(math.e), "_2", ", in powers of 2"),
        (True, False, 1.0, "_before", ", before the scale"),
        (True, True, 1.0, "_twice", ", before the scale and after it"),
    )
}
"""By whether QKᵀ is rounded before the scale, whether scores are after it, and the units in a nat."""
DENOMINATOR_ADDED = Measure(
    "denominator_added",
    "constant beside ℓ",
    trouble="away from 0",
    sentence="c of the O of ℓ + c, ℓ = Σⱼ exp(Sⱼ − max S) of a row, by least squares on O.",
)
OUT_ERROR_ADDED = Measure(
    "out_error_added", "O error beside that constant", sentence="As `out_error`, against the O of ℓ + c."
)
OUT_TURNED = Measure("out_turned", "O error across O", sentence="The part of `out_error` that is across FP64's rows.")
OUT_UNSHARED = Measure(
    "out_unshared",
    "share of O's error that dV lacks",
    pooled="mean where known",
    sentence="‖dOᵀΔO − ΔdVᵀV‖ over ‖dOᵀΔO‖: 0 where both passes have one P, whatever it is; empty where O is exact.",
)
OUT_NUMBERS = Measure(
    "out_numbers",
    "numbers that tell O's error",
    sentence="How many normal errors would tell `out_error` as surely: the numbers of O, and fewer if few are far off.",
)
OUT_NUMBERS_OF_SCORES = Measure(
    "out_numbers_of_scores",
    "numbers of S that tell O's error",
    sentence="The same of errors that S makes: a row has one number less than it sees keys, or those of O.",
)
OUT_ROWS_OFF = _rows_off("out", "O")
OUT_ROWS_TURNED = _rows_off("out", "O", "turned", ", farther than roundings turn any row of the head")
FIRST_ROW_TURNED = Measure(
    "first_row_turned",
    "turn of O's first row",
    trouble="up",
    sentence=(
        "Its part across FP64's, over |O|: under a causal mask the row has one key, so that O is along v whatever is "
        "done to the scores."
    ),
)
DEAD_ROWS = Measure(
    "dead_rows",
    "dead rows",
    trouble="up",
    logged_as=HALF_NORM_ROWS,
    sentence=(
        "Share of rows [switched off](glossary.md#attention), of rows whose exact O is not 0; empty where q, k or v "
        "hold NaN or infinity."
    ),
)
LENGTH_ERROR = Measure(
    "length_error",
    "error of O's length",
    trouble="up",
    sentence="Standard deviation over rows of O's error along O, over |O|: what a rounded ℓ makes.",
)
LENGTH_ERROR_EXPECTED = Measure(
    "length_error_expected",
    "error of O's length in FlashAttention-2",
    sentence="By this package's reference, which rounds P̄ and O.",
)
LENGTH_ROWS = Measure(
    "length_rows",
    "rows that tell the error of O's length",
    sentence="How many rows with normal errors would tell `length_error` as surely, by the kurtosis of its errors.",
)
SCORE_FACTOR = Measure(
    "score_factor",
    "factor of the scores, less 1",
    trouble="away from 0",
    sentence="By least squares on O; NaN where no row tells.",
)
SCORE_FACTOR_COARSE = Measure(
    "score_factor_coarse",
    "factor of the scores in a coarser attention, less 1",
    sentence="The same of the O of `out_error_coarse`.",
)
SCORE_FACTOR_EXPECTED = Measure(
    "score_factor_expected",
    "factor of the scores in FlashAttention-2, less 1",
    sentence="The same of the O of `out_error_expected`.",
)
SCORE_FACTOR_LEFT = Measure(
    "score_factor_left", "share of O's error beside the factor", sentence="1 where O is not far off."
)

GRAD_Q, GRAD_K, GRAD_V = _gradient("grad_q", "dQ"), _gradient("grad_k", "dK"), _gradient("grad_v", "dV")
GRAD_Q_UNEXPLAINED, GRAD_K_UNEXPLAINED = _unexplained("grad_q", "dQ"), _unexplained("grad_k", "dK")
GRAD_Q_CAP, GRAD_K_CAP = _cap("grad_q", "dQ"), _cap("grad_k", "dK")
GRAD_Q_ROWS_OFF = _rows_off("grad_q", "dQ")
GRAD_Q_FACTOR = Measure(
    "grad_q_factor",
    "factor of dQ, less 1",
    trouble="away from 0",
    pooled="mean where known",
    sentence="By least squares across PK, where an error of δ moves nothing.",
)
OUT_BESIDE_FACTOR, GRAD_Q_BESIDE_FACTOR, GRAD_K_BESIDE_FACTOR = (
    Measure(
        f"{name}_beside_factor",
        f"{symbol} error beside the factor",
        pooled="mean where known",
        sentence=f"As `{name}_error`, against {symbol} of scores that have the factor of dQ.",
    )
    for name, symbol in (("out", "O"), ("grad_q", "dQ"), ("grad_k", "dK"))
)
OF_L = {
    (dtype, unit): Measure(
        f"logsumexp_{short}{name}",
        f"dQ as of an L in {short.upper()}{of}",
        trouble="up",
        pooled="mean where known",
        sentence="Slope of dQ's error on what rounding L makes, across PK, and what rounding S makes.",
    )
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"))
    for unit, name, of in ((1.0, "", ""), (math.log2(math.e), "_2", ", in powers of 2"))
}
"""By the dtype in which L is held, and the units in a nat."""
ALONG_MEAN_KEY = Measure(
    "along_mean_key",
    "along mean key",
    trouble="up",
    logged_as=GRAD_Q_ALONG_MEAN_KEY,
    sentence="Share of dQ's squared error along the mean key.",
)
GRAD_OUT_SIZE = Measure(
    "grad_out_size",
    "size of dO",
    trouble="down",
    pooled="mean where known",
    sentence="Root mean square of dO over rows that are not 0, of tensors in FP16.",
)

DELTA, GRAD_DELTA, ROW_SUMS = (
    _error_of_delta("delta", "O, as δ = rowsum(dO∘O) has it"),
    _error_of_delta("grad_delta", "dQ's error along PK"),
    _error_of_delta("row_sum", "row sums of dS"),
)
DELTA = dataclasses.replace(
    DELTA,
    bias=dataclasses.replace(DELTA.bias, logged_as=ROW_SUM.bias),
    noise=dataclasses.replace(DELTA.noise, logged_as=ROW_SUM.noise),
)
SOURCES = (ROW_SUMS, GRAD_DELTA, DELTA)
"""What tells of δ's error, the most direct first.

The last tells of δ only where the backward pass takes it from the O that was returned.
"""
SEQUENCES = 256
"""Of the steps after a capture, in which the error of δ is measured, unless the loop asks for others.

Where δ has a noise of 2e-4 a row, as in explosions of runs/reference/own-run-h100, the bias of a sequence of 2,048 rows
spreads by 2e-4 / √2048 = 4.4e-6. Student's t of 256 sequences and 4 heads begins at 3.7: what shows is
3.7 · 4.4e-6 / √256 = 1.0e-6, the smallest error that made a run explode (docs/findings/mechanism.md)."""

GRAD_DELTA_ROUNDING = Measure(
    "grad_delta_rounding",
    "δ noise by BF16",
    unit="|dO||O|",
    pooled="mean where known",
    sentence="What roundings of dS and dQ to BF16 add to `grad_delta_noise` at most.",
)
FOLLOWS_OUT = Measure(
    "delta_follows_out",
    "follows O",
    pooled="mean where known",
    sentence=(
        "Slope of e on what O's rounding adds to rowsum(dO∘O): 1 in FlashAttention, 0 where δ is of an FP32 O or of "
        "P∘dP; empty where the rows do not tell it."
    ),
)
DELTA_FACTOR = Measure(
    "delta_factor",
    "factor of δ, less 1",
    trouble="away from 0",
    pooled="mean where known",
    sentence="Slope of e on δ, beside what the roundings of P̄ and O add, and a constant part of |dO||O|.",
)
OF_DELTA = {
    (of, dtype, cut): Measure(
        f"delta_of_{of}_{'cut' if cut else 'near'}_{short}",
        f"δ as {'cut off' if cut else 'rounded'} to {short.upper()}, of {of_words}",
        trouble="up",
        pooled="mean where known",
        sentence="Slope of e on what holding δ so makes, beside the terms of `delta_factor` and δ.",
    )
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16"))
    for of, of_words in (("out", "the returned O"), ("probs", "an O in FP32"))
    for cut in (True, False)
}
"""By the O of which δ is made, the dtype that holds it, and whether it is cut off, not rounded to nearest."""
OF_DELTA_SPREAD = {
    key: Measure(
        f"{row.name}_spread",
        f"standard error: {row.label}",
        pooled="mean where known",
        sentence=f"Of `{row.name}`, over rows.",
    )
    for key, row in OF_DELTA.items()
}
"""By the same."""
OF_DELTA_ROWS = Measure(
    "delta_of_rows",
    "rows of a held δ",
    sentence="How many rows of one size tell such a slope, less the terms beside it.",
)
DELTA_ROUNDING = Measure(
    "delta_rounding",
    "δ noise by the rounding of O",
    unit="|dO||O|",
    sentence="What the rounding of O adds in the rows that tell, as `delta_noise`.",
)
SHIFT_BIAS = Measure(
    "shift_bias",
    "δ bias by a shift of scores",
    unit="|dO||O|",
    trouble="away from 0",
    sentence="What of `row_sum_bias` the response of O to a shift of all scores accounts for; NaN with a sink.",
)

WEIGHT_ERROR = Measure(
    "weight_error",
    "error of weights",
    trouble="up",
    sentence="Largest mean |error| of the weight that a block of queries gives a block of keys.",
)
WEIGHT_ERROR_QUERIES = Measure("weight_error_queries", "block of queries", sentence="Of that error, from 0.")
WEIGHT_ERROR_KEYS = Measure(
    "weight_error_keys",
    "block of keys",
    sentence="That lacks most weight of those queries, or that they see and must not; from 0.",
)
WEIGHT_FOUND = Measure("weight_found", "weight", sentence="What that block of queries gave those keys.")
WEIGHT_EXACT = Measure("weight_exact", "exact weight", sentence="What it had to give.")
MASS_ERROR = Measure(
    "mass_error", "error of Σⱼ Pᵢⱼ", trouble="up", sentence="Largest over blocks of queries, in the backward pass."
)
MASS_ERROR_BLOCK = Measure("mass_error_block", "block of queries", sentence="Of that error, from 0.")


def _rows_of(found: object) -> list[Measure]:
    """Return the rows in a constant of this module: a row, or a group of them."""
    if isinstance(found, Measure):
        return [found]
    if isinstance(found, DeltaErrorMeasures | RowsOff | GradientMeasures):
        return list(vars(found).values())
    if isinstance(found, dict):
        return [row for row in found.values() if isinstance(row, Measure)]
    return []


MEASURES = {row.name: row for found in list(globals().values()) for row in _rows_of(found)}
"""Every measure by name."""
