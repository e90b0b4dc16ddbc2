"""Attentions that people train with: those of PyTorch, flash-attn, FlashAttention-4 and xformers, behind one call.

Shapes: B sequences, H heads, H_kv heads of keys and values, T tokens, d features per head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashpoint.errors import UserError, one_line

Call = Callable[..., Tensor]
"""q [B, H, T, d], k and v [B, H_kv, T, d], whether it is causal, and α or None for 1/√d, to O [B, H, T, d]. One that
takes masks takes PyTorch's ``attn_mask`` after these."""

ScoreMod = Callable[..., Tensor]
"""FlexAttention's: a score, sequence, head, query and key, [] each, to another score."""


@dataclass(frozen=True)
class ProductionAttention:
    """An attention of another library.

    Attributes:
        call: computes it; gradients flow.
        package: the distribution that brings it, whose version a run records.
        deterministic: whether its backward pass gives the same bits again in PyTorch's deterministic mode.
        needs_gpu: whether it runs, or has a backward pass, on a GPU alone.
        takes_mask: whether it takes PyTorch's ``attn_mask``, keys of another length, and values of another width.
    """

    call: Call
    package: str = "torch"
    deterministic: bool = True
    needs_gpu: bool = False
    takes_mask: bool = False


def _sdpa(backend: SDPBackend | None) -> Call:
    def call(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, mask: Tensor | None = None
    ) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped)
        k, v = (repeat_kv(q, x) for x in (k, v))  # not every backend takes fewer heads of keys
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)

    return call


def _flex(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, score_mod: ScoreMod | None = None
) -> Tensor:
    out: Tensor = _called_flex(q, k, v, is_causal, scale, score_mod=score_mod)
    return out


