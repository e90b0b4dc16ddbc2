"""Draws calls of attention: shapes, layouts, masks, biases, soft caps, sinks and dropout, told as users tell them.

Shapes: B sequences, H heads, H_kv heads of keys and values, T_q queries, T_k keys, d features, d_v of values.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

WAYS = ("sdpa", "interface", "named", "named@bthd")
"""PyTorch's attention, a function through Transformers' interface, and named ones of [B, H, T, d] and [B, T, H, d]."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CLOSINGS: tuple[float | str, ...] = (-math.inf, "least", -1e9, -1e4)
"""What a mask that is added has at closed pairs; the second is the least number of its dtype."""


@dataclass
class Case:
    """A call.

    Attributes:
        number: seeds all that is drawn.
        odd: what is unusual in its shapes or gradients; empty for nothing.
        layout: of q, k and v in memory.
        factor: of q, which makes scores of many nats.
        rounded: whether a function rounds scores and weights to the dtype, as eager attentions do.
        quiet: whether no gradient comes to rows that see no key, as where a loss leaves padding out.
        told: the features that its options tell.
        options: of the call, by name.
        added: float64, broadcast to [B, H, T_q, T_k]: what is added to scores, −∞ or a large number at closed pairs.
        draws: p of its dropout.
    """

    number: int
    way: str
    sequences: int
    heads: int
    heads_kv: int
    queries: int
    keys: int
    size: int
    values: int
    dtype: torch.dtype
    layout: str
    odd: str
    factor: float
    rounded: bool
    quiet: bool
    told: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    added: Tensor = field(default_factory=lambda: torch.zeros(1, 1, 1, 1, dtype=torch.float64))
    scale: float = 1.0
    softcap: float = 0.0
    sink: Tensor | None = None
    draws: float = 0.0

    def __str__(self) -> str:
        shape = (
            f"B{self.sequences} H{self.heads}/{self.heads_kv} T{self.queries}x{self.keys} d{self.size}/{self.values}"
        )
        options = {name: _short(value) for name, value in self.options.items()}
        more = f"x{self.factor:g}{' rounded' * self.rounded}{' quiet' * self.quiet} {self.odd}".strip()
        return f"{self.number}: {self.way} {shape} {self.dtype} {self.layout} {more}; {', '.join(self.told)}; {options}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the scores."""
        return self.sequences, self.heads, self.queries, self.keys

    @property
    def lone(self) -> Tensor:
        """Rows [B, H, T_q] for which each score has a large number added: what O is there nobody tells."""
        added = self.added.expand(self.shape)
        return (added <= torch.finfo(torch.float16).min).all(-1) & ~(added == -math.inf).all(-1)

    def add(self, what: Tensor) -> None:
        """Add to the scores."""
        self.added = self.added + what.double()


