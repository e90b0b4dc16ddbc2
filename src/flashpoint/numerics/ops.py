"""The forward and the backward pass as ``torch.library`` ops: on a GPU by the kernels, else by the reference.

The ops keep ``torch.compile`` from tracing into the reference, where its fusions would drop rounding points
(an FP32 → BF16 → FP32 cast pair counts as removable there).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flashpoint.errors import notify
from flashpoint.numerics import reference
from flashpoint.numerics.deltas import dtype_of_saved
from flashpoint.numerics.layout import Form, Saved, by_token
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant, variant_from_key

TRITON = 3, 6
"""The oldest release of Triton that the kernels compile with."""


def op(name: str) -> Callable[[Callable[..., Any]], torch._ops.OpOverload[..., Any]]:
    """Make a function an op of this package. ``custom_op`` would add 20 µs of the host to every call of it."""

    def made(implementation: Callable[..., Any]) -> torch._ops.OpOverload[..., Any]:
        def untraced(*arguments: Any) -> Any:
            if "torch._dynamo" in sys.modules:  # which would compile what an op calls, where a graph breaks at it
                return _disabled(implementation)(*arguments)
            return implementation(*arguments)

        schema = torch.library.infer_schema(implementation, mutates_args=())
        torch.library.define(f"flashpoint::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"flashpoint::{name}", "default", untraced)
        made: torch._ops.OpOverload[..., Any] = getattr(torch.ops.flashpoint, name).default
        return made

    return made


@lru_cache
def _disabled(implementation: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(implementation)
    return disabled


@op("flash_fwd")
def flash_fwd_op(
    q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor, variant: str, layer: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return O, L, what δ takes beside O and centred keys (:mod:`flashpoint.numerics.reference`) of all heads.

    It takes a variant's key, or its :func:`graph_name`. By the name of a graph that models share, the third is never
    empty. It is uninitialised where the variant saves nothing there: compilers keep a graph for tensors of one size.
    """
    choices = _named(variant)
    out, logsumexp, saved, centered = passes_of(q, choices, layer, causal, scale).forward(q, k, v, seed_and_step)
    if _has_stand_in(variant, choices, layer, q):
        saved = by_token(q, _STAND_IN)
    return out, logsumexp, saved, q.new_empty(0) if centered is None else centered


