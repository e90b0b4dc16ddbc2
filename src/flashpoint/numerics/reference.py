"""Attention in PyTorch with every choice of a variant: the oracle of the kernels, and a CPU's engine.

Dimensions: B sequences, H heads, T tokens, d features per head, R query rows and C keys of a block.
All arithmetic is FP32; a rounding point rounds to its format and stays in FP32. Only blocks [B, H, R, C]
are materialised, never [T, T]: R·C ≤ 128·T, or one block of queries by one of keys where ``grad_blocks`` rounds.

Equations: Dao, FlashAttention-2 (arXiv 2307.08691), Algorithms 1 and 2; the shift of Qiu & Yao
(arXiv 2510.04212), Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flashpoint.numerics.deltas import SavedForBackward, deltas_of, dtype_of_saved, residual
from flashpoint.numerics.key_blocks import Inputs, KeyBlock, exponential
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels.codes import Stream


def flash_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: AttentionVariant,
    noise: NoiseKey,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute self-attention.

    Args:
        q, k, v: [B, H, T, d] bfloat16 or float32.
        variant: every numerical choice.
        noise: source of random bits for stochastic rounding.
        causal: whether a query sees no later key; otherwise it sees all.
        scale: α; None is 1/√d.

    Returns:
        out: O [B, H, T, d], in the inputs' dtype, or float32 where O does not fit BF16.
        logsumexp: L [B, H, T] float32, of the centred scores where the variant centres keys.
        out_for_delta: the O that δ is of, where it is not the one returned; [B, H, T, d] float32, or empty. It has the
            same P̄, with Ō and O unrounded, or rounded with other random bits. With ``out_residual_bits`` what the one
            returned lacks of it, in units of :class:`~flashpoint.numerics.choices.ResidualFormat`, int8 or int16.
        centered: K − mean_T(K) in K's shape and dtype; empty unless the variant centres keys.
    """
    centered = k.new_empty(0)
    if variant.center_keys:
        k = centered = centered_keys(k)
    inputs = Inputs.of(q, k, v, variant, noise, causal, scale)
    results = [_flash_fwd_rows(inputs, rows) for rows in inputs.row_chunks()]
    out = _joined([result.out for result in results], -2)
    out_for_delta = q.new_empty(0, dtype=dtype_of_saved([variant]))
    if variant.saved_out != "none":
        out_for_delta = _joined([result.out_for_delta for result in results], -2)
        if variant.out_residual:
            out_for_delta = residual(out_for_delta, out, variant.out_residual).to(dtype_of_saved([variant]))
    logsumexp = _joined([result.logsumexp for result in results], -1)
    return out.to(torch.float32 if variant.returns_fp32 else q.dtype), logsumexp, out_for_delta, centered


def fwd_of_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: AttentionVariant,
    noise: NoiseKey,
    causal: bool,
    scale: float,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """Return O [B, H, R, d] and L [B, H, R], float32, of R queries alone, a slice of T with both ends.

    Other arguments are as for :func:`flash_fwd`. A block of the queries' scores [B, H, R, C] is materialised whole.
    """
    k = centered_keys(k) if variant.center_keys else k
    found = _flash_fwd_rows(Inputs.of(q, k, v, variant, noise, causal, scale), rows)
    return found.out, found.logsumexp


def row_statistics(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, noise: NoiseKey
) -> tuple[Tensor, Tensor]:
    """Compute what decides the rounding of a row, in an extra forward pass; arguments as for :func:`flash_fwd`.

    Returns:
        shift: the final m [B, H, T] float32, nats.
        ones: [B, H, T] int32: the P̄ that are exactly 1 as operands of P̄V, under the row's final m.
    """
    if variant.center_keys:
        k = centered_keys(k)
    inputs = Inputs.of(q, k, v, variant, noise)
    results = [_flash_fwd_rows(inputs, rows, counts_ones=True) for rows in inputs.row_chunks()]
    return _joined([result.shift for result in results], -1), _joined([result.ones for result in results], -1)


