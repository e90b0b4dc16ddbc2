"""The attention that a layer is asked for anew: a variant's, a backend of PyTorch's, a function of the user's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashpoint import user_code
from flashpoint.diagnosis.probe import Function
from flashpoint.errors import UserError, one_line
from flashpoint.files import CONFIGS
from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.named import variant_names
from flashpoint.numerics.variant import AttentionVariant, kernel_in

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""Backends of ``scaled_dot_product_attention``, by their names as engines after ``sdpa:``."""


Call = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor | None]]
"""q, k, v [B, H, T, d], whether it is causal and α, to O [B, H, T, d] and L [B, H, T] or None."""


def function_of_layer(variant: AttentionVariant, layer: int) -> Function:
    """Return what a variant computes in a layer, as a function."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
        if kernel_in(variant, layer) == "flash":
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        key = torch.zeros(2, dtype=torch.int64, device=q.device)
        return attention(q, k, v, variant, layer=layer, seed_and_step=key, causal=is_causal, scale=scale)

    return function


def function_named(word: str) -> Function:
    """Return an attention that is no variant, for any number of heads of keys: ``sdpa:BACKEND``, ``FILE.py:FUNCTION``.

    Raises:
        UserError: the word names none.
    """
    call = _named(word)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return call(q, k, v, is_causal, scale)[0]

    return function


def _named(word: str) -> Call:
    if word in ("flash", "baseline"):
        raise UserError(f"--attention {word}: an emulation; give a variant, sdpa:BACKEND, or FILE.py:FUNCTION")
    if word.startswith("sdpa:") and (backend := word.removeprefix("sdpa:")) in BACKENDS:
        return sdpa(backend)
    if ".py:" in word:
        return users_function(word)
    backends, names = (
        ", ".join(some) for some in ([f"sdpa:{name}" for name in BACKENDS], variant_names(CONFIGS / "attn"))
    )
    raise UserError(f"{word}: no such engine; give {backends}, FILE.py:FUNCTION, or of {names}")


def pytorchs(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, None]:
    """Compute PyTorch's attention, by the backend that it chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale), None


def sdpa(backend: str) -> Call:
    """Return PyTorch's attention by one of its backends."""

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor | None]:
        try:
            with warnings.catch_warnings(), sdpa_kernel(BACKENDS[backend]):
                warnings.simplefilter("ignore")  # PyTorch warns why other backends do not fit
                return pytorchs(q, k, v, causal, scale)
        except RuntimeError as error:
            if "alloc" in str(error):
                raise  # memory, which has a line of its own
            takes = [f"sdpa:{name}" for name in BACKENDS if available(name, q.dtype, q.device)]
            raise UserError(
                f"sdpa:{backend}: does not run {q.dtype} of head size {q.shape[-1]} on {q.device.type}: "
                f"{reason(error)}; available: {', '.join(takes)}"
            ) from error

    return call


def reason(error: Exception) -> str:
    """Return the first sentence: PyTorch's second one says what may be wrong with a call that chose no backend."""
    return one_line(error).split(". ")[0]


def available(backend: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a backend takes a type on a device."""
    x = torch.zeros(1, 1, 16, 64, dtype=dtype, device=device)
    try:
        with warnings.catch_warnings(), sdpa_kernel(BACKENDS[backend]):
            warnings.simplefilter("ignore")
            pytorchs(x, x, x, True, 1.0)
    except RuntimeError:
        return False
    return True


def users_function(word: str) -> Call:
    """Return the function of the user's that ``FILE.py:FUNCTION`` names.

    Raises:
        UserError: there is none.
    """
    function = user_code.load(word, word)
    if not callable(function):
        raise UserError(f"{word}: no function; give one that takes q, k, v and is_causal")

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor | None]:
        factor = scale * q.shape[-1] ** 0.5  # such a function takes 1/√d for α
        with user_code.errors_in_one_line(word, word, "it is called with q, k, v, is_causal"):
            out = function(q if math.isclose(factor, 1.0, rel_tol=1e-9) else q * factor, k, v, causal)
        if not isinstance(out, Tensor):
            raise UserError(f"{word}: returns a {type(out).__name__}; return O [B, H, T, d] as a tensor")
        return out, None

    return call
