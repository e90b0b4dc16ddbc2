"""The attention that a layer is asked for anew: a variant's, another library's, a function of the user's."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashpoint import user_code
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.probe import Function
from flashpoint.errors import UserError, nearest, notify, one_line
from flashpoint.files import CONFIGS
from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.named import variant_named, variant_names
from flashpoint.numerics.production import PRODUCTION, production_attention, why_missing
from flashpoint.numerics.variant import AttentionVariant, kernel_in

BACKENDS = [name.removeprefix("sdpa_") for name in PRODUCTION if name.startswith("sdpa_")]
"""Backends of ``scaled_dot_product_attention``, by their names after ``sdpa:``."""
_CAUSAL, _SCALE = ("is_causal", "causal"), ("scale", "softmax_scale", "sm_scale")
"""Names of parameters: of PyTorch, flash-attn and Triton's tutorial."""
ALL = [*(f"sdpa:{backend}" for backend in BACKENDS), *(name for name in PRODUCTION if not name.startswith("sdpa"))]
"""Attentions of other libraries as users call them, but ``sdpa``, which is one of these."""


class Refused(UserError):
    """An attention does not run here, or does not take a call.

    Attributes:
        why: in a line, without the attention's name.
    """

    def __init__(self, word: str, why: str) -> None:
        super().__init__(f"{word}: {why}")
        self.why = why


@dataclass(frozen=True)
class OtherAttention:
    """An attention to call anew.

    Attributes:
        name: as the user calls it.
        variant: that it is; None where it is none.
        deterministic: whether it runs in PyTorch's deterministic mode.
    """

    name: str
    variant: AttentionVariant | None
    function: Function | None
    deterministic: bool = True

    def of(self, call: AttentionCall) -> tuple[Function | None, AttentionVariant | None]:
        """Return what computes a call anew, and what that says that it rounds.

        Raises:
            Refused: it takes no call of this form.
        """
        kernel = _kernel(self.name) if self.variant is None else None
        takes_mask = kernel is not None and PRODUCTION[kernel].takes_mask
        if untaken := _untaken(call, takes_mask):
            given = "is_causal, scale and attn_mask" if takes_mask else "is_causal and scale"
            raise Refused(self.name, f"is called with {given} alone, and the recorded call has {untaken}")
        if kernel is not None and takes_mask:
            return of_production(self.name, kernel, call.form.attn_mask(call.q, call.k)), None
        if self.variant is None:
            return self.function, None
        return function_of_layer(self.variant, call.layer), _declared(self.variant, call)

    @property
    def mode_left(self) -> str:
        """A sentence where PyTorch's deterministic mode is on, and the attention does not run in it."""
        if self.deterministic or not torch.are_deterministic_algorithms_enabled():
            return ""
        return f"{self.name} was called outside PyTorch's deterministic mode, in which it does not run."

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Leave PyTorch's deterministic mode in the block, where the attention does not run in it."""
        if not self.mode_left:
            yield
            return
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(True, warn_only=only_warns)


def attention_named(word: str) -> OtherAttention:
    """Return the attention that a word names: of :data:`ALL`, ``FILE.py:FUNCTION``, or a variant.

    Raises:
        UserError: the word names none.
    """
    kernel = _kernel(word)
    if kernel is None and (CONFIGS / "attn" / f"{word}.yaml").is_file():
        return of_variant(variant_named(word, CONFIGS / "attn"))
    return OtherAttention(word, None, function_named(word), kernel is None or PRODUCTION[kernel].deterministic)


def of_variant(variant: AttentionVariant) -> OtherAttention:
    """Return a variant, such as a run's own."""
    known = PRODUCTION.get(variant.kernel)
    return OtherAttention(variant.name, variant, None, known is None or known.deterministic)