@op("flash_bwd")
def flash_bwd_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    out_for_delta: Tensor,
    centered: Tensor,
    seed_and_step: Tensor,
    variant: str,
    layer: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV of :func:`flash_fwd_op`."""
    choices = _named(variant)
    if _has_stand_in(variant, choices, layer, q):
        out_for_delta = q.new_empty(0, dtype=dtype_of_saved([]))
    saved = out, logsumexp, out_for_delta, centered if centered.numel() else None
    return passes_of(q, choices, layer, causal, scale).backward(grad_out, q, k, v, saved, seed_and_step)


class Passes(Protocol):
    """The forward and the backward pass of a layer on tensors of one form."""

    call: tuple[AttentionVariant, int, bool, float]
    """The variant, the layer from 1, whether it is causal, and α."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor) -> Saved:
        """Return what :func:`flash_fwd_op` does; None in place of centred keys where none are."""

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Saved, seed_and_step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK and dV; ``saved`` is what ``forward`` returned."""


def passes_of(q: Tensor | Form, choices: AttentionVariant, layer: int, causal: bool, scale: float) -> Passes:
    """Return the passes of tensors like q [B, H, T, d]: by the kernels, where they support every variant of the layer
    on this device, else by the reference."""
    return _passes_of(choices, layer, causal, scale, q.dtype, q.shape, q.device)


@lru_cache(maxsize=1024)
def _passes_of(
    choices: AttentionVariant, layer: int, causal: bool, scale: float, dtype: torch.dtype, shape: torch.Size,
    device: torch.device,
) -> Passes:  # fmt: skip
    if kernels := _kernels_for(device.type, dtype, shape[-1], shape[1], choices, layer):
        passes: Passes = kernels.Passes(choices, layer, causal, scale, shape, device)
        return passes
    return _ByReference(choices, layer, causal, scale)


class _ByReference:
    def __init__(self, choices: AttentionVariant, layer: int, causal: bool, scale: float) -> None:
        self.call = choices, layer, causal, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor) -> Saved:
        choices, layer, causal, scale = self.call
        saved = _saved_like(q, choices, layer)

        def compute(share: slice) -> None:
            q_, k_, v_, *saved_ = _share_of(share, q, k, v, *saved)
            for group, heads in choices.groups(layer, q.shape[1]):
                noise, at = noise_key(q_, seed_and_step, layer, heads), index_of(heads, q)
                parts = reference.flash_fwd(q_[:, at], k_[:, at], v_[:, at], group, noise, causal, scale)
                for whole, part in zip(saved_, parts, strict=True):
                    if part.numel():
                        whole[:, at] = part.to(whole.dtype)

        _in_shares(compute, q, choices)
        return saved

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: Saved, seed_and_step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        choices, layer, causal, scale = self.call
        grads = by_token(q, q.dtype), by_token(k, k.dtype), by_token(v, v.dtype)
        whole_of = [q.new_empty(0) if x is None else x for x in (grad_out, q, k, v, *saved)]

        def compute(share: slice) -> None:
            inputs, results = _share_of(share, *whole_of), _share_of(share, *grads)
            for group, heads in choices.groups(layer, q.shape[1]):
                noise, at = noise_key(inputs[1], seed_and_step, layer, heads), index_of(heads, q)
                g, q_, k_, v_, o, lse, o_delta, keys = (x[:, at] if x.numel() else x for x in inputs)
                parts = reference.flash_bwd(g, q_, k_, v_, o, lse, o_delta, keys, group, noise, causal, scale)
                for whole, part in zip(results, parts, strict=True):
                    whole[:, at] = part

        _in_shares(compute, q, choices)
        return grads


_SMALL = 1 << 15
"""Elements of q up to which PyTorch, too, leaves the work to one thread."""


def _in_shares(compute: Callable[[slice], None], q: Tensor, variant: AttentionVariant) -> None:
    """Compute the reference of all sequences: on a CPU each thread takes a share of them, through all its small
    operations. PyTorch's threads would meet after every one of these, and wait for each other as long as they work.

    Sequences have nothing to do with each other, so shares change no bit. Random bits are drawn for a whole batch.

    Args:
        compute: of a slice of B, in a thread of its own.
        q: [B, H, T, d].
    """
    threads = torch.get_num_threads()
    count = 1 if q.is_cuda or variant.draws or q.numel() <= _SMALL else min(threads, q.shape[0])
    size = max(1, -(-q.shape[0] // count))
    first, *others = (slice(start, start + size) for start in range(0, max(1, q.shape[0]), size))

    def alone(share: slice) -> None:
        torch.set_num_threads(1)  # of the thread that calls it
        with torch.no_grad():
            compute(share)

    with torch.autocast(q.device.type, enabled=False):
        if not others:
            compute(first)
            return
        try:
            waiting = [_helpers(os.getpid(), threads - 1).submit(alone, share) for share in others]
            alone(first)
            for one in waiting:
                one.result()
        finally:
            torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def _helpers(process: int, threads: int) -> ThreadPoolExecutor:  # a process that was forked has none of its parent's
    return ThreadPoolExecutor(threads, thread_name_prefix="flashpoint")


def _share_of(share: slice, *tensors: Tensor) -> list[Tensor]:
    """Return the sequences of a share, of tensors [B, …] or empty ones."""
    return [x[share] if x.numel() else x for x in tensors]


_KEYS: dict[str, str] = {}
"""Of variants by their name in graphs. A name keeps its meaning for as long as a graph can have it."""
_SHARED = "shared: "
"""What the names begin with in graphs that models share."""
_STAND_IN = torch.int8
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

    of: Hashable
    """What it was traced from, but for the variant; None of a graph that one model alone takes."""
    name: str
    """What it calls the variant."""
    compilations: int = 0
    is_called: bool = False
    """Whether a model is: what compiles later, and what is exported, has names of its own."""


_shared: _Graph | None = None


def compiled(model: nn.Module, variant: AttentionVariant, of: Hashable) -> Callable[..., Any]:
    """Return what calls the model compiled, as one graph.

    It takes the graph of the model before it in this process where the two differ in nothing but the variant: the
    second one then compiles nothing. Each takes its own variant, also where they are called in turn.

    Args:
        variant: of the model, whose modules have it as ``variant``.
        of: what else the graph follows from, of the model and of its calls. None where others than this package's
            kernels compute it: their graph is another for each variant.
    """
    global _shared  # noqa: PLW0603
    key = variant.key
    form = _form_of_results(key, shared=True)
    whole_of = None if of is None or not _SHARES_GRAPHS else (form, of)
    # One that had to compile anew differs in more: PyTorch compiles a function so many times only.
    if _shared is None or whole_of is None or _shared.of != whole_of or _shared.compilations > 1:
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
        results = _op_results_like(like, variant, _SHARED if shared else "", layer=1)
        return ", ".join(str(result.dtype).removeprefix("torch.") if result.numel() else "none" for result in results)
    both = (dataclasses.replace(variant, elsewhere=None, layers=None, heads=None), variant.elsewhere)
    forms = dict.fromkeys(_form_of_results(one.key, shared) for one in both)
    where = f" by layers {variant.layers} and heads {variant.heads}" if len(forms) > 1 else ""
    return " or ".join(forms) + where


_is_exporting = getattr(torch.compiler, "is_exporting", lambda: True)
"""PyTorch 2.6 does not tell. There every graph has a variant's key: it is right in an export, too."""


@torch.compiler.assume_constant_result  # Dynamo calls it: traced, PyTorch 2.11 takes every compilation for an export
def name_for_op(key: str) -> str:
    """Return what a call hands to the ops for a variant's key."""
    # A program that is exported runs where no variant has a graph's name, or another one.
    return key if _is_exporting() else graph_name(key)