def whole_scores(q: Tensor, k: Tensor, variant: AttentionVariant, noise: NoiseKey) -> Tensor:
    """Return S [B, H, T, T] float32 as the forward pass rounds it, −∞ above the diagonal; for looking at, not for
    training."""
    inputs = Inputs.of(q, centered_keys(k) if variant.center_keys else k, k, variant, noise)
    every = slice(0, q.shape[-2])
    return inputs.scores(KeyBlock(every, every, 0))


def flash_bwd(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_for_delta: Tensor,
    centered: Tensor,
    variant: AttentionVariant,
    noise: NoiseKey,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`flash_fwd`.

    Args:
        grad_out: dO [B, H, T, d], any float dtype.
        q, k, v, variant, noise, causal, scale: as given to the forward pass.
        out, logsumexp, out_for_delta, centered: as returned by it.

    Returns:
        dQ, dK, dV: [B, H, T, d] in the inputs' dtype.
    """
    inputs = Inputs.of(q, centered if variant.center_keys else k, v, variant, noise, causal, scale)
    keys_of_grad_q = centered_keys(k).float() if variant.center_grad_q else inputs.k
    grad_out = grad_out.float()
    deltas = deltas_of(SavedForBackward(inputs, grad_out, out, logsumexp, out_for_delta))
    grad_q, grad_k, grad_v, attended_keys = (_Sum(inputs.q) for _ in range(4))
    rounded = partial(inputs.round, "grad_blocks", features=True)
    for rows in inputs.row_blocks() if variant.grad_blocks.mode != "none" else inputs.row_chunks():
        of_rows = rows.start // variant.block_k if variant.block_k else 0
        for block in inputs.key_blocks(rows):
            of_keys = KeyBlock(block.keys, block.keys, of_rows)
            p, p_fp32 = inputs.probs(block, logsumexp)
            grad_v.add(block.keys, rounded(p.mT @ grad_out[..., block.rows, :], of_keys, stream=Stream.GRAD_V_BLOCKS))
            grad_p = inputs.grad_probs(block, grad_out)
            grad_s = inputs.round("grad_scores", (grad_p - deltas.of_q[..., block.rows, None]).mul_(p_fp32), block)
            grad_q.add(block.rows, rounded(grad_s @ keys_of_grad_q[..., block.keys, :], block))
            if deltas.left_of_q is not None:
                attended_keys.add(block.rows, p @ keys_of_grad_q[..., block.keys, :])
            if deltas.of_k is not deltas.of_q:
                grad_s = inputs.round("grad_scores", (grad_p - deltas.of_k[..., block.rows, None]).mul_(p_fp32), block)
            grad_k.add(
                block.keys, rounded(grad_s.mT @ inputs.q[..., block.rows, :], of_keys, stream=Stream.GRAD_K_BLOCKS)
            )
    dq, dk, dv = (total.whole for total in (grad_q, grad_k, grad_v))
    if deltas.left_of_q is not None:
        dq -= deltas.left_of_q[..., None] * attended_keys.whole
    dq, dk = dq * inputs.scale, dk * inputs.scale
    if variant.center_keys:
        dk = dk - dk.mean(-2, keepdim=True)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Sum:
    """A sum [B, H, T, d] of parts of some rows each. A part of all rows is the sum itself, as in a short sequence,
    where zeros to add to would cost as much as what is added."""

    def __init__(self, like: Tensor) -> None:
        self.whole, self._begun = like, False

    def add(self, rows: slice, part: Tensor) -> None:
        if not self._begun:
            self._begun = True
            if part.shape == self.whole.shape:
                self.whole = part
                return
            self.whole = torch.zeros_like(self.whole)
        self.whole[..., rows, :] += part


def _joined(chunks: list[Tensor], dim: int) -> Tensor:
    """Return the chunks of rows as one tensor; one alone is not copied."""
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)


def block_shift(scores: Tensor, variant: AttentionVariant) -> Tensor:
    """Return the m that one block of keys asks for; the running m is the largest so far.

    Args:
        scores: [..., C] float32 as rounded, −inf where masked.

    Returns:
        [...] float32; −inf for a row that is masked whole.
    """
    row_max = scores.amax(-1)
    if variant.shift == "rowmax":
        return row_max
    if variant.shift == "offset":
        return row_max + variant.shift_offset
    maxima = (scores >= row_max.unsqueeze(-1) - variant.tie_tolerance).sum(-1)
    tied = (maxima > 1) & row_max.isfinite()
    shift = torch.where(tied & (row_max > 0), variant.beta * row_max, row_max)
    shift = torch.where(tied & (row_max < 0), variant.gamma * row_max if variant.gamma else 0.0, shift)
    return shift if variant.max_shift is None else torch.minimum(shift, row_max + variant.max_shift)


@dataclass(frozen=True)
class _RowResults:
    """One chunk of rows of the forward pass."""

    out: Tensor  # O [B, H, R, d]
    out_for_delta: Tensor  # of the unrounded Ō, or of other random bits; O where the variant saves none
    logsumexp: Tensor  # L [B, H, R]
    shift: Tensor  # m
    ones: Tensor  # P̄ equal to 1 as operands under the final m, int32; 0 where they are not counted


class _OnlineSoftmax:
    """m, ℓ and Ō of one chunk of rows over the blocks of keys so far.

    The first block, of which every row sees a key, makes them. Each later one rescales them, and zeros rescaled would
    cost a short sequence as much as its one block.
    """

    shift: Tensor  # m
    normalizer: Tensor  # ℓ
    exact: Tensor  # Ō, unrounded
    ones: Tensor

    def __init__(self, inputs: Inputs, rows: slice, counts_ones: bool) -> None:
        self._inputs, self._rows, self._counts_ones = inputs, rows, counts_ones
        self.draws: dict[Stream, Stream] = {Stream.OUT_UNNORMALIZED: Stream.OUT}
        """Random bits of Ō and of O."""
        if inputs.variant.saved_out == "redrawn":
            self.draws[Stream.OUT_UNNORMALIZED_FOR_DELTA] = Stream.OUT_FOR_DELTA
        self.rounded: dict[Stream, Tensor] = {}
        """Ō, where every block rounds it."""

    def add(self, block: KeyBlock) -> None:
        inputs, variant = self._inputs, self._inputs.variant
        s = inputs.scores(block)
        new_shift = block_shift(s, variant)
        if block.number:
            new_shift = torch.maximum(self.shift[..., self._live(block)], new_shift)
        p_fp32 = exponential(s, new_shift[..., None])
        mass = p_fp32.sum(-1)
        before_product = variant.normalizer == "before_product"
        p = inputs.round("probs", p_fp32 / mass[..., None] if before_product else p_fp32, block)
        if variant.normalizer == "rounded":
            mass = p.sum(-1)
        ones = (p == 1).sum(-1, dtype=torch.int32) if self._counts_ones else torch.zeros_like(mass, dtype=torch.int32)
        mass, product = mass.clamp(min=variant.denominator_floor), p @ inputs.v[..., block.keys, :]
        if block.number:
            self._rescale_and_add(block, new_shift, mass, product, ones)
            return
        self.shift, self.normalizer, self.exact, self.ones = new_shift, mass, product, ones
        if variant.out_unnormalized_when != "final":
            rounded = {stream: self._round(product, block, stream) for stream in self.draws}
            self.rounded = {stream: x.clone() if x is product else x for stream, x in rounded.items()}

    def _rescale_and_add(self, block: KeyBlock, shift: Tensor, mass: Tensor, product: Tensor, ones: Tensor) -> None:
        live, per_product = self._live(block), self._inputs.variant.out_unnormalized_when == "per_product"
        self.ones[..., live] = torch.where(shift > self.shift[..., live], 0, self.ones[..., live]) + ones
        rescale = exponential(self.shift[..., live, None], shift[..., None])
        self.shift[..., live] = shift
        self.normalizer[..., live] = self.normalizer[..., live] * rescale[..., 0] + mass
        self.exact[..., live, :] = self.exact[..., live, :] * rescale + product
        for stream, total in self.rounded.items():
            rescaled = total[..., live, :] * rescale
            added = self._round(product if per_product else rescaled + product, block, stream)
            total[..., live, :] = rescaled + added if per_product else added

    def _live(self, block: KeyBlock) -> slice:
        """Return the rows of the chunk that see a key of the block."""
        return slice(block.rows.start - self._rows.start, None)

    def _round(self, x: Tensor, block: KeyBlock, stream: Stream) -> Tensor:
        return self._inputs.round("out_unnormalized", x, block, features=True, stream=stream)


def _flash_fwd_rows(inputs: Inputs, rows: slice, *, counts_ones: bool = False) -> _RowResults:
    variant, softmax = inputs.variant, _OnlineSoftmax(inputs, rows, counts_ones)
    block = KeyBlock(rows, rows, 0)
    for block in inputs.key_blocks(rows):
        softmax.add(block)
    shift, normalizer, exact, rounded = softmax.shift, softmax.normalizer, softmax.exact, softmax.rounded
    if variant.masked_blocks == "count" and inputs.causal:
        rescale = _count_masked_blocks(inputs, rows, shift, normalizer, softmax.ones)
        for total in (exact, *rounded.values()):
            total.mul_(rescale)
    last = KeyBlock(rows, block.keys, 0)
    if variant.out_unnormalized_when == "final":
        for stream in softmax.draws:
            rounded[stream] = inputs.round("out_unnormalized", exact, last, features=True, stream=stream)
    denominator = inputs.round("denominator", normalizer[..., None], last, features=True)
    logsumexp = shift + denominator[..., 0].log()
    unrounded, divisor = normalizer[..., None], denominator
    if variant.out_divisor == "unrounded_in_first_block":
        in_first = torch.arange(rows.start, rows.stop, device=exact.device)[:, None] < (
            variant.block_k or inputs.q.shape[-2]
        )
        divisor = torch.where(in_first, unrounded, denominator)
    if variant.normalizer == "before_product":  # P̄ has been divided
        unrounded = divisor = torch.ones_like(denominator)
    outs = [
        inputs.round("out", rounded[of_sum] / divisor, last, features=True, stream=of_out)
        for of_sum, of_out in softmax.draws.items()
    ]
    out_for_delta = exact / unrounded if variant.saved_out == "unrounded" else outs[-1]
    return _RowResults(outs[0], out_for_delta, logsumexp, shift, softmax.ones)


def _count_masked_blocks(inputs: Inputs, rows: slice, shift: Tensor, normalizer: Tensor, ones: Tensor) -> Tensor:
    """Count the blocks of keys after each query into m, ℓ and the P̄ that are 1, in place.

    Returns:
        The factor [B, H, R, 1] float32 by which Ō shrinks.
    """
    variant, length = inputs.variant, inputs.q.shape[-2]
    block = variant.block_k or length
    first_masked = torch.arange(rows.start, rows.stop, device=shift.device) // block + 1
    factor = torch.ones_like(shift)
    for number in range(-(-length // block)):
        masked = first_masked <= number
        new_shift = shift.clamp(min=0) if variant.shift == "dynamic_max" else shift
        rescale = torch.where(masked, exponential(shift, new_shift), 1.0)
        ones.masked_fill_(masked & (new_shift > shift), 0)
        shift.copy_(torch.where(masked, new_shift, shift))
        normalizer.mul_(rescale).add_(torch.where(masked, variant.denominator_floor, 0.0))
        factor *= rescale
    return factor[..., None]


def centered_keys(k: Tensor) -> Tensor:
    """Return K − mean_T(K) of K [B, H, T, d], in its dtype."""
    return (k.float() - k.float().mean(-2, keepdim=True)).to(k.dtype)