def drawn(number: int) -> Case:
    """Draw a call, always the same one of a number."""
    of, generator = random.Random(number), torch.Generator().manual_seed(number)
    heads = of.choice((1, 2, 3, 4, 6))
    queries, size = of.choice((1, 2, 5, 12, 17, 33, 48)), of.choice((1, 4, 8, 16, 20, 32))
    case = Case(
        number=number,
        way=WAYS[number % len(WAYS)],
        sequences=of.choice((1, 2, 3)),
        heads=heads,
        heads_kv=heads if of.random() < 0.6 else of.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        queries=queries,
        keys=queries if of.random() < 0.7 else of.choice((1, 3, 8, 19, 40)),
        size=size,
        values=size if of.random() < 0.8 else of.choice((1, 8, 24)),
        dtype=DTYPES[number // len(WAYS) % len(DTYPES)],
        layout=of.choice(("by head", "by token", "strided", "packed")),
        odd=of.choice(("3-D", "one sequence of keys", "frozen q", "frozen k", "frozen v", "frozen", "no gradients"))
        if of.random() < 0.07
        else "",
        factor=of.choice((1.0, 1.0, 3.0, 10.0)),
        rounded=of.random() < 0.3,
        quiet=of.random() < 0.5,
    )
    _tell_scale(case, of)
    {"sdpa": _tell_sdpa, "interface": _tell_interface}.get(case.way, _tell_named)(case, of, generator)
    return case


def _tell_scale(case: Case, of: random.Random) -> None:
    told = of.choice((None, None, 1.0, 0.3, 0.05))
    case.scale = case.size**-0.5 if told is None else told
    if told is not None:
        case.told.append("scale")
        case.options[{"sdpa": "scale", "interface": "scaling"}.get(case.way, "softmax_scale")] = told


def _tell_sdpa(case: Case, of: random.Random, generator: torch.Generator) -> None:
    kind = of.choice(("nothing", "causal", "bool", "bool", "added", "added"))
    if kind == "causal":
        _tell_causal(case, bottom_right=False)
        case.options["is_causal"] = True
    elif kind != "nothing":
        _tell_mask(case, "attn_mask", kind, of, generator)
    if case.heads_kv != case.heads:
        case.options["enable_gqa"] = True
    _tell_dropout(case, "dropout_p", of)


def _tell_interface(case: Case, of: random.Random, generator: torch.Generator) -> None:
    case.options["attention_mask"] = None
    kind = of.choice(("4-D", "4-D", "padding", "options", "options"))
    if kind == "4-D":
        _tell_mask(case, "attention_mask", of.choice(("bool", "added")), of, generator)
        case.options["is_causal"] = of.random() < 0.5  # the mask says all
    else:
        causal = of.random() < 0.7
        case.options["is_causal"] = causal
        bottom_right = of.random() < 0.5
        if causal:
            _tell_causal(case, bottom_right)
        if kind == "padding":
            there = _padding(case, of)[:, 0, 0]
            case.options["attention_mask"] = there if of.random() < 0.5 else there.long()
            queries = torch.nn.functional.pad(there, (max(0, case.queries - case.keys), 0), value=True)
            case.add(_closed(there[:, None, None] & queries[:, None, -case.queries :, None]))
            case.told.append("padding [B, T_k]")
            if case.queries > case.keys:  # which queries are padded is not told
                case.options["attention_mask"], case.added = None, torch.zeros(1, 1, 1, 1, dtype=torch.float64)
                case.told.remove("padding [B, T_k]")
                if causal:
                    case.told.remove("causal")
                    _tell_causal(case, bottom_right)
        if of.random() < 0.3:
            size = of.randint(1, case.keys + 2)
            case.options["sliding_window"] = size
            _tell_window(case, size - 1, 0 if causal else size - 1)
        if kind == "options" and case.queries == case.keys > 2 and of.random() < 0.4:
            _tell_documents(case, of)
    if of.random() < 0.15:
        bias = _relative(case, generator)
        case.options["position_bias"] = bias
        case.add(bias)
        case.told.append("position_bias")
    _tell_cap_and_sink(case, of, generator)
    _tell_dropout(case, "dropout", of)


def _tell_named(case: Case, of: random.Random, generator: torch.Generator) -> None:
    if of.random() < 0.5:
        _tell_causal(case, bottom_right=of.random() < 0.5)
        case.options["causal"] = True
    elif of.random() < 0.5:
        case.options["causal"] = False
    if of.random() < 0.25:
        left, right = of.choice((-1, 0, 2, 7)), of.choice((-1, 0, 2, 7))
        case.options["window_size"] = (left, right)
        _tell_window(case, left, right)
    if of.random() < 0.4:
        _tell_mask(case, of.choice(("attn_mask", "bias", "visible")), of.choice(("bool", "added")), of, generator)
    if of.random() < 0.25:
        there, hides = _padding(case, of), of.random() < 0.5
        case.options["key_padding_mask"] = (~there if hides else there)[:, 0, 0]
        case.add(_closed(there))
        case.told.append("padding that hides" if hides else "padding [B, T_k]")
    if of.random() < 0.25:
        slopes = 2.0 ** -torch.arange(1, case.heads + 1)
        case.options["alibi_slopes"] = slopes
        case.add(-slopes[:, None, None] * _ahead(case).abs())
        case.told.append("ALiBi slopes")
    _tell_cap_and_sink(case, of, generator)
    _tell_dropout(case, "dropout_p", of)


def _tell_cap_and_sink(case: Case, of: random.Random, generator: torch.Generator) -> None:
    if of.random() < 0.2:
        case.softcap = case.options["softcap"] = of.choice((2.0, 20.0, 50.0))
        case.told.append("soft cap")
    if of.random() < 0.2:
        case.sink = case.options["s_aux"] = torch.randn(case.heads, generator=generator).to(case.dtype)
        case.told.append("sink")


def _tell_dropout(case: Case, name: str, of: random.Random) -> None:
    if of.random() < 0.2:
        case.draws = case.options[name] = of.choice((0.1, 0.3, 0.5))
        case.told.append("dropout")


def _tell_causal(case: Case, bottom_right: bool) -> None:
    case.add(_closed(_ahead(case) <= (0 if bottom_right else case.queries - case.keys)))
    case.told.append("causal")


def _tell_window(case: Case, left: int, right: int) -> None:
    """As flash-attn counts it; below 0 is everything."""
    ahead = _ahead(case)
    case.add(_closed(((left < 0) | (ahead >= -left)) & ((right < 0) | (ahead <= right))))
    case.told.append("window")


def _tell_documents(case: Case, of: random.Random) -> None:
    end = of.randint(1, case.keys - 1)
    at = torch.arange(case.keys)
    if of.random() < 0.5:
        case.options["position_ids"] = torch.cat((at[:end], at[: case.keys - end]))[None]
    else:
        case.options["cu_seq_lens_q"] = torch.tensor([0, end, case.keys])
    case.add(_closed((at[:, None] < end) == (at < end)))
    case.told.append("packing")


def _tell_mask(case: Case, name: str, kind: str, of: random.Random, generator: torch.Generator) -> None:
    """Give a mask or bias that can be expanded to [B, H, T_q, T_k]."""
    pairs = of.choice(tuple(_SEEN))
    seen = _SEEN[pairs](case, of, generator)
    mask: Tensor = seen
    if kind == "added":
        bias = of.choice((None, None, "ALiBi", "relative"))
        if bias == "ALiBi":
            values = -(2.0 ** -torch.arange(1, case.heads + 1))[:, None, None] * _ahead(case).abs()[None, None]
        else:
            values = _relative(case, generator) if bias else torch.zeros(1, 1, 1, 1)
        closing = of.choice(CLOSINGS)
        lowest = torch.finfo(case.dtype).min
        least = lowest if isinstance(closing, str) else closing
        least = max(least, lowest) if math.isfinite(least) else least
        mask = values.to(case.dtype).expand(torch.broadcast_shapes(values.shape, seen.shape)).masked_fill(~seen, least)
        pairs = f"{pairs}{f' with {bias}' if bias else ''}, {closing}"
    whole = case.shape
    expanded = of.choice(("least", "least", "heads", "all", "fewer dimensions"))
    if expanded == "heads":
        mask = mask.expand(mask.shape[0], case.heads, *mask.shape[2:])
    elif expanded == "all":
        mask = mask.expand(whole)
        mask = mask.contiguous() if of.random() < 0.5 else mask
    elif expanded == "fewer dimensions" and case.way in ("sdpa", "named", "named@bthd") and mask.shape[:2] == (1, 1):
        mask = mask.expand(1, 1, *whole[2:])[0, 0]
    if case.way == "interface" or (case.way != "sdpa" and mask.dim() == 4):
        mask = mask.expand(-1, -1, -1, case.keys)
    case.options[name] = mask
    case.add(_closed(mask) if mask.dtype == torch.bool else mask)
    case.told.append(f"{name} {kind}: {pairs}")


def _closed(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)


def _ahead(case: Case) -> Tensor:
    """By how many tokens a key is ahead of a query [T_q, T_k], where the last ones stand at one place."""
    return torch.arange(case.keys) - torch.arange(case.queries)[:, None] - (case.keys - case.queries)


def _relative(case: Case, generator: torch.Generator) -> Tensor:
    """[1, H, T_q, T_k], by distance."""
    by_distance = torch.randn(case.heads, case.queries + case.keys, generator=generator)
    return by_distance[:, _ahead(case) + case.keys][None].to(case.dtype)


def _padding(case: Case, of: random.Random) -> Tensor:
    """[B, 1, 1, T_k], at one end."""
    lengths = torch.tensor([of.randint(1, case.keys) for _ in range(case.sequences)])
    there = torch.arange(case.keys) < lengths[:, None, None, None]
    return there if of.random() < 0.5 else there.flip(-1)


def _chance(case: Case, of: random.Random, generator: torch.Generator) -> Tensor:
    """[B or 1, H or 1, T_q, T_k], with rows that see no key."""
    shape = (of.choice((1, case.sequences)), of.choice((1, case.heads)), case.queries, case.keys)
    return torch.rand(shape, generator=generator) < of.choice((0.1, 0.5, 0.9))


_SEEN: dict[str, Callable[[Case, random.Random, torch.Generator], Tensor]] = {
    "all": lambda case, _of, _g: torch.ones(1, 1, case.queries, case.keys, dtype=torch.bool),
    "causal": lambda case, _of, _g: (_ahead(case) <= 0)[None, None],
    "window": lambda case, of, _g: ((_ahead(case) <= 0) & (_ahead(case) >= -of.randint(0, 8)))[None, None],
    "padding": lambda case, of, _g: _padding(case, of),
    "padding, causal": lambda case, of, _g: _padding(case, of) & (_ahead(case) <= 0),
    "chunks": lambda case, _of, _g: (torch.arange(case.queries)[:, None] // 5 == torch.arange(case.keys) // 5)[
        None, None
    ],
    "prefix": lambda case, of, _g: ((_ahead(case) <= 0) | (torch.arange(case.keys) < of.randint(1, 6)))[None, None],
    "by chance": _chance,
}


def _short(value: Any) -> Any:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else value