@torch.compiler.assume_constant_result
def name_for_output(key: str) -> str:
    """Return :func:`name_for_op` of a call that takes nothing but O: of the graph that models share, if this is it."""
    name = _shared.name if _shared and _shared.is_called else ""
    return name if name.startswith(_SHARED) and _KEYS.get(name) == key else name_for_op(key)


def _named(word: str) -> AttentionVariant:
    return variant_from_key(_KEYS.get(word, word))


def kernels_for(q: Tensor, variant: AttentionVariant, layer: int) -> ModuleType | None:
    """Return the kernels' launcher if the kernels support every variant of the layer on this device, else None."""
    return _kernels_for(q.device.type, q.dtype, q.shape[-1], q.shape[1], variant, layer)


@lru_cache(maxsize=1024)
def _kernels_for(
    device_type: str, dtype: torch.dtype, head_size: int, n_head: int, variant: AttentionVariant, layer: int
) -> ModuleType | None:
    if device_type != "cuda" or not triton_suffices():
        return None
    from flashpoint.numerics import launch  # a CPU need not wait for Triton

    groups = variant.groups(layer, n_head)
    return launch if all(launch.kernels_support(dtype, head_size, group) for group, _ in groups) else None


@lru_cache
def triton_suffices() -> bool:
    """Whether Triton is new enough for the kernels; if not, tell it once."""
    if not has_triton():
        notify(
            f"the kernels need Triton {'.'.join(map(str, TRITON))}, which PyTorch 2.10 brings; here it is "
            f"{_triton_found()}: the reference computes in their place, slower"
        )
    return has_triton()


@lru_cache
def has_triton() -> bool:
    """Whether Triton is new enough for the kernels."""
    found = _triton_found()
    return found != "none" and tuple(map(int, found.split(".")[:2])) >= TRITON


def _triton_found() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def noise_key(q: Tensor, seed_and_step: Tensor, layer: int, heads: tuple[int, ...]) -> NoiseKey:
    """Return the source of random bits for some heads of ``q`` [B, H, T, d]; heads count from 0."""
    return NoiseKey(seed_and_step, layer, _on_device(heads, q.device), q.shape[1], q.shape[0])


def index_of(heads: tuple[int, ...], q: Tensor) -> slice | Tensor:
    """Return an index that takes these heads out of [B, H, …]: all heads as a view, some as a copy."""
    return slice(None) if len(heads) == q.shape[1] else _on_device(heads, q.device)


@lru_cache(maxsize=256)
def _on_device(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Return head numbers, [heads] int64. They are copied once: a CUDA graph cannot hold a copy from the host."""
    return torch.tensor(heads, device=device)


def _saved_like(q: Tensor, variant: AttentionVariant, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the uninitialised results of the forward pass: O, L, what δ takes beside O or nothing, and centred keys or
    nothing."""
    groups = [group for group, _ in variant.groups(layer, q.shape[1])]
    out = by_token(q, torch.float32 if any(group.returns_fp32 for group in groups) else q.dtype)
    saves_another, saved = any(group.saved_out != "none" for group in groups), dtype_of_saved(groups)
    return (
        out,
        q.new_empty(q.shape[:-1], dtype=torch.float32),
        by_token(q, saved) if saves_another else q.new_empty(0, dtype=saved),
        by_token(q, q.dtype) if any(group.center_keys for group in groups) else q.new_empty(0),
    )


def _has_stand_in(word: str, choices: AttentionVariant, layer: int, q: Tensor) -> bool:
    """Whether the third result of the forward op is one that nobody reads."""
    return word.startswith(_SHARED) and all(group.saved_out == "none" for group, _ in choices.groups(layer, q.shape[1]))


def _op_results_like(
    q: Tensor, choices: AttentionVariant, word: str, layer: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return uninitialised results of the forward op, called with a word for the variant."""
    out, logsumexp, saved, centered = _saved_like(q, choices, layer)
    stand_in = _has_stand_in(word, choices, layer, q)
    return out, logsumexp, by_token(q, _STAND_IN) if stand_in else saved, centered


@torch.library.register_fake("flashpoint::flash_fwd")
def _(
    q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor, variant: str, layer: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _op_results_like(q, _named(variant), variant, layer)


@torch.library.register_fake("flashpoint::flash_bwd")
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return by_token(q, q.dtype), by_token(k, k.dtype), by_token(v, v.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, seed_and_step, *ctx.choice = inputs
    ctx.save_for_backward(q, k, v, *output, seed_and_step)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:  # nothing depends on O
        return (None,) * 8
    return (*flash_bwd_op(grad_out, *ctx.saved_tensors, *ctx.choice), *[None] * 5)


torch.library.register_autograd("flashpoint::flash_fwd", _backward, setup_context=_setup_context)


def _second_derivative(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    raise ValueError(
        "this attention has no second derivatives; choose variant='sdpa' inside "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


torch.library.register_autograd("flashpoint::flash_bwd", _second_derivative)
