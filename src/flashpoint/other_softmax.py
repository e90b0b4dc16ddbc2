"""By which options an attention computes another softmax than softmax(α·QKᵀ)V, whatever its mask.

The names are those of flash-attn, of Transformers, and of PyTorch's flex_attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CAPS = ("softcap", "soft_cap", "logits_soft_cap", "logit_softcapping", "attention_chunk")
"""Numbers that change the softmax where they are above 0."""
BY_POSITION = "position_bias"
"""What Transformers adds to the scores, and PyTorch's attention takes as a mask."""
ADDED = ("alibi_slopes", "sinks", "s_aux", "learnable_sink", BY_POSITION, "score_mod", "qv")
"""What changes the scores or the softmax, whatever its value."""


def other_softmax(given: Mapping[str, Any]) -> str | None:
    """Return the first option by which a call computes another softmax; None where there is none.

    Args:
        given: the call's options by name; those that are None are not given.
    """
    for name, value in given.items():
        if value is not None and (name in ADDED or (name in CAPS and float(value) > 0)):
            return name
    return None
