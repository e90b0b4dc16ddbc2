"""What roundings inside an attention make of its results, and whether these show one.

O is as FlashAttention's roundings alone make it: by this package's reference, or from FP64's scores. The reference
knows causal and full self-attention. In other forms S, P̄ and Ō of FP64 are rounded, in one tile.

An error of O, of δ or of dQ has a slope on what a rounding makes of it: 1 where the rounding is there, 0 where not.

Shapes: :mod:`flashpoint.diagnosis.call`; R rows of a sequence that are asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from flashpoint.diagnosis import measure_table as table
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.exact import Exact
from flashpoint.diagnosis.measures import Measures
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
_LEAST_LEFT = 1e-12
"""Share of the square sum of a term, of which the other terms leave more if it is not made of them: FP64 leaves 1e-20
of one that is."""
_ROWS = 512
"""Rows of a sequence, about as many, of which it is asked whether S or L is rounded."""
_UNKNOWNS = 3
"""Of the first regression in :func:`of_delta`: two slopes and a constant. As many rows fit whatever they hold."""


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

    @property
    def as_cut_off(self) -> Tensor:
        """Of the elements of O whose rounding to its dtype and cutting off differ: the share that is as cut off less
        the share that is as rounded [H] float64; NaN of a head without such elements.

        Of a rounded O it is below 0: the reference is nearer to the numbers that round as it does.
        """
        near, cut = (held_in(self.in_its_tiles, self.dtype, cut) for cut in (False, True))
        differ = near != cut
        as_near, as_cut = ((differ & (self.out == one)).sum((-2, -1)) for one in (near, cut))
        return (as_cut - as_near).double() / differ.sum((-2, -1))

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


def _without(x: Tensor, other: Tensor) -> Tensor:
    """Return x [H, n] without its part along other [H, n]."""
    return Beside([other]).less(x)


class Beside:
    """Terms [H, n], orthogonal to each other, beside which an error is told.

    Attributes:
        leverage: of each number [H, n], the sum of the terms' squares, each as a unit vector.
    """

    def __init__(self, terms: Sequence[Tensor]) -> None:
        self._units = [term / term.norm(dim=-1, keepdim=True).clamp_min(1e-300) for term in terms]
        self.count = len(terms)

    @cached_property
    def leverage(self) -> Tensor:
        return sum((unit.square() for unit in self._units[1:]), self._units[0].square())

    def less(self, x: Tensor) -> Tensor:
        """Return x [H, n] without its parts along the terms."""
        for unit in self._units:
            x = x - (x * unit).sum(-1, keepdim=True) * unit
        return x


def _slope(error: Tensor, made: Tensor, beside: Beside | None = None) -> Tensor:
    """Return the slope [H] of an error on what a rounding makes [H, n], beside other terms; NaN where these make up the
    whole of it."""
    return _slope_of(error, made, made if beside is None else beside.less(made))


def _slope_of(error: Tensor, made: Tensor, left: Tensor) -> Tensor:
    """Return :func:`_slope`, given what is left of ``made`` beside the terms."""
    size = left.square().sum(-1)
    tells = size > _LEAST_LEFT * made.square().sum(-1)
    return torch.where(tells, (left * error).sum(-1) / size, torch.nan)


def _slope_by_rows(error: Tensor, rest: Tensor, made: Tensor, beside: Beside) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`_slope`, its standard error over rows, and how many rows of one size tell it, less the terms.
    ``rest`` is the error less the terms.

    What holding a number in few bits makes is as if drawn at random in each row: rows tell by themselves, however much
    alike their errors are. The standard error is HC3, which holds where rows err unequally.
    """
    left = beside.less(made)
    squares = left.square()
    size = squares.sum(-1, keepdim=True)
    slope = _slope_of(error, made, left)
    leverage = beside.leverage + squares / size.clamp_min(1e-300)
    rest = (rest - slope[..., None] * left) / (1 - leverage).clamp_min(1e-9)
    spread = (squares * rest.square()).sum(-1).sqrt() / size[..., 0].clamp_min(1e-300)
    return slope, spread, size[..., 0].square() / squares.square().sum(-1).clamp_min(1e-300) - beside.count - 1


