"""Which part of the tensors a program reads and writes."""

import triton
import triton.language as tl

from flashpoint_kernels.rounding import INTERPRETED


@triton.jit
def block_and_head(n_blocks, n_heads, GROUP):
    """Return the block and head (of all sequences) of this program: heads go in groups that fit in L2, a group block by
    block."""
    i = tl.program_id(0)
    group, within = i // (GROUP * n_blocks), i % (GROUP * n_blocks)
    heads = tl.minimum(GROUP, n_heads - group * GROUP)
    return within // heads, group * GROUP + within % heads


@triton.jit
def token_offsets(i_b, i_h, o_tokens, H, T, D: tl.constexpr):
    """Return the offsets [BT, D] of tokens in a tensor that lies in memory as [B, T, H, D]."""
    return ((i_b.to(tl.int64) * T + o_tokens)[:, None] * H + i_h) * D + tl.arange(0, D)[None, :]


@triton.jit
def load_rows(desc, i_b, i_h, first, BT: tl.constexpr, D: tl.constexpr):
    """Return the tokens [BT, D] of one head as an operand; 0 past the last token."""
    x = tl.reshape(desc.load([i_b, i_h, first, 0]), [BT, D])
    return x.to(tl.float32) if INTERPRETED else x
