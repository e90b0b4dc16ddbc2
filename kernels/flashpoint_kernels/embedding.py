"""Gradient of an embedding without atomics: each token's rows are summed in the order of their positions."""

import triton
import triton.language as tl


@triton.jit
def embedding_grad_kernel(
    grad_ptr, positions_ptr, starts_ptr, out_ptr, C, BN: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Store the features [BC] of one token's gradient: the sum over its positions, ``BN`` at a time.

    ``positions_ptr`` holds the positions sorted by token, those of token t from ``starts_ptr[t]`` to ``[t + 1]``.
    """
    token = tl.program_id(0)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    start, end = tl.load(starts_ptr + token), tl.load(starts_ptr + token + 1)
    total = tl.zeros([BC], tl.float32)
    for first in range(start, end, BN):
        places = first + tl.arange(0, BN)
        positions = tl.load(positions_ptr + places, mask=places < end, other=0)
        pointers = grad_ptr + positions[:, None].to(tl.int64) * C + columns[None, :]
        total += tl.sum(tl.load(pointers, mask=(places < end)[:, None] & (columns < C)[None, :], other=0.0), 0)
    tl.store(out_ptr + token.to(tl.int64) * C + columns, total, mask=columns < C)