def capped(cap: float) -> ScoreMod:
    """Return what makes c·tanh(S/c) of the scores, as in Gemma 2; to be called where no compiler traces."""
    text = repr(cap)  # of a second number the compiler makes a tensor, which FlexAttention refuses

    def score_mod(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return float(text) * torch.tanh(score / float(text))

    return score_mod


def flex_with_logsumexp(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's O [B, H, T, d] and L [B, H, T] float32, a natural logarithm; both have gradients."""
    from torch.nn.attention import flex_attention as library

    if not hasattr(library, "AuxRequest"):  # in older releases of PyTorch
        out, logsumexp = _called_flex(q, k, v, is_causal, scale, return_lse=True)
        return out, logsumexp
    out, others = _called_flex(q, k, v, is_causal, scale, return_aux=library.AuxRequest(lse=True))
    return out, others.lse


def _called_flex(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, **asked: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    mask = _causal_mask(q.shape[2], str(q.device)) if is_causal else None
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    return attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **asked)


_MASKS: dict[tuple[int, str], Any] = {}


def _causal_mask(length: int, device: str) -> Any:
    """Return FlexAttention's causal mask of so many tokens, made once. A compiler that meets a new length makes it in
    its graph: what it traces may not change the table."""
    from torch.nn.attention.flex_attention import create_block_mask

    if (length, device) in _MASKS:
        return _MASKS[length, device]
    mask = create_block_mask(_not_later, None, None, length, length, device)
    if not torch.compiler.is_compiling():
        _MASKS[length, device] = mask
    return mask


def make_ready(kernel: str, length: int, device: torch.device) -> None:
    """Make what a kernel needs for causal attention over so many tokens, before a compiler traces it."""
    if kernel == "flex":
        _causal_mask(length, str(device))


def _not_later(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@cache
def _compiled_flex() -> Any:
    """Uncompiled, FlexAttention holds all T² scores and computes something else."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


Forward = Callable[[Tensor, Tensor, Tensor, bool, float | None], tuple[Tensor, Tensor]]
"""q, k, v [B, T, H, d], any strides, whether it is causal, and α, to O [B, T, H, d] and L [B, H, T] float32, both
contiguous."""
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""dO, q, k, v, O, L, the gradient of L [B, H, T] float32 or None, whether it is causal, and α, to dQ, dK, dV."""


def _opaque(name: str, forward: Forward, backward: Backward) -> Call:
    """Return a library's attention that no compiler can trace as one node of a graph for each pass.

    Args:
        name: of the forward pass in graphs.
        backward: a node of :func:`_opaque_backward`.
    """

    @torch.library.custom_op(f"flashpoint::{name}_fwd", mutates_args=())
    def fwd(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
        return forward(q, k, v, is_causal, scale)

    @fwd.register_fake
    def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        B, T, H, _d = q.shape
        return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty((B, H, T), dtype=torch.float32)

    def saved(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.is_causal, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, *output)

    def gradients(ctx: Any, grad_out: Tensor, _grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        return (*backward(grad_out, *ctx.saved_tensors, None, ctx.is_causal, ctx.scale), None, None)

    fwd.register_autograd(gradients, setup_context=saved)

    def call(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        out: Tensor = fwd(*(x.transpose(1, 2) for x in (q, k, v)), is_causal, scale)[0]
        return out.transpose(1, 2)

    return call


def _opaque_backward(name: str, backward: Backward) -> Backward:
    """Return a library's backward pass as one node of a graph."""

    @torch.library.custom_op(f"flashpoint::{name}_bwd", mutates_args=())
    def bwd(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        grad_logsumexp: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = backward(grad_out, q, k, v, out, logsumexp, grad_logsumexp, is_causal, scale)
        grad_q, grad_k, grad_v = (_laid_out_as(x, grad) for x, grad in zip((q, k, v), grads, strict=True))
        return grad_q, grad_k, grad_v

    @bwd.register_fake
    def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    return bwd


def _laid_out_as(x: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient in the layout that a compiler is told: that of its input, which libraries mostly give it."""
    told = torch.empty_like(x, device="meta")
    return grad if grad.stride() == told.stride() else torch.empty_like(x).copy_(grad)


def _fa4_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, logsumexp, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=is_causal, return_lse=True)
    return out, logsumexp


def _fa4_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_logsumexp: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    grads = _flash_attn_bwd(
        q, k, v, out, grad_out, logsumexp, scale, is_causal, deterministic=True, dlse=grad_logsumexp
    )
    return grads[0], grads[1], grads[2]


fa4_backward = _opaque_backward("fa4", _fa4_backward)


def _xformers_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention_forward_requires_grad

    bias = LowerTriangularMask() if is_causal else None
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, logsumexp = memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=scale)
    return out, logsumexp[..., : q.shape[1]].contiguous()  # its CUTLASS kernel pads it


def _xformers_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    _grad_logsumexp: None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention_backward

    bias = LowerTriangularMask() if is_causal else None
    grad_out, q, k, v, out = (x.contiguous() for x in (grad_out, q, k, v, out))
    grads = memory_efficient_attention_backward(grad_out, out, logsumexp, q, k, v, bias, scale=scale)
    return grads[0], grads[1], grads[2]


_xformers_opaque = _opaque("xformers", _xformers_forward, _opaque_backward("xformers", _xformers_backward))


def _xformers(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    return _xformers_opaque(q, repeat_kv(q, k), repeat_kv(q, v), is_causal, scale)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    from flash_attn import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = flash_attn_func(q, k, v, softmax_scale=scale, causal=is_causal, deterministic=True)
    return out.transpose(1, 2)


def repeat_kv(q: Tensor, x: Tensor) -> Tensor:
    """Return keys or values [B, H, T, d] of as many heads as the queries have.

    As in FlashAttention-2, gradients are rounded for each head, and then added up over those that share a head of keys.
    """
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


PRODUCTION: dict[str, ProductionAttention] = {
    "sdpa": ProductionAttention(_sdpa(None), takes_mask=True),
    "sdpa_math": ProductionAttention(_sdpa(SDPBackend.MATH), takes_mask=True),
    "sdpa_flash": ProductionAttention(_sdpa(SDPBackend.FLASH_ATTENTION), takes_mask=True),
    "sdpa_efficient": ProductionAttention(_sdpa(SDPBackend.EFFICIENT_ATTENTION), needs_gpu=True, takes_mask=True),
    "sdpa_cudnn": ProductionAttention(
        _sdpa(SDPBackend.CUDNN_ATTENTION), deterministic=False, needs_gpu=True, takes_mask=True
    ),
    "flex": ProductionAttention(_flex, needs_gpu=True),
    "flash_attn": ProductionAttention(_flash_attn, package="flash-attn", needs_gpu=True),
    "fa4": ProductionAttention(_opaque("fa4", _fa4_forward, fa4_backward), package="flash-attn-4", needs_gpu=True),
    "xformers": ProductionAttention(_xformers, package="xformers", needs_gpu=True),
}
"""By the name that ``attn.kernel`` and the YAML files of ``configs/attn`` have. ``sdpa`` lets PyTorch choose."""


def production_attention(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    mask: Tensor | None = None,
    score_mod: ScoreMod | None = None,
) -> Tensor:
    """Compute attention by another library's kernel.

    Args:
        kernel: a name of :data:`PRODUCTION`.
        q: [B, H, T, d].
        k, v: [B, H_kv, T, d], H_kv divides H.
        scale: α; None is 1/√d.
        mask: as PyTorch's ``attn_mask``, of a kernel that takes one, beside which ``is_causal`` is False.
        score_mod: what ``flex`` makes of the scores, such as :func:`capped`.

    Returns:
        O [B, H, T, d] in the inputs' dtype.
    """
    if score_mod is not None:
        assert kernel == "flex", kernel
        return _flex(q, k, v, is_causal, scale, score_mod)
    return PRODUCTION[kernel].call(q, k, v, is_causal, scale, *(() if mask is None else (mask,)))


def why_absent(kernel: str, device: torch.device) -> str:
    """Return what a production attention lacks on a device and what to do, or nothing; it is not called."""
    attention = PRODUCTION[kernel]
    try:
        version(attention.package)
    except PackageNotFoundError:
        return f"needs {attention.package}; pip install {attention.package}"
    if attention.needs_gpu and device.type != "cuda":
        return "trains on a GPU alone; take a machine with one"
    return ""


def why_missing(kernel: str, device: torch.device) -> str:
    """Return why a production attention does not train on a device and what to do; nothing where it may."""
    if why := why_absent(kernel, device):
        return why
    return "" if PRODUCTION[kernel].package == "torch" else _why_it_fails(kernel, device)


@cache
def _why_it_fails(kernel: str, device: torch.device) -> str:
    """Return what a library says when it is called: what it was built for can be another PyTorch or chip."""
    q = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    try:
        with torch.enable_grad():
            PRODUCTION[kernel].call(q, q, q, True, None).sum().backward()
    except torch.OutOfMemoryError:
        raise  # it says nothing of the library
    except Exception as error:
        return (
            f"{PRODUCTION[kernel].package} does not compute here ({one_line(error)[:200]}); install one that is for it"
        )
    return ""


def refuse_missing(kernel: str, device: torch.device, deterministic: bool, name: str) -> None:
    """Refuse a production attention that cannot run here as asked, before anything is built.

    Args:
        name: of the variant, with which messages begin.

    Raises:
        UserError: its package is not installed, it needs a GPU, or it has no deterministic backward pass.
    """
    if why := why_missing(kernel, device):
        raise UserError(f"attn={name}: {why}, or attn=sdpa")
    if deterministic and not PRODUCTION[kernel].deterministic:
        raise UserError(
            f"attn={name}: its backward pass gives other bits each time; add train.deterministic=false, and the run "
            "cannot be replayed bit for bit"
        )
