"""Which attention calls are not recorded, or look wrong, and why. A reason is tensors of which this process has a part.

To compute with such a tensor is to wait for all other processes. Only the first process watches: what it computes
there, the others do not, and the training stands still. Nothing is imported for it: a loop that shards has imported
what it shards with.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpoint.diagnosis.call import fit_together

WITHOUT_GRADIENTS = "called without gradients, as in an evaluation or in checkpoints, which need use_reentrant=False"
UNKNOWN = "the watched model called none that is PyTorch's, Transformers' or named by functions=['MODULE:NAME']"
"""Why a step has no attention at all."""
NOT_CALLED = (
    "the watched model itself was not called in this step: call watched.step once an optimiser step, and the model "
    "before it"
)
TWICE = "differentiated twice, as for a gradient penalty, where only first derivatives are recorded"
FROZEN = "no gradient goes through it, as in a frozen layer"
TRANSFORMED = "called inside torch.vmap or another transform of torch.func, where nothing is recorded; call it outside"
NESTED = "tensors are nested, of several lengths; pad them, or name a function that takes their sequences in a row"
SHARDED = "tensors are DTensors, of which each process holds a part"
_HEADS = ("n_head", "n_heads", "num_heads", "num_attention_heads", "nhead")
"""Names that models and their configurations have for the number of heads."""
DROPOUT = "dropout, and what it drops is not to be seen; set the attention's dropout to 0"


class LeftOut(Exception):
    """A call is not recorded, for the reason that is told."""


def is_transformed(value: Any) -> bool:
    """Return whether a value is a tensor inside a transform of ``torch.func``: it has no gradients and no values of its
    own, and ends with the transform. PyTorch has no public way to ask."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def told_to_users_of(model: nn.Module, reason: str) -> str:
    """Return a reason with what those can do about it whose model is one of Transformers: they call neither its
    attention nor its checkpoints themselves."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    name = next((type(one).__name__ for one in model.modules() if kind is not None and isinstance(one, kind)), "")
    if name and reason == WITHOUT_GRADIENTS:
        return f"{reason}, by gradient_checkpointing_kwargs={{'use_reentrant': False}} in Transformers"
    if name and reason == UNKNOWN:
        return (
            f"{reason}; {name} does without Transformers' AttentionInterface, and what it computes itself is not seen"
        )
    if reason == UNKNOWN and (place := other_than_pytorchs()):
        return f"{reason}; {place.replace(':', '.')} is not PyTorch's any more: give functions=['{place}']"
    return reason


def other_than_pytorchs() -> str:
    """Return where PyTorch's attention was, as ``functions`` names it, if a program has put another function there."""
    pytorchs = torch._C._nn.scaled_dot_product_attention
    used = inspect.unwrap(F.scaled_dot_product_attention)  # flashpoint.stabilize wraps what is there
    return "" if used is pytorchs else f"{F.__name__}:{pytorchs.__name__}"


def shapes_left_out(tensors: Mapping[str, Tensor]) -> str:
    """Return why q, k, v and O are no attention that is recorded, with their shapes and what to do; empty where they
    are one. Tensors are q [B, H, T_q, d], k [B, H_kv, T_k, d], v [B, H_kv, T_k, d_v] and O [B, H, T_q, d_v]."""
    shapes = {name: list(x.shape) for name, x in tensors.items()}
    if fit_together(shapes):
        return ""
    told = ", ".join(f"{name} {shapes[name]}" for name in ("q", "k", "v", "out"))
    if any(len(shapes[name]) != 4 for name in "qkv"):
        remedy = "as by x.unflatten(0, (B, H)) of [B·H, T, d], or for [T, H, d] give @bthd in functions="
        if all(len(shapes[name]) > 4 for name in "qkv"):
            remedy = "as by x.flatten(0, -4)"
        return f"{told}: not four dimensions; make them [B, H, T, d], {remedy}"
    sequences, heads = ({shapes[name][at] for name in "qkv"} for at in range(2))
    reasons = {
        "not as many sequences each; expand k and v to those of q": len(sequences) > 1,
        "other numbers of heads; repeat those of k and v, as repeat_interleave does": len(heads) > 1,
    }
    found = (reason for reason, is_so in reasons.items() if is_so)
    return f"{told}: {next(found, 'out is not [B, H, T_q, d_v], or nothing is in them')}"


def perhaps_exchanged(q: Sequence[int], lengths: Collection[int], heads: Collection[int]) -> str:
    """Return what makes one think that heads and tokens of a call are exchanged; empty where nothing does.

    One sign alone says nothing: a call can truly have more heads than tokens. Nor is anything said where the model
    names as many heads as are taken.

    Args:
        q: its shape, taken for [B, H, T, d].
        lengths: tokens of the sequences that the model was given; none where that is not known.
        heads: numbers of heads that the model and its configuration name.
    """
    _, taken, tokens, _ = q
    signs = {
        f"the model was given sequences of {taken:,}": taken in lengths and tokens not in lengths,
        f"names {tokens:,} heads": tokens in heads and taken not in heads,
    }
    seen = [sign for sign, is_so in signs.items() if is_so]
    if len(seen) + (taken > tokens) < 2 or (taken in heads and tokens not in heads):
        return ""
    return f"q {list(q)} is {taken:,} heads of {tokens:,} tokens, and {' and '.join(seen)}"


def numbers_of_heads(model: nn.Module) -> set[int]:
    """Return the numbers of heads that a model's modules and their configurations name."""
    named = [vars(module) for module in model.modules()]
    holders = [*named, *(vars(one["config"]) for one in named if hasattr(one.get("config"), "__dict__"))]
    return {one[name] for one in holders for name in _HEADS if isinstance(one.get(name), int)}


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a tensor of which each process holds a part, or the whole."""
    return _is(value, "torch.distributed.tensor", "DTensor")


def is_sharded(model: nn.Module) -> bool:
    """Return whether processes share the weights of a model, or of a part of it.

    While ``fully_shard`` has a module's weights together they are plain tensors, so its modules are looked at, too.
    """
    wrappers = ("FSDPModule", "FullyShardedDataParallel")
    return any(map(is_dtensor, model.parameters())) or any(
        _is(module, "torch.distributed.fsdp", name) for module in model.modules() for name in wrappers
    )


def is_foreign(tensor: Tensor) -> bool:
    """Return whether a tensor's own class says what operations do, as of quantised weights: it may know few."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def local(tensor: Any) -> Any:
    """Return the part of a tensor that this process holds, or the tensor if it is whole."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor that every process holds whole as a plain one.

    Raises:
        ValueError: this process holds a part of it.
    """
    if is_dtensor(tensor) and not all(placement.is_replicate() for placement in tensor.placements):  # type: ignore[attr-defined]
        raise ValueError(f"{name} is a DTensor, of which each process holds a part: give {name}.full_tensor(), which "
                         "all processes have to call")  # fmt: skip
    found: Tensor = local(tensor)
    return found


def _is(value: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