def of_few_bit_scores(call: AttentionCall, found: Tensor, true: Exact, n: int) -> Measures:
    """Return whether O [H, T, d_v] of a sequence is as of scores of few bits, a slope [H] for each of
    :data:`.measure_table.OF_SCORES`: held in the inputs' 16 bits, or BF16 beside inputs of FP32."""
    form, dtype = call.form, torch.bfloat16 if call.q.dtype == torch.float32 else call.q.dtype
    rows = torch.arange(0, true.q.shape[1], -(-true.q.shape[1] // _ROWS), device=found.device)
    raw, dropped = true.raw[:, rows], form.dropped(n, rows)
    error = (found - true.out)[:, rows].flatten(-2)
    slopes: Measures = {}
    exactly = math.frexp(form.scale)[0] == 0.5  # then it is the same before and after the scale
    for (before, after, in_a_nat), one in table.OF_SCORES.items():
        if before and exactly:
            slopes[one.name] = next(iter(slopes.values()))
            continue
        held = held_in(raw / form.scale, dtype, cut=False) * form.scale if before else raw
        held = held_in(held * in_a_nat, dtype, cut=False) / in_a_nat if after else held
        scores = form.scores(held.clone(), n, rows)
        if after and form.bias is not None:
            scores = held_in(scores * in_a_nat, dtype, cut=False) / in_a_nat
        probs = scores.softmax(-1).nan_to_num(0.0)  # a row may see no key
        if form.sink is not None:
            probs = probs * torch.sigmoid(scores.logsumexp(-1) - form.sink[:, None])[..., None]
        out = (probs if dropped is None else probs * dropped) @ true.v
        slopes[one.name] = _slope(error, (out - true.out[:, rows]).flatten(-2))
    return slopes


def of_logsumexp(found: Tensor, true: Exact) -> Measures:
    """Return whether dQ [H, T, d] is as of an L of few bits, a slope [H] of each of :data:`.measure_table.OF_L`.

    P = exp(S - L) has a factor in each row then, and so has dQ. Scores of few bits make such a factor, too, in a row
    with nearly one key: what they make is left out, and rows are compared across PK, where an error of δ moves nothing.
    """
    some = slice(None, None, -(-true.q.shape[1] // _ROWS))
    scores, grad_q, pk = true.scores[:, some], true.grad_q[:, some], true.attended_keys[:, some]
    unit = pk / pk.norm(dim=-1, keepdim=True).clamp_min(1e-300)

    def across(x: Tensor) -> Tensor:
        return (x - (x * unit).sum(-1, keepdim=True) * unit).flatten(-2)

    error, whole = across(found[:, some] - grad_q), across(grad_q)
    others = [whole]
    for dtype in (torch.bfloat16, torch.float16):
        of_scores = _without(across(_by_scores(true, some, dtype)), whole)
        others.append(of_scores if len(others) == 1 else _without(of_scores, others[1]))
    logsumexp = scores.logsumexp(-1) - true.mass[:, some].log()
    slopes, beside = {}, Beside(others)
    for (of_l, in_a_nat), one in table.OF_L.items():
        held = (logsumexp * in_a_nat).to(getattr(torch, of_l)).double() / in_a_nat
        lost = (logsumexp - held).nan_to_num(0.0, 0.0, 0.0)
        made = (whole.unflatten(-1, grad_q.shape[1:]) * torch.expm1(lost)[..., None]).flatten(-2)
        slopes[one.name] = _slope(error, made, beside)
    return slopes


def _by_scores(true: Exact, some: slice, dtype: torch.dtype) -> Tensor:
    """Return what rounding S to a dtype makes of some rows of dQ [H, R, d], to first order."""
    scores, probs, grad_scores = true.scores[:, some], true.probs[:, some], true.grad_scores[:, some]
    changed = (scores.to(dtype).double() - scores).nan_to_num(0.0, 0.0, 0.0).exp()
    changed = changed / ((probs * changed).sum(-1, keepdim=True) + 1 - true.mass[:, some, None]) - 1
    moved = (true.grad_out[:, some] * ((true.weights[:, some] * changed) @ true.v)).sum(-1, keepdim=True)
    return true.scale * ((changed * grad_scores - (1 + changed) * true.slopes[:, some] * moved) @ true.k)


def of_delta(rounded: RoundedOut, error: Tensor, noise: Tensor, true: Exact) -> Measures:
    """Return whether δ takes the rounding of O, is held in few bits itself, or has a factor, [H] each.

    Args:
        rounded: of O as the attention returned it.
        error: of δ [H, T] float64.
        noise: what roundings by 1 add to each ``error``; infinite for rows of which it does not tell.
    """
    out, of_probs = rounded.out, rounded.in_its_tiles
    deltas = {of: (true.grad_out * x).sum(-1) for of, x in (("out", out), ("probs", of_probs), ("", true.out))}
    of_out, others = deltas["out"] - deltas["probs"], deltas["probs"] - deltas[""]
    # The reference may round P̄ otherwise than the attention does, as tiles have other maxima: that is noise, too.
    weights = (noise.square() + true.squared_grads).rsqrt()
    rows = (true.bound > 0) & noise.isfinite() & torch.stack([of_out, others, error, weights]).isfinite().all(0)

    def weighted(of: Tensor) -> Tensor:
        return (of * weights).where(rows, 0.0)

    x, y, unit, exactly = (weighted(of) for of in (of_out, error, true.bound, deltas[""]))
    other = _without(weighted(others), unit)  # a constant error follows neither
    tells, bound = rows.sum(-1) > _UNKNOWNS, true.bound.where(rows, 0.0).square().sum(-1)
    constant = Beside([unit, other])
    terms = [unit, other, constant.less(x)]
    beside = Beside(terms)
    measured = {
        table.FOLLOWS_OUT.name: _slope(y, x, constant).where(tells, torch.nan),
        table.DELTA_ROUNDING.name: (of_out.where(rows, 0.0).square().sum(-1) / bound.clamp_min(1e-300)).sqrt(),
        table.DELTA_FACTOR.name: _slope(y, exactly, beside).where(rows.sum(-1) > beside.count + 1, torch.nan),
    }
    beside = Beside([*terms, beside.less(exactly)])
    rest = beside.less(y)
    fewest = rows.sum(-1).double()
    for (of, dtype, cut), row in table.OF_DELTA.items():
        made = weighted(held_in(deltas[of], getattr(torch, dtype), cut) - deltas[of])
        slope, spread, count = _slope_by_rows(y, rest, made, beside)
        fewest = torch.minimum(fewest, count)
        enough = ~slope.isnan() & (rows.sum(-1) > beside.count + 1)
        measured[row.name] = slope.where(enough, torch.nan)
        measured[table.OF_DELTA_SPREAD[of, dtype, cut].name] = spread.where(enough, torch.nan)
    return {**measured, table.OF_DELTA_ROWS.name: fewest}


def held_in(x: Tensor, dtype: torch.dtype, cut: bool) -> Tensor:
    """Return x float64 as a dtype holds it: the nearest of its numbers, or the next one towards 0 in 16 bits."""
    near = x.to(dtype)
    if cut and near.element_size() == 2:  # the numbers of a sign are in the order of their bits
        near = torch.where(near.double().abs() > x.abs(), (near.view(torch.int16) - 1).view(dtype), near)
    return near.double()
