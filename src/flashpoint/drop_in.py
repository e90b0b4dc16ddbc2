"""Attention for a model of your own, with the signature of PyTorch's ``scaled_dot_product_attention``.

Shapes: B sequences, H heads, H_kv heads of keys and values, T tokens, d features per head.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from flashpoint.errors import UserError
from flashpoint.files import CONFIGS
from flashpoint.numerics import dispatch
from flashpoint.numerics.choices import heads_in
from flashpoint.numerics.layout import Form, constant_where_traced, form_of, is_eager
from flashpoint.numerics.named import variant_named
from flashpoint.numerics.passes import Passes
from flashpoint.numerics.production import why_absent
from flashpoint.numerics.variant import ROUNDING_POINTS, AttentionVariant, in_front, kernel_in
from flashpoint_kernels.codes import BF16_BITS, HEAD_SIZES, STREAM_UNIT

# PyTorch 2.6 cannot trace a constant that is a dataclass: there a compiled model breaks its graph at the attention.
_traced_where_possible = (lambda call: call) if hasattr(torch.compiler, "is_exporting") else torch.compiler.disable
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@_traced_where_possible
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    variant: str | AttentionVariant = "flash_exact_rowsum",
    layer: int = 1,
    seed_and_step: Tensor | None = None,
) -> Tensor:
    """Compute self-attention with the numerics of a variant; gradients flow.

    On a GPU this package's kernels compute it in bfloat16. On a CPU, and for float32, the package's reference does in
    PyTorch, slowly. The variant's roundings hold there, too: O of float32 inputs has no more mantissa bits than the
    variant leaves it. Under autocast the inputs are cast as PyTorch's own attention casts them.

    Args:
        query: [B, H, T, d], bfloat16 or float32, d ≤ 128.
        key, value: [B, H_kv, T, d] of that dtype. H_kv is H, or divides H with ``enable_gqa``.
        attn_mask, dropout_p: must stay None and 0.
        is_causal: whether a query sees no later key.
        scale: α, finite; None is 1/√d.
        enable_gqa: whether H / H_kv heads share keys and values.
        variant: name of a file of ``configs/attn``, or a variant with every choice.
        layer: from 1 to 4,095, and one of those that the variant injects errors of; for variants that select layers or
            round stochastically.
        seed_and_step: [2] int64 on the inputs' device, key of stochastic rounding and time of an injected error. Count
            its second number up at each step.

    Returns:
        O [B, H, T, d] in the inputs' dtype.

    Raises:
        ValueError: an argument is not supported or outside its range, or ``variant`` is none.
        TypeError: an input is no tensor.
    """
    if has_torch_function((query, key, value)):  # as PyTorch's own functions: somebody wants to see the call
        seen: Tensor = handle_torch_function(
            attention, (query, key, value), query, key, value, attn_mask=attn_mask, dropout_p=dropout_p,
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, variant=variant, layer=layer,
            seed_and_step=seed_and_step,
        )  # fmt: skip
        return seen
    chosen = variant if isinstance(variant, AttentionVariant) else variant_of(variant)
    if chosen.elsewhere is not None:
        _check_selection(chosen, layer, query)
    kernel, front = kernel_in(chosen, layer), in_front(chosen, layer)
    if kernel != "flash":
        _refuse_bits(front)
    if kernel == "sdpa" and not front.stabilizes:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    _refuse_mask_and_dropout(attn_mask, dropout_p)
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        found = ", ".join(type(x).__name__ for x in (query, key, value))
        raise TypeError(f"query, key, value are {found}: give tensors of PyTorch")
    query, key, value = _as_autocast_casts(query, key, value)
    if not torch.compiler.is_compiling():
        _refuse_transforms(query, key, value)
    passes = None
    if is_eager(query, key, value) and type(layer) is int and (scale is None or type(scale) is float):
        passes = _decided(chosen, layer, is_causal, scale, enable_gqa, *map(form_of, (query, key, value)))
    else:
        _check(query, key, value, enable_gqa)
        _check_choices(chosen, layer, scale)
    _check_seed_and_step(seed_and_step, query.device, chosen)
    if passes is not None:
        out = dispatch.called_directly(query, key, value, seed_and_step, passes)
    else:
        d = query.shape[-1]
        scale = d**-0.5 if scale is None else scale
        if kernel == "flash":
            query, key, value = _as_kernels_take(query, key, value)
        out = dispatch.attention(
            query, key, value, chosen, layer=layer, seed_and_step=seed_and_step, causal=is_causal, scale=scale
        )
        out = out[..., :d] if out.shape[-1] > d else out
    return out if out.dtype == query.dtype else out.to(query.dtype)


@lru_cache(maxsize=1024)
def _decided(
    chosen: AttentionVariant,
    layer: int,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *forms: tuple[torch.Size, torch.dtype, torch.device],
) -> Passes | None:
    """Check once what the forms of query, key and value decide. Return what computes all of the attention, None where
    something stands before it or after it."""
    query, key, value = (Form(*form) for form in forms)
    _check(query, key, value, enable_gqa)
    _check_choices(chosen, layer, scale)
    d, kernel = query.shape[-1], kernel_in(chosen, layer)
    if kernel != "flash" and (why := why_absent(kernel, query.device)):
        raise ValueError(f"variant={chosen.name}: {why}, or variant='sdpa'")
    alone = kernel == "flash" and not in_front(chosen, layer).stabilizes
    if not alone or d not in HEAD_SIZES or key.shape != query.shape:
        return None
    return dispatch.direct_passes(query, chosen.key, layer, causal, d**-0.5 if scale is None else scale)


def _as_autocast_casts(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device_type = query.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # of meta it knows no autocast
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = (x if x.dtype in (dtype, torch.float64) else x.to(dtype) for x in (query, key, value))
    return query, key, value


def _as_kernels_take(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors whose features are filled up with zeros."""
    d = query.shape[-1]
    filled = next(size for size in HEAD_SIZES if size >= d)
    if filled > d:
        query, key, value = (F.pad(x, (0, filled - d)) for x in (query, key, value))
    return query, key, value


