"""K − mean_T(K) of each head and sequence, in a pass of its own before the attention."""

import triton
import triton.language as tl

from flashpoint_kernels.addressing import head_of, token_offsets
from flashpoint_kernels.rounding import to_dtype_of


@triton.jit
def load_chunk(ptr, stride_b, stride_h, stride_t, i_bh, first, H, T, D: tl.constexpr, BT: tl.constexpr):
    """Return the tokens [BT, D] of one head in FP32, 0 past the last."""
    o_tokens = first + tl.arange(0, BT)
    ptr += (i_bh // H).to(tl.int64) * stride_b + (i_bh % H).to(tl.int64) * stride_h
    pointers = ptr + o_tokens[:, None].to(tl.int64) * stride_t + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=(o_tokens < T)[:, None], other=0.0).to(tl.float32)


@triton.jit
def center_keys_kernel(
    k_ptr, centered_ptr, selected_ptr, stride_b, stride_h, stride_t, H, T,
    D: tl.constexpr, BT: tl.constexpr, CENTERS: tl.constexpr, ELSEWHERE: tl.constexpr,
):  # fmt: skip
    """Store K − mean_T(K) of one head and sequence, or K where a choice of heads says so; L2 holds the second read.

    CENTERS is of the selected heads and ELSEWHERE of the others, or None where all heads are centred.
    """
    i_bh = tl.program_id(0)
    b_sum = tl.zeros([D], tl.float32)
    for first in range(0, T, BT):
        b_sum += tl.sum(load_chunk(k_ptr, stride_b, stride_h, stride_t, i_bh, first, H, T, D, BT), 0)
    b_mean = b_sum[None, :] / T
    if ELSEWHERE is not None:
        centers = CENTERS if tl.load(selected_ptr + i_bh % H) != 0 else ELSEWHERE
        b_mean = tl.where(centers, b_mean, 0.0)
    for first in range(0, T, BT):
        b_k = load_chunk(k_ptr, stride_b, stride_h, stride_t, i_bh, first, H, T, D, BT)
        o_tokens = first + tl.arange(0, BT)
        o_out = token_offsets(head_of(i_bh, H, T), o_tokens, D)
        tl.store(centered_ptr + o_out, to_dtype_of(b_k - b_mean, centered_ptr), mask=(o_tokens < T)[:, None])
