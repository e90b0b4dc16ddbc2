"""Which part of the tensors a program reads and writes."""

from typing import NamedTuple

import triton
import triton.language as tl

from flashpoint_kernels.rounding import INTERPRETED


class Head(NamedTuple):
    """One head of one sequence."""

    sequence: tl.tensor
    index: tl.tensor
    """Of the head in its sequence."""
    number: tl.tensor
    """Of the head among those of all sequences."""
    count: tl.tensor
    """H: heads of a sequence."""
    length: tl.tensor
    """T: tokens of a sequence."""


@triton.jit
def head_of(number, H, T):
    """Return the head of a number among those of all sequences."""
    return Head(number // H, number % H, number, H, T)


@triton.jit
def block_and_head(n_blocks, n_heads, GROUP):
    """Return the block and head (of all sequences) of this program: heads go in groups that fit in L2, a group block by
    block."""
    i = tl.program_id(0)
    group, within = i // (GROUP * n_blocks), i % (GROUP * n_blocks)
    heads = tl.minimum(GROUP, n_heads - group * GROUP)
    return within // heads, group * GROUP + within % heads


@triton.jit
def token_offsets(head, o_tokens, D: tl.constexpr):
    """Return the offsets [BT, D] of tokens in a tensor that lies in memory as [B, T, H, D]."""
    o_first = head.sequence.to(tl.int64) * head.length
    return ((o_first + o_tokens)[:, None] * head.count + head.index) * D + tl.arange(0, D)[None, :]


@triton.jit
def load_rows(desc, head, first, BT: tl.constexpr, D: tl.constexpr):
    """Return the tokens [BT, D] of one head as an operand; 0 past the last token."""
    x = tl.reshape(desc.load([head.sequence, head.index, first, 0]), [BT, D])
    return x.to(tl.float32) if INTERPRETED else x
