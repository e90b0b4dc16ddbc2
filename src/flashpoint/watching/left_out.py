"""Why an attention call is not recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashpoint.diagnosis.call import is_self_attention

WITHOUT_GRADIENTS = "called without gradients, as in an evaluation or in checkpoints, which need use_reentrant=False"
TWICE = "differentiated twice, as for a gradient penalty, where only first derivatives are recorded"
FROZEN = "no gradient goes through it, as in a frozen layer"
TRANSFORMED = "called inside torch.vmap or another transform of torch.func, where nothing is recorded; call it outside"

DROPOUT = "dropout, where only 0 is recorded; set the attention's dropout to 0"


def is_transformed(value: Any) -> bool:
    """Return whether a value is a tensor inside a transform of ``torch.func``: it has no gradients and no values of its
    own, and ends with the transform. PyTorch has no public way to ask."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def shapes_left_out(tensors: Mapping[str, Tensor]) -> str:
    """Return why q, k, v and O, [B, H, T, d] and for keys [B, H_kv, T, d], are no self-attention that is recorded, with
    their shapes and what to do; empty where they are one."""
    shapes = {name: list(x.shape) for name, x in tensors.items()}
    if is_self_attention(shapes):
        return ""
    told = ", ".join(f"{name} {shapes[name]}" for name in ("q", "k", "v", "out"))
    if any(len(shapes[name]) != 4 for name in "qkv"):
        return f"{told}: not four dimensions; make them [B, H, T, d], as by x.unflatten(0, (B, H)) of [B·H, T, d]"
    sequences, heads, lengths, sizes = ({shapes[name][at] for name in "qkv"} for at in range(4))
    reasons = {
        "queries and keys of two lengths, as in cross-attention: only self-attention is recorded": len(lengths) > 1,
        "not as many sequences each; expand k and v to those of q": len(sequences) > 1,
        "not as many features a head; fill up with zeros to one number, give scale=, and cut O": len(sizes) > 1,
        "other numbers of heads; repeat those of k and v, as repeat_interleave does": len(heads) > 1,
    }
    found = (reason for reason, is_so in reasons.items() if is_so)
    return f"{told}: {next(found, 'out is not of the shape of q, or nothing is in them')}"
