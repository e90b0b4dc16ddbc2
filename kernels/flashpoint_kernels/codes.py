"""Numbers that the kernels and the PyTorch attention share. Without Triton, so that a CPU can read them."""

from enum import IntEnum

BF16_BITS = 7
"""Explicit mantissa bits of BF16."""
HEAD_SIZES = (16, 32, 64, 128)
"""Features per head that the kernels take."""


class Stream(IntEnum):
    """What random bits are for. Streams are independent of each other; a rounding point has the stream of its name."""

    SCORES = 0
    PROBS = 1
    OUT_UNNORMALIZED = 2
    OUT = 3
    GRAD_SCORES = 4
    PROBS_BACKWARD = 5
    OUT_UNNORMALIZED_FOR_DELTA = 6
    OUT_FOR_DELTA = 7
    DELTA_ERROR = 8
    TARGETS = 9
    GRAD_PROBS = 10
    DENOMINATOR = 11
    GRAD_BLOCKS = 12
    """Of dQ; those of dK and dV follow."""
    GRAD_K_BLOCKS = 13
    GRAD_V_BLOCKS = 14


# The last word of Philox's counter is layer + stream · STREAM_UNIT + number of the key block · BLOCK_UNIT.
STREAM_UNIT = 1 << 12
BLOCK_UNIT = 1 << 16

FP16_MAX = 65_504.0
PROGRAMS = 1 << 10
"""Of the passes around an attention in FP16, eight for each multiprocessor of an H200."""
FACTOR_AT = 3 * PROGRAMS
"""Where the power of two stands in a call's state."""
STATES = FACTOR_AT + 8
"""Numbers of a call's state."""
CALL = 1 << 32
"""What a call adds to a count, above all that tensors add."""
