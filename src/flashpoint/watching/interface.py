"""Attentions that models of Transformers ask its interface for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from flashpoint.other_softmax import other_softmax
from flashpoint.watching.functions import arguments_of, masking_of, output_of, queries_keys_values
from flashpoint.watching.interceptor import Interceptor
from flashpoint.watching.left_out import DROPOUT
from flashpoint.watching.masks import masking

_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob", "attn_dropout")
"""Names that configurations of models have for the attention's dropout."""


def interface_in_use() -> Any:
    """Return the class through which models ask for their attention; None where no model of Transformers is loaded."""
    module = sys.modules.get("transformers.modeling_utils")  # transformers itself loads it late, at its first use
    found = getattr(module, "AttentionInterface", None)
    return found if hasattr(found, "get_interface") else None


def intercepting_interface(interceptor: Interceptor, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method in the place of ``get_interface``: the functions that it hands out are intercepted."""

    def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(interface, name, default)

        def called(*positional: Any, **options: Any) -> Any:
            return interceptor.call(
                name, function, positional, options, partial(keep, name, function, positional, options)
            )

        return called

    def keep(
        name: str, function: Callable[..., Any], positional: Sequence[Any], options: dict[str, Any], result: Any
    ) -> None:
        given = arguments_of(function, positional, options)
        module, *qkv, mask = (*positional, *[None] * 5)[:5]
        module, mask = given.get("module", module), given.get("attention_mask", mask)
        found, out = queries_keys_values(given, qkv), output_of(result)
        if found is None or out is None:
            interceptor.miss(f"{name}: called without q, k, v, or returns no O")
            return
        q, k, v = found
        causal, reason = _masked(module, q.shape[2], mask, given)
        by_head = [q, k, v, out.transpose(1, 2) if out.dim() == 4 else out]
        if not reason and masking_of(by_head, causal, given.get("scaling")) is None:
            told = "causal" if causal else "not causal"
            reason = f"O is not softmax(α·QKᵀ)V, {told}"
        if reason:
            interceptor.miss(f"{name}: {reason}")
        else:
            tensors = {"q": q, "k": k, "v": v, "out": out}
            interceptor.keep(name, tensors, causal, given.get("scaling"), by_token=("out",))

    return get_interface


def _masked(module: Any, length: int, mask: Any, given: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a call is causal, and why it is not recorded; the latter is empty where it is."""
    if given.get("dropout"):
        of_config = vars(getattr(module, "config", None) or object)
        by = next(
            (f", by {name}=0.0 in the configuration of the model" for name in _DROPOUTS if of_config.get(name)), ""
        )
        return False, f"{DROPOUT}{by}"
    if (changed := other_softmax(given)) is not None:
        return False, f"{changed}, which changes the softmax"
    if mask is not None:
        causal = masking(mask, length) if getattr(mask, "ndim", 0) == 4 else None
        return bool(causal), "" if causal is not None else "a mask beside the causal one"
    if _is_packed(given):
        return False, "packed sequences"
    window = given.get("sliding_window")
    if window is not None and window < length:
        return False, f"a window of {window} tokens"
    told = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if told is None else told), ""


def _is_packed(given: dict[str, Any]) -> bool:
    """Return whether a call without a mask has several sequences in a row, as FlashAttention takes them: positions
    begin anew, or more than the beginning and the end of one sequence are told."""
    positions, ends = given.get("position_ids"), given.get("cu_seq_lens_q")
    if isinstance(positions, Tensor) and positions.dim() == 2 and bool((positions.diff(dim=-1) < 1).any()):
        return True
    return isinstance(ends, Tensor) and ends.numel() > 2
