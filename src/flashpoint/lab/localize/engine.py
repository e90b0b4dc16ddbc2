"""The attentions of branches of somebody's own loop, by their names."""

from __future__ import annotations

import torch.nn.functional as F

from flashpoint.diagnosis.other_attention import function_named
from flashpoint.diagnosis.probe import Function
from flashpoint.drop_in import attention as drop_in
from flashpoint.drop_in import variant_of
from flashpoint.files import CONFIGS
from flashpoint.lab.localize.replayed import exact, rounded_otherwise
from flashpoint.numerics.variant import AttentionVariant

TWIN, SECOND_TWIN = "twin of ", "second twin of "
"""What stands before a name: of an attention that is none of this package's these are ``flash_fp32``'s."""


def engine(name: str) -> Function:
    """Return the attention of a name: ``sdpa``, or what ``flashpoint diagnose --attention`` takes; or its twin, or its
    second twin.

    Raises:
        UserError: there is none.
    """
    if name not in _ENGINES:
        _ENGINES[name] = _engine(name)
    return _ENGINES[name]


_ENGINES: dict[str, Function] = {}


def _engine(name: str) -> Function:
    if name == "sdpa":
        return lambda q, k, v, causal, scale: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    if name.startswith(SECOND_TWIN):
        return _of_variant(rounded_otherwise(_twin(name.removeprefix(SECOND_TWIN))))
    if name.startswith(TWIN):
        return _of_variant(_twin(name.removeprefix(TWIN)))
    if variant := packaged(name):
        return _of_variant(variant)
    return function_named(name)


def _twin(name: str) -> AttentionVariant:
    return exact(packaged(name) or variant_of("flash_fp32"))


def packaged(name: str) -> AttentionVariant | None:
    """Return this package's variant of that name, which is none of PyTorch's kernels."""
    there = name != "sdpa" and (CONFIGS / "attn" / f"{name}.yaml").is_file()
    return variant_of(name) if there else None


def _of_variant(variant: AttentionVariant) -> Function:
    return lambda q, k, v, causal, scale: drop_in(q, k, v, is_causal=causal, scale=scale, variant=variant)