def function_of_layer(variant: AttentionVariant, layer: int) -> Function:
    """Return what a variant computes in a layer, as a function, which raises Refused where its kernel does not run."""
    kernel = kernel_in(variant, layer)

    def function(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        if kernel == "flash":
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        elif why := why_missing(kernel, q.device):
            raise Refused(variant.name, why)
        key = torch.zeros(2, dtype=torch.int64, device=q.device)
        return attention(q, k, v, variant, layer=layer, seed_and_step=key, causal=is_causal, scale=scale)

    return function


def function_named(word: str) -> Function:
    """Return an attention that is no variant, for any number of heads of keys: of :data:`ALL`, ``FILE.py:FUNCTION``.

    Raises:
        UserError: the word names none.
    """
    if kernel := _kernel(word):
        return of_production(word, kernel)
    if ".py:" in word:
        return users_function(word)
    if word in ("flash", "baseline"):
        raise UserError(f"--attention {word}: an emulation; give a variant, {', '.join(ALL)}, or FILE.py:FUNCTION")
    names = [*ALL, *(name for name in variant_names(CONFIGS / "attn") if name not in PRODUCTION)]
    given = nearest(word, names).rstrip() or f"give FILE.py:FUNCTION, or one of {', '.join(names)}"
    raise UserError(f"{word}: no such attention; {given}")


def _kernel(word: str) -> str | None:
    """Return the name in :data:`PRODUCTION` of ``sdpa:BACKEND``, ``flex``, …; None of what is none of these."""
    kernel = word.replace("sdpa:", "sdpa_", 1)
    return kernel if kernel in PRODUCTION else None


def of_production(word: str, kernel: str, mask: Tensor | None = None) -> Function:
    """Return an attention of another library, which raises Refused where it does not run or take a call. A mask says
    what its ``is_causal`` would."""

    def function(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        if why := why_missing(kernel, q.device):
            raise Refused(word, why)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                causal = is_causal and mask is None
                return production_attention(kernel, q, k, v, is_causal=causal, scale=scale, mask=mask)
            except Exception as error:
                if "alloc" in str(error):
                    raise  # memory, which has a line of its own
                taken = f"{str(q.dtype).removeprefix('torch.')} of head size {q.shape[-1]} on {q.device.type}"
                why = _of_backend([str(one.message) for one in told]) or reason(error)
                raise Refused(word, f"does not take {taken}: {why}") from error

    return function


def _of_backend(told: Sequence[str]) -> str:
    """Return why the chosen backend does not fit, which PyTorch warns of before its error; nothing where it does not
    say so. Beside it PyTorch warns that the other backends are off."""
    said = [text.split(" (Triggered internally")[0].strip() for text in told]
    return next((text for text in said if "not used because" not in text and "runtime disabled" not in text), "")


def reason(error: Exception) -> str:
    """Return the first sentence: PyTorch's second one says what may be wrong with a call that chose no backend."""
    return one_line(error).split(". ")[0]


def users_function(word: str) -> Function:
    """Return the function of the user's that ``FILE.py:FUNCTION`` names.

    Raises:
        UserError: there is none.
    """
    own = user_code.load(word, word)
    if not callable(own):
        raise UserError(f"{word}: no function; give one that takes q, k, v and is_causal")
    causal, scaled = _parameters(own, word)
    rounded: list[float] = []

    def function(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        factor = scale * q.shape[-1] ** 0.5
        if not scaled and not math.isclose(factor, 1.0, rel_tol=1e-9):  # it takes 1/√d for α
            rounds = not math.isclose(math.frexp(factor)[0], 0.5) and q.dtype in (torch.bfloat16, torch.float16)
            if rounds and not rounded:
                rounded.append(factor)
                notify(f"{word}: has no parameter scale: q is multiplied by {factor:.3g}, and rounded by that")
            q = q * factor
        named: dict[str, Any] = {causal: is_causal} if causal else {}
        if scaled:
            named[scaled] = scale
        with user_code.errors_in_one_line(word, word, "it is called with q, k, v, is_causal"):
            out = own(q, k, v, **named) if causal else own(q, k, v, is_causal, **named)
        if not isinstance(out, Tensor):
            raise UserError(f"{word}: returns a {type(out).__name__}; return O [B, H, T, d] as a tensor")
        wanted = [*q.shape[:-1], v.shape[-1]]
        if list(out.shape) != wanted or not out.is_floating_point():
            told = f"{str(out.dtype).removeprefix('torch.')} {list(out.shape)}"
            raise UserError(f"{word}: returns {told} for q of {list(q.shape)}; return O of {wanted}, floating point")
        return out

    return function


def _parameters(own: Callable[..., Any], word: str) -> tuple[str, str]:
    """Return the parameters of a user's function that take ``is_causal`` and α, by name. The first is empty where it is
    the fourth by position, the second where there is none.

    Raises:
        UserError: the fourth one means something else: its default is no truth value.
    """
    try:
        parameters = inspect.signature(own).parameters
    except (TypeError, ValueError):  # of a function in C, which has no signature
        return "", ""
    by_name = {name for name, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    causal, scaled = (next((name for name in names if name in by_name), "") for names in (_CAUSAL, _SCALE))
    fourth = next(iter([*parameters.values()][3:]), None)
    if not causal and fourth and fourth.default is not fourth.empty and not isinstance(fourth.default, bool):
        raise UserError(f"{word}: {fourth.name} is its fourth parameter; give a function of q, k, v and is_causal")
    return causal, scaled


def _untaken(call: AttentionCall, takes_mask: bool) -> str:
    """Return what a call has that an attention is not given anew; nothing where all is given."""
    tensors = [name for name in ("mask", "bias") if name in call.form.tensors and not takes_mask]
    numbers = [name for name in ("softcap", "dropout") if getattr(call.form, name)]
    sink = ["sink"] if call.form.sink is not None else []
    shapes = [] if takes_mask or call.q.shape[2:] == call.v.shape[2:] else ["other lengths or widths of q and v"]
    return ", ".join([*tensors, *numbers, *sink, *shapes])


def _declared(variant: AttentionVariant, call: AttentionCall) -> AttentionVariant | None:
    """Return what all heads of the call's layer compute; None where they differ, or another library's kernel does."""
    groups = variant.groups(call.layer, call.q.shape[1])
    return groups[0][0] if len(groups) == 1 and groups[0][0].kernel == "flash" else None
