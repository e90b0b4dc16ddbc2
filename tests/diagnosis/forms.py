"""Forms of attention of each sort, and attention written out from its definition, which knows nothing of the package.

Shapes: N sequences, H heads, T_q queries, T_k keys.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.form import Form

N, H, T, SIZE = 6, 4, 64, 32


def _mask(closed_to: Callable[[Tensor, Tensor], Tensor], queries: int = T, keys: int = T) -> Tensor:
    """[1, 1, T_q, T_k], by what numbers of a query and a key say."""
    return closed_to(torch.arange(queries)[:, None], torch.arange(keys)[None])[None, None]


def _padding(left: bool) -> Tensor:
    """Each sequence lacks another number of keys at one end, [N, 1, 1, T]."""
    lacking = torch.arange(N)[:, None, None, None] * 5
    keys = torch.arange(T)
    return keys >= lacking if left else keys < T - lacking


def _alibi() -> Tensor:
    distance = (torch.arange(T)[None] - torch.arange(T)[:, None]).clamp_max(0)
    return (torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None] * distance)[None]


def _relative() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    by_distance = 2 * torch.randn(H, 2 * T - 1, generator=generator)
    return by_distance[:, torch.arange(T)[:, None] - torch.arange(T) + T - 1][None].bfloat16()


def _additive() -> Tensor:
    mask = torch.zeros(1, 1, T, T).masked_fill(~_mask(lambda query, key: key <= query), torch.finfo(torch.float32).min)
    return mask.bfloat16()


def _kept(share: float) -> Tensor:
    return torch.rand(N, H, T, T, generator=torch.Generator().manual_seed(6)) >= share


SCALE = SIZE**-0.5
SINK = torch.tensor([0.5, 2.0, -math.inf, 1.0])
FORMS: dict[str, Form] = {
    "causal": Form(True, SCALE),
    "full": Form(False, SCALE),
    "soft cap": Form(True, SCALE, softcap=5.0),
    "ALiBi": Form(True, SCALE, bias=_alibi()),
    "relative positions": Form(False, SCALE, bias=_relative()),
    "additive causal mask": Form(False, SCALE, bias=_additive()),
    "padding": Form(False, SCALE, mask=_padding(left=False)),
    "causal, padded left": Form(True, SCALE, mask=_padding(left=True)),
    "window": Form(True, SCALE, mask=_mask(lambda query, key: query - key < 24)),
    "chunks": Form(True, SCALE, mask=_mask(lambda query, key: query // 40 == key // 40)),
    "packed": Form(True, SCALE, mask=_mask(lambda query, key: (query < 53) == (key < 53))),
    "prefix": Form(False, SCALE, mask=_mask(lambda query, key: (key <= query) | (key < 20))),
    "bottom-right causal": Form(False, SCALE, mask=_mask(lambda query, key: key <= query + 16, T - 16, T)),
    "cross": Form(False, SCALE),
    "wider values": Form(True, SCALE),
    "sink": Form(True, SCALE, sink=SINK),
    "sink, window and soft cap": Form(
        True, SCALE, softcap=8.0, sink=SINK, mask=_mask(lambda query, key: query - key < 40)
    ),
    "dropout": Form(True, SCALE, dropout=0.125, kept=_kept(0.125)),
    "dropout and bias": Form(False, SCALE, bias=_relative(), dropout=0.25, kept=_kept(0.25)),
}
_LENGTHS = {"bottom-right causal": (T - 16, T), "cross": (T, T + 32)}


def inputs_of(name: str, seed: int, factor: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v and dO for a form; two heads of queries share one of keys."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = _LENGTHS.get(name, (T, T))
    width = 48 if name == "wider values" else SIZE
    shapes = ((N, H, queries, SIZE), (N, H // 2, keys, SIZE), (N, H // 2, keys, width), (N, H, queries, width))
    q, k, v, grad_out = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x.to(dtype) for x in (q * factor, k, v, grad_out)]


def call_in(name: str, seed: int = 0, factor: float = 1.0) -> AttentionCall:
    """A call without results."""
    q, k, v, grad_out = inputs_of(name, seed, factor)
    return AttentionCall(q, k, v, grad_out, FORMS[name], 1, 0, name)


def written_out(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
    """O by the definition, in the dtype of q."""
    probs = weights_of(q, k, form)[0]
    if form.kept is not None:
        probs = probs * form.kept / (1 - form.dropout)
    return torch.einsum("nhqk,nhkv->nhqv", probs, v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))


def weights_of(q: Tensor, k: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Every weight exp(S) over the sum of its row's, the sink's among them, and the logarithm of this sum."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("nhqd,nhkd->nhqk", q, k) * form.scale
    if form.softcap:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if form.bias is not None:
        bias = form.bias.to(q.dtype).expand(scores.shape)
        seen &= bias > -60_000
        scores = scores + torch.where(seen, bias, 0.0)
    if form.mask is not None:
        seen &= form.mask
    if form.is_causal:
        seen &= torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.exp() * seen
    sums = weights.sum(-1, keepdim=True)
    if form.sink is not None:
        sums = sums + form.sink.to(q.dtype)[:, None, None].exp()
    sums = torch.where(sums > 0, sums, 1.0)
    return weights / sums, sums[..., 0].log()
