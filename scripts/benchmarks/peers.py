"""Attentions of others, which this package's are measured beside: q, k, v [B, H, T, d] bfloat16 to O, causal."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashpoint.numerics.production import make_ready, production_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "naive_bf16": SDPBackend.MATH,
}
"""PyTorch's, by name."""
FLEX = "flex"
_PACKAGES = {"flash_attn": ("flash-attn", "flash_attn"), "fa4": ("flash-attn-4", "flash_attn.cute")}
"""Distribution and module of what each package's ``flash_attn_func`` is called."""


def installed() -> tuple[dict[str, Attention], list[str]]:
    """Return FlexAttention, and those of packages that are installed, by name; and a line for each package that is not.

    The backward pass of ``deterministic=True`` gives the same bits each time.
    """
    found: dict[str, Attention] = {FLEX: compiled(FLEX, _flex)}
    missing = []
    for name, (package, module) in _PACKAGES.items():
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(f"Not measured: {name} (pip install {package}).")
            continue
        for deterministic in (True, False):
            found[f"{name} deterministic={deterministic}"] = _of_package(module, deterministic)
    return found, missing


def backend(kind: SDPBackend) -> Attention:
    """Return PyTorch's attention by one of its backends alone."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def compiled(kernel: str, attend: Attention) -> Attention:
    """Return what calls another library's ``kernel`` compiled for each shape anew, as in a model whose shapes do not
    change."""
    functorch_config.donated_buffer = False  # which forbids to call a backward pass twice
    of_shape: Any = torch.compile(attend, fullgraph=True, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        make_ready(kernel, q.shape[2], q.device)
        out: Tensor = of_shape(q, k, v)
        return out

    return run


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return production_attention(FLEX, q, k, v)


def _of_package(module: str, deterministic: bool) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend: Any = importlib.import_module(module).flash_attn_func
        by_token = (x.transpose(1, 2) for x in (q, k, v))  # it has [B, T, H, d]
        found = attend(*by_token, causal=True, deterministic=deterministic)
        out: Tensor = found[0] if isinstance(found, tuple) else found  # FlashAttention-4 returns L, too
        return out.transpose(1, 2)

    return run
