"""O as FlashAttention's roundings alone make it: by this package's reference, or from FP64's scores.

The reference knows causal and full self-attention. In other forms S, P̄ and Ō of FP64 are rounded, in one tile.
Shapes: :mod:`flashpoint.diagnosis.call`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.numerics.choices import UNROUNDED, Rounding
from flashpoint.numerics.reference import flash_fwd, fwd_of_rows
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant

_BLOCKS = 64, 128, None
"""Keys of a tile in kernels that are in use; None is all of a row."""
_TELLING = 32
"""Queries at the end of each quarter of a sequence, that tell tiles apart."""
_ALL_BUT = 0.999
"""A share of O's elements from which on no other tiles are tried."""


class RoundedOut:
    """O of one sequence, and what FlashAttention-2's roundings alone would make of it, each computed once.

    Args:
        out: O [N, H, T_q, d_v] as the attention returned it.
        n: number of the sequence.

    Attributes:
        out: of the sequence, [H, T_q, d_v] float64.
        dtype: in which it was returned.
    """

    def __init__(self, call: AttentionCall, out: Tensor, n: int) -> None:
        self._call, self._n = call, n
        self.out, self.dtype = out[n].double(), out.dtype

    @cached_property
    def of_probs(self) -> Tensor:
        """:func:`out_of_rounded_probs` [H, T_q, d_v] float64."""
        return out_of_rounded_probs(self._call, self._n)

    @cached_property
    def in_its_tiles(self) -> Tensor:
        """The same in tiles of which the returned O tells: those that leave most of its elements rounded once."""
        block_k = self._block_k
        return self.of_probs if block_k == _BLOCKS[0] else out_of_rounded_probs(self._call, self._n, block_k)

    @property
    def as_of_rounded_sums(self) -> Tensor:
        """Of the elements of O that are others where Ō is rounded at each tile, to the inputs' dtype: the share that is
        as with it less the share that is as without [H] float64; NaN of a head without such elements.

        Without such a rounding none is expected above 0. O is the rounding of a number that differs from the
        reference's by what other tiles make: to either side alike, and less often by more. The reference's own number
        is nearer to the middle of those that round as without than of those that round as with it.
        """
        dtype = _dtype(self._call)
        if dtype is None or not _reference_knows(self._call):
            return self.out.new_full(self.out.shape[:1], torch.nan)
        returned = self._telling(self.out)
        once, twice = (
            self._telling(of).to(dtype).double()
            for of in (self.in_its_tiles, partial(_out_of_rounded_sums, self._call, self._n, self._block_k))
        )
        as_once, as_twice, differ = (x.sum((-2, -1)) for x in (returned == once, returned == twice, once != twice))
        return (as_twice - as_once).double() / differ

    def coarser(self, declared: AttentionVariant | None) -> Tensor:
        """O [H, T_q, d_v] float64 as the attention declares its roundings, or else :func:`out_of_rounded_scores`."""
        if declared is None:
            return out_of_rounded_scores(self._call, self._n)
        return out_of(declared, self._call, self._n)

    @cached_property
    def _block_k(self) -> int | None:
        dtype, length = _dtype(self._call), self._call.k.shape[2]
        if dtype is None or not _reference_knows(self._call):
            return _BLOCKS[0]
        returned, found = self._telling(self.out), dict[int | None, int]()
        for block_k in (block for block in _BLOCKS if block == _BLOCKS[0] or length > (block or _BLOCKS[0])):
            of_probs = self._telling(partial(out_of_rounded_probs, self._call, self._n, block_k))
            found[block_k] = int((of_probs.to(dtype).double() == returned).sum())
            if found[block_k] > _ALL_BUT * returned.numel():
                break
        return max(found, key=found.__getitem__)

    def _telling(self, out: Tensor | Callable[[slice], Tensor]) -> Tensor:
        """Return the rows of O that tell tiles apart, [H, R, d_v]; of what returns those of a slice, too."""
        length = self.out.shape[1]
        ends = [-(-length * quarter // 4) for quarter in (1, 2, 3, 4)]
        rows = [slice(max(0, end - _TELLING), end) for end in ends] if length > 4 * _TELLING else [slice(0, length)]
        return torch.cat([out[:, some] if isinstance(out, Tensor) else out(some) for some in rows], 1)


def out_of_rounded_probs(
    call: AttentionCall, n: int, block_k: int | None = _BLOCKS[0], rows: slice | None = None
) -> Tensor:
    """Return O [H, T_q, d_v] float64 of FlashAttention-2 in which P̄ alone is rounded, to the inputs' dtype.

    Args:
        block_k: keys of a tile, of whose running maximum P̄ is, in forms that the reference knows.
        rows: of the queries alone, in such forms.
    """
    if not _reference_knows(call):
        return _out_of_rounded(call, n, None, _dtype(call))
    return out_of(AttentionVariant(probs=_rounding(call), out=UNROUNDED, block_k=block_k), call, n, rows)


def _out_of_rounded_sums(call: AttentionCall, n: int, block_k: int | None, rows: slice) -> Tensor:
    """Return the same where Ō is rounded, too, after each tile."""
    rounding = _rounding(call)
    sums = AttentionVariant(
        probs=rounding,
        out_unnormalized=rounding,
        out_unnormalized_when="per_block",
        out=UNROUNDED,
        block_k=block_k,
    )
    return out_of(sums, call, n, rows)


def out_of_rounded_scores(call: AttentionCall, n: int) -> Tensor:
    """Return O [H, T_q, d_v] float64 of FlashAttention-2 in which S, P̄ and Ō are rounded, to FP16 or else to BF16. An
    attention of FP32 tensors may hold them so."""
    if not _reference_knows(call):
        dtype = torch.bfloat16 if call.q.dtype == torch.float32 else _dtype(call)
        return _out_of_rounded(call, n, dtype, dtype)
    rounding = Rounding("nearest", 7) if call.q.dtype == torch.float32 else _rounding(call)
    coarser = AttentionVariant(scores=rounding, probs=rounding, out_unnormalized=rounding, out=UNROUNDED)
    return out_of(coarser, call, n)


def out_of(variant: AttentionVariant, call: AttentionCall, n: int, rows: slice | None = None) -> Tensor:
    """Return O [H, T_q, d_v] float64 of a variant, by this package's reference, beside the call's sink if it has one.
    In a form that the reference does not know, S, P̄ and Ō are rounded; in others some ``rows`` may be asked for."""
    if not _reference_knows(call):
        return out_of_rounded_scores(call, n)
    k, v = (x[n : n + 1].repeat_interleave(call.groups, 1) for x in (call.k, call.v))
    heads = torch.arange(k.shape[1], device=k.device)
    noise = NoiseKey(torch.zeros(2, dtype=torch.int64, device=k.device), 1, heads, k.shape[1], 1)
    form = call.form
    forward = flash_fwd if rows is None else partial(fwd_of_rows, rows=rows)
    found = forward(call.q[n : n + 1], k, v, variant, noise, form.is_causal, form.scale)[:2]
    out, logsumexp = (x[0].double() for x in found)
    return out if form.sink is None else out * torch.sigmoid(logsumexp - form.sink[:, None])[..., None]


def _reference_knows(call: AttentionCall) -> bool:
    return call.form.is_plain and call.q.shape == call.grad_out.shape and call.q.shape[2] == call.k.shape[2]


def _out_of_rounded(call: AttentionCall, n: int, of_scores: torch.dtype | None, of_probs: torch.dtype | None) -> Tensor:
    """Return O of a sequence in which S, before a cap and after a bias, and Ō are rounded to a dtype, and P̄ to one."""
    form = call.form
    exactly = torch.float64 if call.q.dtype == torch.float64 else torch.float32  # in which kernels add up
    q, k, v = (x[n].to(exactly) for x in (call.q, call.k, call.v))
    k, v = (x.repeat_interleave(call.groups, 0) for x in (k, v))
    raw = _rounded(form.scale * q @ k.mT, of_scores)
    scores = _rounded(form.scores(raw, n), of_scores)
    shift = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(exactly).min)  # a row may see no key
    probs = (scores - shift).exp()
    normalizer = probs.sum(-1, keepdim=True)
    if form.sink is not None:
        normalizer = normalizer + (form.sink.to(exactly)[:, None, None] - shift).exp()
    probs = _rounded(probs, of_probs)
    if (dropped := form.dropped(n)) is not None:  # kernels scale what is kept at last
        probs = probs * dropped.to(exactly)
    return (_rounded(probs @ v, of_scores) / normalizer.clamp_min(1e-30)).double()


def _rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype).to(x.dtype)


def _dtype(call: AttentionCall) -> torch.dtype | None:
    return call.q.dtype if call.q.dtype in (torch.bfloat16, torch.float16) else None


def _rounding(call: AttentionCall) -> Rounding:
    """Return the rounding to nearest of the inputs' dtype."""
    bits = {torch.bfloat16: 7, torch.float16: 10}.get(call.q.dtype)
    return UNROUNDED if bits is None else Rounding("nearest", bits)
