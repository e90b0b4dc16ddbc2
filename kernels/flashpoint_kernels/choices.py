"""A variant as the kernels take it: one compile-time value, with the words of ``flashpoint.numerics.variant``."""

from dataclasses import dataclass

from flashpoint_kernels.codes import Stream


@dataclass(frozen=True)
class Point:
    """A rounding point: its mode and mantissa bits, and the stream of random bits of its stochastic rounding."""

    mode: str
    bits: int
    stream: Stream


@dataclass(frozen=True)
class Choices:
    """Every numerical choice of one attention; names and words as in ``flashpoint.numerics.variant``.

    Scores are kept in units of ``unit`` nats, after a factor ``prescale`` on QKᵀ, with prescale · unit = α. Where α
    is a power of two nothing has to be multiplied: prescale is 1, and rounding commutes with the unit. The shift's
    constants are in the same units.
    """

    scores: Point
    probs: Point
    probs_backward: Point
    """P as the operand of PᵀdO: ``probs`` with random bits of its own."""
    out_unnormalized: Point
    out: Point
    out_unnormalized_for_delta: Point
    out_for_delta: Point
    """Rounding of the O of δ with ``delta=out_independent``: the two points above with other random bits."""
    grad_probs: Point
    grad_scores: Point
    denominator: Point
    grad_blocks: Point
    grad_k_blocks: Point
    grad_v_blocks: Point
    out_unnormalized_when: str
    out_divisor: str
    shift: str
    shift_offset: float
    beta: float
    gamma: float
    tie_tolerance: float
    max_shift: float
    denominator_floor: float
    counts_masked: bool
    normalizer: str
    """``before_product`` only with one block of keys for the whole row."""
    delta: str
    saved_out: str
    """The O that is saved for δ beside the one returned: ``none``, ``unrounded`` or ``redrawn``."""
    out_mantissa: int
    """Mantissa bits of O and what is saved that it lacks; 0 where the O of δ is saved whole."""
    delta_error: str
    """``none`` also in layers that take none."""
    delta_error_size: float
    delta_error_sizes: int
    """Sizes that follow each other, each for ``delta_error_interval`` forward passes; 0 for one constant size."""
    delta_error_interval: int
    delta_error_into: str
    delta_error_stream: Stream
    exact_row_sum: bool
    exact_row_sum_passes: int
    center_keys: bool
    center_grad_q: bool
    block_k: int
    """Keys, and in the backward pass queries, per block; 2³⁰ for the whole sequence."""
    tiles_per_block: int
    """Tiles of keys in a block of keys of the online softmax."""
    causal: bool
    """Whether a query sees no later key; otherwise it sees all."""
    prescale: float
    unit: float
