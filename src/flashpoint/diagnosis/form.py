"""How the weights of an attention come from q and k: scale, soft cap, bias, masks, sink and dropout.

S = α QKᵀ, then c·tanh(S/c) with a soft cap c, then S + bias, then −∞ where a query does not see a key. P is the softmax
of a row, beside its sink. O = (P∘D) V, where D is 0 at weights that dropout dropped and 1/(1 − p) at the others.

Shapes: N sequences, H heads, T_q queries, T_k keys. Tensors have four dimensions; each of N, H and T_q can be 1, which
stands for all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashpoint.errors import counted

CLOSED = -65_504.0
"""A bias of this or less closes a pair: the least number of FP16, or −∞."""
TENSORS = ("bias", "mask", "sink", "kept")
"""Fields of :class:`Form` that are tensors, by which a file names them."""


@dataclass(frozen=True, eq=False)
class Form:
    """What an attention was told beside q, k and v.

    Attributes:
        is_causal: whether query i saw no key after key i, as PyTorch's ``is_causal`` has it.
        scale: α.
        softcap: c, nats; 0 is none.
        bias: is added to the scores [N, H, T_q, T_k], floating point, nats. What is :data:`CLOSED` or less closes.
        mask: [N, H, T_q, T_k] bool, True where a query sees a key. ``is_causal`` closes more.
        sink: the score [H] of one more key in each row's softmax, without a value, nats; −∞ for none, and None where no
            head has one.
        dropout: p, the share of weights that is dropped.
        kept: [N, H, T_q, T_k] bool, False at the weights that were dropped; None without dropout.
    """

    is_causal: bool
    scale: float
    softcap: float = 0.0
    bias: Tensor | None = None
    mask: Tensor | None = None
    sink: Tensor | None = None
    dropout: float = 0.0
    kept: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are set, by the names of their fields."""
        return {name: x for name in TENSORS if (x := getattr(self, name)) is not None}

    @property
    def is_plain(self) -> bool:
        """Whether ``is_causal`` and ``scale`` say all, save a sink."""
        return not self.softcap and not self.dropout and self.tensors.keys() <= {"sink"}

    @property
    def described(self) -> list[str]:
        """What it has beside a causal mask, each in words."""
        return [
            *([] if self.is_causal else ["without a causal mask"]),
            *([f"a soft cap of {self.softcap:g}"] if self.softcap else []),
            *([f"dropout {self.dropout:g}"] if self.dropout else []),
            *(["a bias"] if self.bias is not None else []),
            *(
                [f"a window of {counted('key', self.window)}" if self.window else "a mask"]
                if self.mask is not None
                else []
            ),
            *(["a sink"] if self.sink is not None else []),
        ]

    @property
    def window(self) -> int | None:
        """How many keys a query sees at most, its own as the last one; None where the mask says something else."""
        if self.mask is None or not self.is_causal or self.mask.shape[:2] != (1, 1):
            return None
        seen = self.mask[0, 0].tril()
        keys = int(seen[-1].sum())
        return keys if torch.equal(seen, torch.ones_like(seen).tril().triu(1 - keys)) else None

    @property
    def can_close_rows(self) -> bool:
        """Whether a query may see no key at all: ``is_causal`` leaves each the first one."""
        return self.bias is not None or self.mask is not None

    def scores(self, raw: Tensor, n: int, rows: Tensor | None = None) -> Tensor:
        """Return S [H, T_q, T_k] of a sequence as the softmax takes it, −∞ where a query does not see the key.

        Args:
            raw: α QKᵀ of these heads, which may be changed.
            rows: the queries [R] that ``raw`` [H, R, T_k] is of; None is all.
        """
        scores = self.capped(raw)
        if self.bias is not None:
            bias = _part(self.bias, n, rows)
            scores = scores + bias.to(scores.dtype)
            scores.masked_fill_(bias <= CLOSED, -math.inf)
        if self.is_causal:
            queries = torch.arange(raw.shape[-2], device=raw.device) if rows is None else rows
            later = torch.arange(raw.shape[-1], device=raw.device) > queries[:, None]
            scores.masked_fill_(later, -math.inf)
        if self.mask is not None:
            scores.masked_fill_(~_part(self.mask, n, rows), -math.inf)
        return scores

    def attn_mask(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return mask, bias and ``is_causal`` as PyTorch's attention takes them together, of the dtype of q where there
        is a bias; None where ``is_causal`` says all."""
        seen = self.mask
        if self.is_causal and self.can_close_rows:
            lower = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            seen = lower if seen is None else seen & lower
        if self.bias is None:
            return seen
        bias = self.bias.to(q.dtype)
        return bias if seen is None else bias.masked_fill(~seen, -math.inf)

    def added(self, n: int, rows: Tensor | None = None) -> Tensor | None:
        """Return the bias of a sequence [H or 1, T_q or 1, T_k] float64, or of some rows; None without one."""
        return None if self.bias is None else _part(self.bias, n, rows).double()

    def empty_rows(self, shape: Sequence[int], device: torch.device) -> Tensor | None:
        """Return the rows [N, H, T_q] that see no key; None where there can be none.

        Args:
            shape: N, H, T_q and T_k.
        """
        if not self.can_close_rows:
            return None
        sequences, heads, queries, keys = shape
        of_heads = max(x.shape[1] for x in (self.bias, self.mask) if x is not None)
        nothing = torch.zeros(of_heads, queries, keys, device=device)
        closed = [(self.scores(nothing.clone(), n) == -math.inf).all(-1) for n in range(sequences)]
        return torch.stack([one.expand(heads, -1) for one in closed])

    def capped(self, raw: Tensor) -> Tensor:
        """Return scores under the soft cap."""
        return self.softcap * torch.tanh(raw / self.softcap) if self.softcap else raw

    def cap_slope(self, raw: Tensor) -> Tensor | None:
        """Return the derivative of :meth:`capped`, J = 1 − tanh²(S/c); None where it is 1."""
        return 1 - torch.tanh(raw / self.softcap).square() if self.softcap else None

    def dropped(self, n: int, rows: Tensor | None = None) -> Tensor | None:
        """Return D [H, T_q, T_k] float64 of a sequence, or of some rows: 0 or 1/(1 − p); None where it is 1."""
        return None if self.kept is None else _part(self.kept, n, rows).double() / (1 - self.dropout)

    def of_heads(self, queries: slice) -> Form:
        """Return the form of some heads of queries."""
        return self._changed(lambda name, x: x[queries] if name == "sink" else x if x.shape[1] == 1 else x[:, queries])

    def as_one_sequence(self, some: slice, shape: Sequence[int]) -> Form:
        """Return the form of :meth:`.AttentionCall.as_one_sequence`. ``shape`` is N and H."""
        count = len(range(*some.indices(shape[0])))

        def change(name: str, x: Tensor) -> Tensor:
            if name == "sink":
                return x.repeat(count)
            if x.shape[:2] == (1, 1):
                return x
            return (x[some] if len(x) > 1 else x).expand(count, shape[1], -1, -1).flatten(0, 1)[None]

        return self._changed(change)

    def to(self, device: torch.device) -> Form:
        """Return the form with its tensors on a device."""
        return self._changed(lambda _name, x: x.to(device))

    def problem(self, shape: Sequence[int]) -> str:
        """Return what is wrong with it, for scores of a shape (N, H, T_q, T_k); empty where nothing is."""
        for name, x in self.tensors.items():
            told = f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            if not (x.is_floating_point() if name in ("bias", "sink") else x.dtype == torch.bool):
                return f"{told}; it needs {'floating point' if name in ('bias', 'sink') else 'bool'}"
            if name == "sink" and tuple(x.shape) != (shape[1],):
                return f"{told}; it needs [{shape[1]}]"
            if name != "sink" and not _stands_for(x.shape, shape):
                return f"{told}; it needs {list(shape)}, of which each of the first three can be 1"
        if bool(self.dropout) != (self.kept is not None):
            beside = "without" if self.dropout else "beside"
            return f"dropout {self.dropout:g} {beside} a tensor kept; give both or neither"
        return ""

    def _changed(self, change: Callable[[str, Tensor], Tensor]) -> Form:
        changed: dict[str, Any] = {name: change(name, x) for name, x in self.tensors.items()}
        return dataclasses.replace(self, **changed) if changed else self


def _part(x: Tensor, n: int, rows: Tensor | None = None) -> Tensor:
    """Return what [N, H, T_q, T_k] says of a sequence, and of some rows."""
    of_sequence = x[n if len(x) > 1 else 0]
    return of_sequence if rows is None or x.shape[2] == 1 else of_sequence[:, rows]


def _stands_for(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    ones = len(shape) == 4 and all(have in (1, want) for have, want in zip(shape, wanted, strict=True))
    return ones and shape[3] == wanted[3]


def joined_forms(forms: Sequence[Form], counts: Sequence[int]) -> Form:
    """Return the forms of calls that differ in their sequences alone, so many each, as one."""

    def join(name: str, x: Tensor) -> Tensor:
        parts = [getattr(form, name) for form in forms]
        if name == "sink" or (len(x) == 1 and all(torch.equal(part, x) for part in parts)):
            return x
        return torch.cat([part.expand(count, -1, -1, -1) for part, count in zip(parts, counts, strict=True)])

    return forms[0]._changed(join)
