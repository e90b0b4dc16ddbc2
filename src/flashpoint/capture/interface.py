"""Attentions that models of Transformers ask its interface for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashpoint.capture.functions import arguments_of
from flashpoint.capture.masks import masking

if TYPE_CHECKING:
    from flashpoint.capture.recorder import Recorder

_OTHER_SOFTMAX = ("softcap", "s_aux", "position_bias")
"""Options by which a model's attention is no softmax(α·QKᵀ)V."""


def interface_in_use() -> Any:
    """Return the class through which models ask for their attention; None where no model of Transformers is loaded."""
    module = sys.modules.get("transformers.modeling_utils")  # transformers itself loads it late, at its first use
    found = getattr(module, "AttentionInterface", None)
    return found if hasattr(found, "get_interface") else None


def recording_interface(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method in the place of ``get_interface``: the functions that it hands out record their calls."""

    def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(interface, name, default)

        def called(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any, **options: Any) -> Any:
            with recorder.outermost() as wanted:
                result = function(module, q, k, v, mask, *rest, **options)
            if wanted:
                given = arguments_of(function, (module, q, k, v, mask, *rest), options)
                causal, reason = _masked(module, q.shape[2], mask, given)
                if reason:
                    recorder.missed.add(f"{name}: {reason}")
                else:
                    tensors = {"q": q, "k": k, "v": v, "out": result[0]}
                    recorder.record(name, tensors, causal, given.get("scaling"), by_token=("out",))
            return result

        return called

    return get_interface


def _masked(module: Any, length: int, mask: Any, given: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a call is causal, and why it is not recorded; the latter is empty where it is."""
    if given.get("dropout"):
        return False, "dropout, where only 0 is recorded"
    if changed := [name for name in _OTHER_SOFTMAX if given.get(name) is not None]:
        return False, f"{changed[0]}, which changes the softmax"
    if mask is not None:
        causal = masking(mask, length) if getattr(mask, "ndim", 0) == 4 else None
        return bool(causal), "" if causal is not None else "a mask beside the causal one"
    window = given.get("sliding_window")
    if window is not None and window < length:
        return False, f"a window of {window} tokens"
    told = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if told is None else told), ""
