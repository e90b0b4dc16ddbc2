"""What compiled graphs call a variant, and the graph that models of one process share.

A compiled graph holds a word for the variant, which :func:`named` takes back to it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from flashpoint.numerics.layout import by_token, constant_where_traced
from flashpoint.numerics.passes import saved_like
from flashpoint.numerics.variant import AttentionVariant, variant_from_key

_KEYS: dict[str, str] = {}
"""Of variants by their name in graphs. A name keeps its meaning for as long as a graph can have it."""
_SHARED = "shared: "
"""What the names begin with in graphs that models share."""
STAND_IN = torch.int8
"""The dtype of what ``flash_fixed`` saves for δ: it and the variants that save nothing share a graph."""


def forget_graphs() -> None:
    """Drop the compiled graphs of this process, and the names in them: runs of one process share them in turn.

    Not between a forward pass and its backward pass, which takes the name from the forward pass.
    """
    global _shared  # noqa: PLW0603 - as PyTorch's graphs are the process's
    torch.compiler.reset()
    _KEYS.clear()
    _shared = None


_SHARES_GRAPHS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
"""Whether :func:`compiled` works: earlier releases of PyTorch are not tried with it."""


@dataclass(eq=False)
class _Graph:
    """The graph that models of one process take in turn."""

    traced_from: Hashable
    """What it was traced from, but for the variant; None of a graph that one model alone takes."""
    name: str
    """What it calls the variant."""
    compilations: int = 0
    is_called: bool = False
    """Whether a model is: what compiles later, and what is exported, has names of its own."""


_shared: _Graph | None = None


def compiled(model: nn.Module, variant: AttentionVariant, traced_from: Hashable) -> Callable[..., Any]:
    """Return what calls the model compiled, as one graph.

    It takes the graph of the model before it in this process where the two differ in nothing but the variant: the
    second one then compiles nothing. Each takes its own variant, also where they are called in turn.

    Args:
        variant: of the model, whose modules have it as ``variant``.
        traced_from: what else the graph follows from, of the model and of its calls. None where others than this
            package's kernels compute it: their graph is another for each variant.
    """
    global _shared  # noqa: PLW0603
    key = variant.key
    form = _form_of_results(key, shared=True)
    whole_of = None if traced_from is None or not _SHARES_GRAPHS else (form, traced_from)
    # One that had to compile anew differs in more: PyTorch compiles a function so many times only.
    if _shared is None or whole_of is None or _shared.traced_from != whole_of or _shared.compilations > 1:
        forget_graphs()
        _shared = _Graph(whole_of, graph_name(key) if whole_of is None else _SHARED + form)
    graph = _shared

    def kept(guards: Sequence[Any]) -> list[bool]:
        graph.compilations += 1
        return ["variant" not in guard.name for guard in guards]

    whole = torch.compile(model, fullgraph=True, options={"guard_filter_fn": kept} if whole_of else None)

    def call(*arguments: Any) -> Any:
        global _shared
        if _shared is not graph:  # PyTorch would take the graph that there is now: no guard looks at the variant
            forget_graphs()
            _shared, graph.compilations = graph, 0
        _KEYS[graph.name], graph.is_called = key, True
        try:
            return whole(*arguments)
        finally:
            graph.is_called = False

    return call


def graph_name(key: str) -> str:
    """Return what the ops are to call a variant in place of its key.

    A compiled graph holds this word, and a compiler keeps graphs from process to process. The first variant of a
    process whose results have some form is called after that form, whatever the variant: one compilation serves all.
    A second one has another number.
    """
    names = (f"{number}: {_form_of_results(key)}" for number in itertools.count(1))
    return next(name for name in names if _KEYS.setdefault(name, key) == key)


@lru_cache(maxsize=256)
def _form_of_results(key: str, shared: bool = False) -> str:
    """Return what decides the dtypes of the forward pass's results, and which are empty, in every layer.

    Args:
        shared: of the op's results in a graph that models share.
    """
    variant = variant_from_key(key)
    if variant.elsewhere is None:
        like = torch.empty(1, 1, 1, 16, dtype=torch.bfloat16, device="meta")
        results = op_results_like(like, variant, _SHARED if shared else "", layer=1)
        return ", ".join(str(result.dtype).removeprefix("torch.") if result.numel() else "none" for result in results)
    both = (dataclasses.replace(variant, elsewhere=None, layers=None, heads=None), variant.elsewhere)
    forms = dict.fromkeys(_form_of_results(one.key, shared) for one in both)
    where = f" by layers {variant.layers} and heads {variant.heads}" if len(forms) > 1 else ""
    return " or ".join(forms) + where


_is_exporting = getattr(torch.compiler, "is_exporting", lambda: True)
"""PyTorch 2.6 does not tell. There every graph has a variant's key: it is right in an export, too."""


@constant_where_traced  # Dynamo calls it: traced, PyTorch 2.11 takes every compilation for an export
def name_for_op(key: str) -> str:
    """Return what a call hands to the ops for a variant's key."""
    # A program that is exported runs where no variant has a graph's name, or another one.
    return key if _is_exporting() else graph_name(key)


@constant_where_traced
def name_for_output(key: str) -> str:
    """Return :func:`name_for_op` of a call that takes nothing but O: of the graph that models share, if this is it."""
    name = _shared.name if _shared and _shared.is_called else ""
    return name if name.startswith(_SHARED) and _KEYS.get(name) == key else name_for_op(key)


def named(word: str) -> AttentionVariant:
    """Return the variant of a key, or of a name in graphs."""
    return variant_from_key(_KEYS.get(word, word))


def has_stand_in(word: str, choices: AttentionVariant, layer: int, q: Tensor) -> bool:
    """Whether the third result of the forward op is one that nobody reads."""
    return word.startswith(_SHARED) and all(group.saved_out == "none" for group, _ in choices.groups(layer, q.shape[1]))


def op_results_like(
    q: Tensor, choices: AttentionVariant, word: str, layer: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return uninitialised results of the forward op, called with a word for the variant."""
    out, logsumexp, saved, centered = saved_like(q, choices, layer)
    stand_in = has_stand_in(word, choices, layer, q)
    return out, logsumexp, by_token(q, STAND_IN) if stand_in else saved, centered