def _refuse_mask_and_dropout(attn_mask: Tensor | None, dropout_p: float) -> None:
    if attn_mask is not None:
        raise ValueError("attn_mask: this attention takes none; pass is_causal, or choose variant='sdpa'")
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p}: this attention drops nothing; pass 0, or choose variant='sdpa'")


def _refuse_bits(variant: AttentionVariant) -> None:
    """Refuse mantissa bits that a kernel of another library does not read; a run's are set for all its attentions."""
    for point in ROUNDING_POINTS:
        if (bits := getattr(variant, point).bits) != BF16_BITS:
            raise ValueError(
                f"variant={variant.name}: kernel={variant.kernel} does not read {point}.bits={bits}; leave it at "
                f"{BF16_BITS}, or choose one of ours, such as variant='flash_bf16'"
            )


def _refuse_transforms(*tensors: Tensor) -> None:
    """Refuse transforms of ``torch.func``, and derivatives in forward mode: PyTorch would take them for zero, without a
    word."""
    nowhere = getattr(forward_ad, "_current_level", 0) < 0  # outside of every level there is nothing to unpack
    for x in tensors:
        # In this order: PyTorch does not unpack what vmap has wrapped.
        if not is_functorch_wrapped_tensor(x) and (nowhere or forward_ad.unpack_dual(x, level=0).tangent is None):
            continue
        raise ValueError(
            "this attention has no derivatives in forward mode (jvp) and takes no transforms of torch.func (grad, "
            "vmap); call backward(), or choose variant='sdpa'"
        )


@constant_where_traced
def variant_of(name: str) -> AttentionVariant:
    """Return the variant of a file of ``configs/attn``, read once.

    Raises:
        ValueError: it is no name, or there is none of that name.
    """
    if not isinstance(name, str):
        raise ValueError(f"variant={name!r}: give a name of configs/attn, or an AttentionVariant")
    if name not in _VARIANTS:
        try:
            _VARIANTS[name] = variant_named(name, CONFIGS / "attn", "variant=")
        except UserError as error:
            raise ValueError(str(error)) from None
    return _VARIANTS[name]


_VARIANTS: dict[str, AttentionVariant] = {}


