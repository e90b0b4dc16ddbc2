"""Sees calls of PyTorch's attention and of this package's, wherever they are called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from flashpoint import drop_in
from flashpoint.files import CONFIGS
from flashpoint.numerics.named import named_by_choices
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.watching.functions import replaced
from flashpoint.watching.interceptor import Interceptor
from flashpoint.watching.left_out import DROPOUT
from flashpoint.watching.masks import masking

_SDPA = F.scaled_dot_product_attention
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class CallMode(TorchFunctionMode):
    """Sees calls of PyTorch's attention and of :func:`flashpoint.attention`."""

    def __init__(self, interceptor: Interceptor) -> None:
        super().__init__()
        self._interceptor = interceptor
        self.ended = False

    def insert(self) -> Callable[[], None]:
        """See calls from now on until what is returned is called.

        The mode lies below those of the loop, as of ``with torch.device(…)``: they may begin and end meanwhile, and
        PyTorch ends whichever is on top.
        """
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # which PyTorch wants at the bottom
        stack = [mode for mode in _get_current_function_mode_stack() if mode is not default]
        _set_stack([*([] if default is None else [default]), self, *stack])
        return self._remove

    def _remove(self) -> None:
        self.ended = True
        forget_ended()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # of nn.MultiheadAttention: inside, no mode sees calls
            before = len(self._interceptor.calls)
            with replaced(F, _SDPA.__name__, self._sdpa):
                result = func(*args, **kwargs)
            if kwargs.get("need_weights") and self._interceptor.listening:
                self._interceptor.miss("nn.MultiheadAttention with need_weights=True, which calls no attention")
            for call in self._interceptor.calls[before:]:
                packed = kwargs.get("in_proj_weight", args[5] if len(args) > 5 else None)
                weights = [packed, *(kwargs.get(f"{name}_proj_weight") for name in "qkv")]
                call.weights = tuple(weight for weight in weights if weight is not None)
            return result
        if func is not _SDPA and func is not drop_in.attention:
            return func(*args, **kwargs)
        name = "scaled_dot_product_attention" if func is _SDPA else "flashpoint.attention"
        return self._interceptor.call(name, func, args, kwargs, lambda out: self._keep(func, args, kwargs, out))

    def _keep(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = {**dict(zip(_SDPA_ARGUMENTS, args, strict=False)), **kwargs}
        mask = given.get("attn_mask")
        causal = bool(given.get("is_causal")) if mask is None else masking(mask, given["query"].shape[-2])
        if given.get("dropout_p"):
            self._interceptor.miss(f"scaled_dot_product_attention: {DROPOUT}")
        elif causal is None:
            self._interceptor.miss("scaled_dot_product_attention: a mask beside the causal one")
        else:
            name = "sdpa" if func is _SDPA else _variant_name(given["variant"])
            tensors = {"q": given["query"], "k": given["key"], "v": given["value"], "out": out}
            self._interceptor.keep(name, tensors, causal, given.get("scale"), in_order=True)

    def _sdpa(self, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(_SDPA, (), args, kwargs)


def forget_ended() -> None:
    """Take the modes that have ended from this thread's. Another thread may have ended one, which has a stack of its
    own."""
    stack = _get_current_function_mode_stack()
    left = [mode for mode in stack if not (isinstance(mode, CallMode) and mode.ended)]
    if len(left) < len(stack):
        _set_stack(left)


def _set_stack(modes: list[Any]) -> None:
    """Replace PyTorch's stack of function modes; the last one is on top."""
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


@functools.cache
def _variant_name(variant: AttentionVariant | str) -> str:
    """Return the name of a variant with what differs from its file: δ of two such attentions is not the same."""
    if isinstance(variant, str):
        return variant
    return named_by_choices(variant, CONFIGS / "attn").title
