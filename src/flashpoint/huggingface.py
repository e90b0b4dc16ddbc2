"""This package's attentions for Hugging Face Transformers, registered through its ``AttentionInterface``::

model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation=implementation("flash_exact_rowsum"))
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flashpoint.drop_in import attention, variant_of
from flashpoint.other_softmax import BY_POSITION, other_softmax

_NAMES: set[str] = set()
_ATTENTION = re.compile(r"^class \w*Attention\w*\((torch\.)?(nn\.)?Module\):", re.MULTILINE)
_ASKS = re.compile(r"ALL_ATTENTION_FUNCTIONS|AttentionInterface")


def implementation(variant: str = "flash_exact_rowsum") -> str:
    """Register a variant of ``configs/attn`` and return the name by which Transformers knows it.

    The name of ``flash_exact_rowsum`` is ``point:exact_rowsum``: Transformers takes names with "flash" in them for the
    package flash-attn, and names with a slash for repositories of its Hub.

    A model that computes its attention itself raises ValueError when it is built with this name.

    Raises:
        ValueError: there is no such variant.
    """
    variant_of(variant)
    name = f"point:{variant.removeprefix('flash_')}"
    AttentionInterface.register(name, partial(attention_forward, variant=variant))
    AttentionMaskInterface.register(name, sdpa_mask)
    _NAMES.add(name)
    return name


def _computes_it_itself(model: type[PreTrainedModel]) -> bool:
    """Return whether the modules of a model's classes hold an attention, and none asks for the one that was named.

    The flags of Transformers do not tell it: Falcon's says that it has PyTorch's attention, and GIT's that it has not.
    """
    sources = []
    for one in model.__mro__:
        if issubclass(one, PreTrainedModel) and one is not PreTrainedModel:
            try:
                sources.append(inspect.getsource(sys.modules[one.__module__]))
            except (KeyError, OSError, TypeError):  # of a notebook
                continue
    return any(map(_ATTENTION.search, sources)) and not any(map(_ASKS.search, sources))


_correct_implementation = PreTrainedModel.get_correct_attn_implementation


@wraps(_correct_implementation)
def _refusing(model: PreTrainedModel, requested_attention: str | None, *args: Any, **options: Any) -> str:
    """Check a model before it is built. One that does not ask would get masks of PyTorch's attention, which leave the
    causal one out, and see the tokens that it is to predict."""
    if requested_attention in _NAMES and _computes_it_itself(type(model)):
        raise ValueError(
            f"attn_implementation={requested_attention!r}: {type(model).__name__} computes its attention itself and "
            "does not ask Transformers for one; leave attn_implementation out, and call flashpoint.attention in the "
            "model's code"
        )
    return _correct_implementation(model, requested_attention, *args, **options)


PreTrainedModel.get_correct_attn_implementation = _refusing  # type: ignore[method-assign, assignment]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    variant: str,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention as Transformers asks for it.

    Where no gradient is wanted, PyTorch's own attention computes what :func:`flashpoint.attention` does not: a step of
    generation, sequences that are padded, and a bias by position.

    Args:
        query: [B, H, T, d].
        key, value: [B, H_kv, T, d].

    Returns:
        O [B, T, H, d], and None in the place of the probabilities.

    Raises:
        ValueError: a gradient is wanted of something that :func:`flashpoint.attention` does not compute. Or the model
            asks for a softmax that PyTorch's attention does not compute either, as with a soft cap or sinks.
        RuntimeError: the same in a compiled model, which finds it in the mask's values.
    """
    others = {name: value for name, value in options.items() if name != BY_POSITION}
    if (changed := other_softmax(others)) is not None:
        raise ValueError(
            f"{variant}: takes no {changed}, which this model asks for; PyTorch's attention does not either"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    biased = options.get(BY_POSITION) is not None
    plain = attention_mask is None and query.shape[2] == key.shape[2] and not biased
    if not plain and not torch.is_grad_enabled():
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **options
        )
        return out, None
    if biased:
        raise ValueError(f"{variant}: takes no {BY_POSITION} in training, which this model asks for; use sdpa")
    if attention_mask is not None:
        _only_causal(attention_mask, variant, causal)
    out = attention(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=True,
        variant=variant,
        layer=int(getattr(module, "layer_idx", 0) or 0) + 1,
    )
    return out.transpose(1, 2).contiguous(), None


def _only_causal(mask: Tensor, variant: str, causal: bool) -> None:
    """Refuse a mask [B, 1, T, T]. A compiled model may be handed the causal one.

    Transformers leaves that out elsewhere. It cannot read positions while a model is compiled, which could be those of
    packed sequences: then it makes the mask of them, and only its values tell.
    """
    refusal = f"{variant}: takes no mask beside the causal one; give sequences of one length without padding"
    if not (torch.compiler.is_compiling() and causal and mask.dtype == torch.bool and mask.dim() == 4):
        raise ValueError(refusal)
    lower = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    torch._assert_async((mask == lower).all(), refusal)