def _check(query: Tensor | Form, key: Tensor | Form, value: Tensor | Form, enable_gqa: bool) -> None:
    """Raise ValueError for tensors that the kernels and the reference do not take."""
    if len(query.shape) != 4 or key.shape != value.shape or len(key.shape) != 4:
        raise ValueError(f"{_shapes(query, key, value)}: give query [B, H, T, d], key and value [B, H_kv, T, d]")
    if query.shape[2] != key.shape[2] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"{_shapes(query, key, value)}: this is self-attention; queries and keys need the same B, T and d"
        )
    if not query.shape[0] or not query.shape[2]:
        raise ValueError(f"{_shapes(query, key, value)}: no token; give B and T of 1 or more")
    if not query.shape[1] or not key.shape[1]:
        raise ValueError(f"{_shapes(query, key, value)}: no head; give H and H_kv of 1 or more")
    if query.shape[1] != key.shape[1] and (not enable_gqa or query.shape[1] % key.shape[1]):
        raise ValueError(
            f"{_shapes(query, key, value)}: other heads of keys; pass enable_gqa=True with H a multiple of H_kv"
        )
    if not query.shape[3]:
        raise ValueError(f"{_shapes(query, key, value)}: no feature; give d of 1 or more")
    if query.shape[3] > HEAD_SIZES[-1]:
        raise ValueError(f"{_shapes(query, key, value)}: d is at most {HEAD_SIZES[-1]}; choose variant='sdpa'")
    if not query.device == key.device == value.device:
        raise ValueError(f"query, key, value are on {query.device}, {key.device}, {value.device}: give one device")
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        found = ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, value))
        cast = ", to which autocast casts them" if torch.is_autocast_enabled(query.device.type) else ""
        raise ValueError(f"query, key, value are {found}{cast}: give one dtype, bfloat16 or float32")


def _check_layer(layer: int) -> None:
    if not isinstance(layer, (int, torch.SymInt)):
        raise ValueError(f"layer is {type(layer).__name__}: give an int")
    if not 1 <= layer < STREAM_UNIT:  # from there on it would have the random bits of another stream
        raise ValueError(f"layer={int(layer)}: give one from 1 to {STREAM_UNIT - 1:,}")


def _check_selection(variant: AttentionVariant, layer: int, query: Tensor) -> None:
    """Raise ValueError where a variant selects heads of ``layer`` that the query [B, H, T, d] does not have."""
    _check_layer(layer)
    if variant.layers is not None and layer not in variant.layers:
        return
    n_head = int(query.shape[1])
    if beyond := [head for head in heads_in(layer, variant.layers, variant.heads) or () if head > n_head]:
        raise ValueError(f"variant={variant.name} selects heads {beyond}: query has heads 1 to {n_head}")


def _check_choices(variant: AttentionVariant, layer: int, scale: float | None) -> None:
    """Raise ValueError for what would be computed all the same, and be another attention."""
    _check_layer(layer)
    for one in (variant, variant.elsewhere):
        trajectory = None if one is None else one.delta_error.trajectory
        if trajectory is not None and layer > len(trajectory):
            told = f"variant={variant.name} has errors of δ for layers 1 to {len(trajectory)}"
            raise ValueError(f"layer={int(layer)}: {told}")  # int: a number that torch.compile traces has no text
    if isinstance(scale, Tensor) and (scale.requires_grad or scale.dim()):
        raise ValueError("scale: no gradient goes to it; multiply query by a learned scale, and pass scale=1.0")
    if scale is not None and not -math.inf < scale < math.inf:
        raise ValueError(f"scale={scale}: give a finite number, or None for 1/√d")


def _errs_by_time(variant: AttentionVariant) -> bool:
    for one in (variant, variant.elsewhere):
        trajectory = None if one is None else one.delta_error.trajectory
        if trajectory is not None and any(len(factors) > 1 for factors in trajectory):
            return True
    return False


def _check_seed_and_step(seed_and_step: Tensor | None, device: torch.device, variant: AttentionVariant) -> None:
    if seed_and_step is None:
        if variant.draws:
            raise ValueError(f"variant={variant.name}: needs random bits; pass seed_and_step, [2] int64")
        if _errs_by_time(variant):
            told = f"variant={variant.name}: its error of δ goes with the step"
            raise ValueError(f"{told}; pass seed_and_step, [2] int64")
        return
    if not isinstance(seed_and_step, Tensor):
        raise ValueError(f"seed_and_step is {type(seed_and_step).__name__}: give a tensor, [2] int64")
    if seed_and_step.dtype != torch.int64 or seed_and_step.shape != (2,):
        dtype = str(seed_and_step.dtype).removeprefix("torch.")
        raise ValueError(f"seed_and_step {list(seed_and_step.shape)} {dtype}: give [2] int64")
    if seed_and_step.device != device:
        raise ValueError(f"seed_and_step is on {seed_and_step.device}: give it on {device}, as query is")


def _shapes(query: Tensor | Form, key: Tensor | Form, value: Tensor | Form) -> str:
    return ", ".join(f"{name} {list(x.shape)}" for name, x in (("query", query), ("key", key), ("value", value)))
