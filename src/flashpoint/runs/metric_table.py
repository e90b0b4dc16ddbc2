"""The vocabulary of metrics: name, symbol, unit and meaning of each, once.

What a run writes, what figures and tables call it, and docs/reference.md (``scripts/docs/list_metrics.py``) read it
here. Notation of Qiu & Yao (arXiv 2510.04212): lp is what the attention computes, hp the same with O in FP32.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Literal

Per = Literal["run", "tensor", "head"]
"""What has a value of its own: the run, each tensor of the weights, or each head of each layer."""
Trouble = Literal["up", "down", "away from 0"]
"""The direction that comes with an explosion, or with its cause."""

ALL_TENSORS = "all"
"""In the place of a tensor's name: the distance over all weights, as in ``weights_largest/all``."""


@dataclass(frozen=True)
class Metric:
    """One quantity that is measured."""

    name: str
    """In the metrics file and in the evidence."""
    label: str
    """What figures and tables call it."""
    _: KW_ONLY
    symbol: str = ""
    unit: str = ""
    """Empty for a number without one."""
    per: Per
    measured_by: str
    """The training, what it is measured with, or the name of the probe."""
    trouble: Trouble | None = None
    """None where neither direction is one."""
    sentence: str
    """What it is: one sentence in Markdown, with links from docs/."""

    @property
    def axis(self) -> str:
        """What an axis is called: the words and the unit."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    def of_tensor(self, tensor: str) -> str:
        """Return the name under which a metric of tensors is written for one of them."""
        return f"{self.name}/{tensor}"


@dataclass(frozen=True)
class DeltaErrorMetrics:
    """What is measured of one error of δ, by head."""

    bias: Metric
    noise: Metric
    sum: Metric | None = None
    """None where the sum over tokens is not measured; then neither is the variance."""
    variance: Metric | None = None


@dataclass(frozen=True)
class DeviationMetrics:
    """How far one tensor is from that of attention in FP32 throughout, by head."""

    largest: Metric
    rms: Metric
    mean: Metric


_every_step = partial(Metric, per="run", measured_by="every step")
LOSS = _every_step(
    "loss", "loss", unit="nats per token", trouble="up", sentence="Mean cross-entropy of the step's tokens."
)
GRAD_NORM = _every_step(
    "grad_norm", "gradient norm", symbol="‖g‖", trouble="up", sentence="Norm of all gradients, not clipped."
)
UPDATE_NORM = _every_step(
    "update_norm", "update norm", symbol="‖Δw‖", trouble="up", sentence="Norm of what the step added to all weights."
)
CLIP_FACTOR = _every_step(
    "clip_factor",
    "clip factor",
    trouble="down",
    sentence="What clipping multiplied the gradients by; 1 where it left them alone.",
)
LEARNING_RATE = _every_step("lr", "learning rate", sentence="Learning rate of the step.")

_at_intervals = partial(Metric, per="run", measured_by="at intervals")
VALIDATION_LOSS = _at_intervals(
    "val_loss",
    "validation loss",
    unit="nats per token",
    trouble="up",
    sentence="Mean cross-entropy of the validation sequences, every `train.eval_interval` steps and at the end.",
)
TOKENS_PER_SECOND = _at_intervals(
    "tokens_per_second",
    "rate",
    unit="tokens/s",
    sentence="Tokens trained on since the last reading over its time, every `train.log_interval` steps.",
)
MEMORY = _at_intervals(
    "memory_gib", "memory", unit="GiB", sentence="Largest that PyTorch has reserved on the GPU so far."
)

_of_tensors = partial(Metric, per="tensor", measured_by="`probes.weights_against`")
WEIGHTS_LARGEST = _of_tensors(
    "weights_largest",
    "largest difference",
    symbol="max |w − w'|",
    sentence="Largest difference of an element from the other run's.",
)
WEIGHTS_WASSERSTEIN = _of_tensors(
    "weights_wasserstein",
    "1-Wasserstein distance",
    symbol="W₁",
    sentence="[W₁](glossary.md#symbols) of the two runs' distributions of values.",
)
WEIGHTS_SPREAD = _of_tensors(
    "weights_spread", "spread", symbol="σ(w')", sentence="Standard deviation of the other run's values."
)

_of_weights = partial(Metric, per="head", measured_by="`probes.weights_interval`", trouble="up")
W_Q_NORM = _of_weights(
    "w_q_spectral_norm", "W_Q spectral norm", symbol="‖W_Q‖₂", sentence="Largest singular value of W_Q."
)
W_K_NORM = _of_weights(
    "w_k_spectral_norm", "W_K spectral norm", symbol="‖W_K‖₂", sentence="Largest singular value of W_K."
)
W_V_NORM = _of_weights(
    "w_v_spectral_norm", "W_V spectral norm", symbol="‖W_V‖₂", sentence="Largest singular value of W_V."
)
QK_NORM = _of_weights(
    "qk_spectral_norm",
    "QK spectral norm",
    symbol="‖W_Qᵀ W_K‖₂",
    sentence="Largest singular value of QKᵀ as a form on the inputs, without α.",
)

_delta_error = partial(Metric, per="head", measured_by="`delta_error`")
DELTA_ERROR_SUM = _delta_error(
    "delta_error_sum",
    "error of δ, summed over the observed tokens",
    symbol="Σ (δ_lp − δ_hp)",
    unit="nats",
    trouble="away from 0",
    sentence="Over the observed tokens: δ_lp is δ as the variant computes it, δ_hp is δ from the FP32 O of the same P̄.",
)
DELTA_ERROR_VARIANCE = _delta_error(
    "delta_error_variance",
    "variance of the error of δ",
    symbol="Var(δ_lp − δ_hp)",
    unit="nats²",
    sentence="Variance of that error over the observed tokens.",
)
DELTA_ERROR_CUMULATIVE = _delta_error(
    "delta_error_cumulative",
    "error of δ, summed over the observed steps",
    unit="nats",
    trouble="away from 0",
    sentence="The sum over all observed steps so far.",
)
DELTA_ERROR = DeltaErrorMetrics(
    bias=_delta_error(
        "delta_error_relative_bias",
        "bias of δ against δ_hp",
        symbol="Σ (δ_lp − δ_hp) / Σ |dO||O|",
        unit="|dO||O|",
        trouble="away from 0",
        sentence="Mean of that error.",
    ),
    noise=_delta_error(
        "delta_error_relative_noise",
        "noise of δ against δ_hp",
        unit="|dO||O|",
        sentence="Root mean square of that error.",
    ),
    sum=DELTA_ERROR_SUM,
    variance=DELTA_ERROR_VARIANCE,
)
DELTA_ABS_MEAN = _delta_error(
    "delta_abs_mean", "mean |δ|", symbol="mean |δ_hp|", unit="nats", sentence="Mean size of δ_hp."
)
ROW_SUM_MEAN = _delta_error(
    "row_sum_mean",
    "mean Σⱼ dSᵢⱼ",
    symbol="mean Σⱼ dSᵢⱼ",
    unit="nats",
    trouble="away from 0",
    sentence="Mean of what is left of Σⱼ dSᵢⱼ = 0.",
)
ROW_SUM_ABS_MEAN = _delta_error(
    "row_sum_abs_mean",
    "mean |Σⱼ dSᵢⱼ|",
    symbol="mean |Σⱼ dSᵢⱼ|",
    unit="nats",
    trouble="up",
    sentence="Mean size of what is left of Σⱼ dSᵢⱼ = 0.",
)
ROW_SUM = DeltaErrorMetrics(
    bias=_delta_error(
        "row_sum_relative_bias",
        "bias of δ",
        unit="|dO||O|",
        trouble="away from 0",
        sentence=(
            "Mean error of δ against the δ that leaves nothing of Σⱼ dSᵢⱼ: it holds the rounding of P̄, too; of a "
            "watched loop that of rowsum(dO∘O) against FP64."
        ),
    ),
    noise=_delta_error(
        "row_sum_relative_noise", "noise of δ", unit="|dO||O|", sentence="Root mean square of that error."
    ),
)
SIGN_AGREEMENT = _delta_error(
    "grad_out_error_sign_agreement",
    "dO and error of O: mean product of signs",
    symbol="mean sign(dO)·sign(O_lp − O_hp)",
    trouble="away from 0",
    sentence="Mean product of the signs of dO and O_lp − O_hp, from −1 to 1.",
)

_ties = partial(Metric, per="head", measured_by="`ties`")
TIED_ROWS = _ties(
    "tied_rows",
    "share of rows with two or more P̄ = 1",
    trouble="up",
    sentence=(
        "Share of rows with two or more P̄ that are 1 as rounded; of a watched loop, of rows whose two largest scores "
        "are one BF16 number."
    ),
)
TIE_MULTIPLICITY = _ties(
    "tie_multiplicity",
    "how many P̄ = 1 such a row has",
    trouble="up",
    sentence="How many P̄ = 1 such a row has, a mean over these rows.",
)
TIES_ON_FIRST_KEYS = _ties(
    "ties_on_first_keys",
    "share of these P̄ = 1 on the first four keys",
    sentence="Share of these P̄ = 1 on the first four keys, where an attention sink is.",
)
TIED_OUT_BIAS = _ties(
    "tied_out_error_bias",
    "rounding of O away from 0, tied rows",
    symbol="Σ (O_lp − O_hp)·sign O_hp / Σ |O_lp − O_hp|",
    trouble="away from 0",
    sentence="In such rows: 1 where every element is rounded away from 0, −1 towards it; 0 without such a row.",
)
UNTIED_OUT_BIAS = _ties(
    "untied_out_error_bias",
    "rounding of O away from 0, other rows",
    trouble="away from 0",
    sentence="The same in the other rows.",
)
ONE_SIDED_TIED_OUT_BIAS = _ties(
    "one_sided_tied_out_error_bias",
    "rounding of O away from 0, tied rows, most one-sided feature of V",
    trouble="away from 0",
    sentence="The same in tied rows, in the feature whose V is most of one sign.",
)

_scores = partial(Metric, per="head", measured_by="`scores`")
SCORE_MAX = _scores(
    "score_max", "largest |S|", symbol="max |S|", unit="nats", trouble="up", sentence="Size of the largest score."
)
MAX_LOGIT = Metric(
    "max_attention_logit",
    "max attention logit",
    symbol="max |S|",
    unit="nats",
    per="head",
    measured_by="`flashpoint.watch`",
    trouble="up",
    sentence="Size of the largest score of all sequences, after a soft cap and a bias by position.",
)
SCORE_MEAN = _scores(
    "score_mean",
    "mean |S|",
    symbol="mean |S|",
    unit="nats",
    trouble="up",
    sentence="Mean size of the scores of the keys that each query sees.",
)
ENTROPY = _scores(
    "entropy",
    "entropy of the attention",
    symbol="−Σⱼ Pᵢⱼ ln Pᵢⱼ",
    unit="nats",
    trouble="down",
    sentence="Entropy of the attention, a mean over rows.",
)

_rows = partial(Metric, per="head", measured_by="`rows`")
ROW_MASS = _rows(
    "row_mass_mean",
    "mean Σⱼ Pᵢⱼ",
    symbol="mean Σⱼ Pᵢⱼ",
    trouble="down",
    sentence="Mean mass of a row as the backward pass has P; 1 in exact arithmetic.",
)
HALF_MASS_ROWS = _rows(
    "half_mass_rows",
    "share of rows with half their mass",
    trouble="up",
    sentence="Share of rows whose Σⱼ Pᵢⱼ is below one half.",
)
HALF_NORM_ROWS = _rows(
    "half_norm_rows",
    "share of rows with half their |O|",
    trouble="up",
    sentence="Share of rows whose |O| is below half of exact attention's.",
)
ZERO_GRAD_ROWS = _rows(
    "zero_grad_rows",
    "share of rows without a gradient",
    trouble="up",
    sentence="Share of rows whose dS are all 0, the first row apart.",
)


def _deviation(name: str, symbol: str, unit: str = "") -> DeviationMetrics:
    """Return the rows of a tensor's distance from attention in FP32 throughout; ``unit`` is the tensor's own."""
    row = partial(Metric, per="head", measured_by="`deviation`")
    return DeviationMetrics(
        largest=row(
            f"{name}_deviation_max",
            f"largest error of {symbol}",
            symbol=f"max |Δ{symbol}|",
            unit=unit,
            trouble="up",
            sentence=f"Largest difference of {symbol} from that of attention in FP32 throughout.",
        ),
        rms=row(
            f"{name}_deviation_rms",
            f"relative error of {symbol}",
            symbol=f"‖Δ{symbol}‖ / ‖{symbol}‖",
            trouble="up",
            sentence="Root mean square of these differences over that of the FP32 values.",
        ),
        mean=row(
            f"{name}_deviation_mean",
            f"relative bias of {symbol}",
            trouble="away from 0",
            sentence="Their signed mean over the same.",
        ),
    )


OUT_DEVIATION = _deviation("out", "O")
DELTA_DEVIATION = _deviation("delta", "δ", "nats")
GRAD_Q_DEVIATION = _deviation("grad_q", "dQ")

_out_bias = partial(Metric, per="head", measured_by="`out_bias`")
V_SIGN = _out_bias(
    "v_sign_max",
    "V: share of one sign, most one-sided feature",
    trouble="up",
    sentence="Of a head's most one-sided feature of V, the share of keys with one sign, from ½ to 1.",
)
OUT_BIAS_LARGEST = _out_bias(
    "out_error_bias_max",
    "error of O: |mean| / mean size, most biased feature",
    symbol="|mean (O_lp − O_hp)| / mean |O_lp − O_hp|",
    trouble="up",
    sentence="In the most biased feature: 0 without a bias, 1 where all errors have one sign.",
)
OUT_BIAS_MEAN = _out_bias(
    "out_error_bias_mean", "error of O: |mean| / mean size", trouble="up", sentence="The same, a mean over features."
)
FEATURE_SIGN_AGREEMENT = _out_bias(
    "feature_sign_agreement",
    "share of rows where dO and the error of O have one sign, in one feature",
    trouble="up",
    sentence=(
        "Share of rows of the second half where dO and O_lp − O_hp have one sign, in the feature that has most such "
        "rows in the first half; ½ where errors have no bias."
    ),
)
FEATURE_V_SIGN_AGREEMENT = _out_bias(
    "feature_v_error_sign_agreement",
    "share of keys whose V has the sign of the error of O, in that feature",
    trouble="up",
    sentence="Share of keys whose V has, in that feature, the sign of the second half's Σ (O_lp − O_hp).",
)

_null_direction = partial(Metric, per="head", measured_by="`null_direction`", trouble="up")
W_Q_MEAN_KEY = _null_direction(
    "w_q_mean_key_share",
    "share of ‖W_Q‖² along the mean key",
    sentence="Share of ‖W_Q‖² along the mean key: 0 is none of W_Q, 1 all of it.",
)
W_Q_FIRST_KEY = _null_direction(
    "w_q_first_key_share",
    "share of ‖W_Q‖² along the first token's key",
    sentence="The same along the first token's key.",
)
W_Q_UPDATE_MEAN_KEY = _null_direction(
    "w_q_update_mean_key_share",
    "share of W_Q's last update along the mean key",
    sentence="Share of the squared norm of what the step added to W_Q.",
)
W_Q_UPDATE_FIRST_KEY = _null_direction(
    "w_q_update_first_key_share",
    "share of W_Q's last update along the first token's key",
    sentence="The same along the first token's key.",
)
ATTENDED_KEY_COSINE = _null_direction(
    "attended_key_mean_key_cosine",
    "cosine of mean PK with the mean key",
    symbol="cos(mean PK, mean K)",
    sentence="Cosine of the mean key with the mean PK, along which errors of δ push W_Q.",
)

_similarity = partial(Metric, per="head", measured_by="`similarity`")
TOKEN_SIMILARITY = _similarity(
    "token_similarity",
    "mean cosine between the tokens of a step",
    trouble="up",
    sentence="Mean cosine of [(PK)[T]ᵀX[T]](glossary.md#what-grows) between the tokens of a step.",
)
STEP_SIMILARITY = _similarity(
    "step_similarity",
    "mean cosine with the step observed before",
    trouble="up",
    sentence="The same between the tokens of two observations; the first observation has none.",
)
ATTENDED_KEY_SIMILARITY = _similarity(
    "attended_key_similarity",
    "mean cosine between the tokens' PK",
    trouble="up",
    sentence="Mean cosine of PK between tokens, one factor of `token_similarity`.",
)
INPUT_SIMILARITY = _similarity(
    "input_similarity",
    "mean cosine between the tokens' inputs",
    trouble="up",
    sentence="Mean cosine of X between tokens, the other factor.",
)
EFFECTIVE_RANK = _similarity(
    "w_q_error_effective_rank",
    "effective rank of the error of dW_Q",
    symbol="(Σσ²)² / Σσ⁴",
    trouble="down",
    sentence="[Effective rank](glossary.md#what-grows) of the gradient error of W_Q; 0 without an error.",
)

GRAD_Q_ALONG_MEAN_KEY = Metric(
    "grad_q_error_mean_key_share",
    "share of dQ's squared error along the mean key",
    per="head",
    measured_by="`flashpoint.watch`",
    trouble="up",
    sentence="Share of dQ's squared error along the mean key, against FP64.",
)


def _rows_of(found: object) -> list[Metric]:
    """Return the rows in a constant of this module: a row, or a group of them."""
    if isinstance(found, Metric):
        return [found]
    if isinstance(found, DeltaErrorMetrics | DeviationMetrics):
        return [one for one in vars(found).values() if one is not None]
    return []


METRICS = {row.name: row for found in list(globals().values()) for row in _rows_of(found)}
"""Every metric by name, in the order of this page."""
OF_THE_RUN = frozenset(name for name, metric in METRICS.items() if metric.per == "run")
"""Metrics of the training itself. All others of a run are of heads, or distances from another run's weights."""
WEIGHT_NORMS = (W_Q_NORM, W_K_NORM, W_V_NORM, QK_NORM)
