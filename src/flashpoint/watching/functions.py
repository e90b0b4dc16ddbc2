"""Attention functions that a user names: where they are called, with what, and which mask they have inside."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashpoint.diagnosis.form import CLOSED, Form
from flashpoint.diagnosis.sink import sink_of
from flashpoint.errors import UserError
from flashpoint.watching.left_out import is_self_attention

_ROWS = 64
_FAR = 0.5
"""Median error of rows of O, over their norms. An attention with a fault in some heads or blocks stays far below."""
_NEARLY_ALL, _NEAR = 0.99, 0.02
"""Beside an argument that may be a mask, so many rows of each sequence err by no more, save what rounded scores make. A
mask can leave most rows as they are; the rounding of P̄ and O to BF16 accounts for 0.004."""

_DROPOUT = ("dropout_p", "dropout", "attn_dropout", "attention_dropout")
_MASKS = ("attn_mask", "attention_mask", "mask", "attn_bias", "bias", "key_padding_mask")
_WINDOWS = ("window_size", "sliding_window", "window")
_CAUSAL = ("causal", "is_causal")
_SCALES = ("softmax_scale", "scale", "sm_scale", "scaling")
_LIKE_MASKS = ("mask", "bias")
"""Parts of names. What an argument with another name says by True, False or a word is taken to be no mask."""

_NAMES = (("q", "query"), ("k", "key"), ("v", "value"))


class NoMask:
    """An argument of a named function that holds no mask, whatever it is."""


@dataclass(frozen=True)
class NamedFunction:
    """A function to intercept, as an attribute of its module: ``MODULE:NAME``, ``flash_attn:flash_attn_func@bthd``.

    It is called by a name in its or another module, with q, k, v first: [B, H, T, d], or after ``@bthd`` [B, T, H, d].
    """

    word: str
    owner: Any
    name: str
    by_token: bool

    @classmethod
    def of(cls, word: str) -> NamedFunction:
        """Find the function that a word names.

        Raises:
            UserError: it is not there.
        """
        path, _, layout = str(word).partition("@")
        module, _, name = path.partition(":")
        if layout not in ("", "bthd") or not (module and name):
            raise UserError(f"functions={word}: give MODULE:NAME, or MODULE:NAME@bthd for [B, T, H, d]")
        try:
            owner = _module(module)
        except (ImportError, TypeError) as error:  # the latter of a relative name
            raise UserError(f"functions={word}: {error}; give MODULE:NAME of an installed module") from error
        found = getattr(owner, name, None)
        if not callable(found) or isinstance(found, type):
            raise UserError(f"functions={word}: {module} has no function {name}")
        return cls(path, owner, name, bool(layout))


def _module(name: str) -> ModuleType:
    """Return a module. Of the script that runs it is the one that runs: importing it again would train a second time,
    and make functions that nobody calls."""
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script and name not in sys.modules and not name.startswith("."):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(script):
            return main
    return importlib.import_module(name)


def places_of(function: Callable[..., Any]) -> list[tuple[Any, str]]:
    """Return the modules that have a function, with its name there: ``from MODULE import NAME`` makes such places."""
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    return [(module, name) for module in modules for name, value in list(vars(module).items()) if value is function]


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """In the block, have something in the place of an attribute."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def arguments_of(function: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, as far as its signature tells them; those of ``*more`` by number."""
    try:
        bound = inspect.signature(function).bind(*positional, **named)
    except (TypeError, ValueError):
        return dict(named)
    bound.apply_defaults()
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            given |= {f"{name}[{number}]": one for number, one in enumerate(value)}
        elif kind is not inspect.Parameter.VAR_KEYWORD:
            given[name] = value
    return {**given, **named}


def queries_keys_values(given: Mapping[str, Any], positional: Sequence[Any]) -> list[Tensor] | None:
    """Return q, k and v of a call; None where neither its names nor its first arguments tell them.

    Args:
        given: its arguments by name.
        positional: those that may be q, k and v, in this order.
    """
    by_name = [given.get(short, given.get(long)) for short, long in _NAMES]
    for found in (by_name, list(positional[:3])):
        if len(found) == 3 and all(isinstance(one, Tensor) for one in found):
            return found
    return None


def output_of(result: Any) -> Tensor | None:
    """Return O of what an attention returns: a tensor, or a tuple or list that begins with it; None of anything else"""
    first = result[0] if isinstance(result, tuple | list) and result else result
    return first if isinstance(first, Tensor) else None


def causal_by_options(given: Mapping[str, Any], *, perhaps_masked: bool = False) -> bool | None:
    """Return whether a call was told to be causal; None where only O shows it.

    Beside a mask or a window, which may be the causal one, "not causal" says nothing.
    """
    told = next((given[name] for name in _CAUSAL if name in given), None)
    masked = perhaps_masked or any(given.get(name) is not None for name in (*_MASKS, *_WINDOWS))
    if not told and masked:
        return None
    return None if told is None else bool(told)


def scale_of(given: Mapping[str, Any]) -> Any:
    """Return α as a call was told it; None where it was not."""
    return next((given[name] for name in _SCALES if given.get(name) is not None), None)


def perhaps_masks(given: Mapping[str, Any], qkv: Sequence[Tensor]) -> list[str]:
    """Return the arguments beside q, k and v that may hold a mask for all that is known: a block mask of
    flex_attention, any object, the length of a prefix. Those that :func:`changing` reads are not among them."""
    from flashpoint.other_softmax import CAPS  # few loops need it

    read = {*_CAUSAL, *_SCALES, *_DROPOUT, *_WINDOWS, *CAPS}

    def is_none(name: str, value: Any) -> bool:
        if value is None or isinstance(value, int | float | str):
            return not value or (isinstance(value, bool | str) and not any(part in name for part in _LIKE_MASKS))
        known = isinstance(value, NoMask) or (name in _MASKS and isinstance(value, Tensor))
        return known or any(value is x for x in qkv)

    return [name for name, value in given.items() if name not in read and not is_none(name, value)]


def changing(given: Mapping[str, Any], length: int) -> str | None:
    """Return the argument by which a call is not softmax(QKᵀ·scale)V, causal or not; None where none is known.

    Args:
        given: its arguments by name.
        length: T.
    """
    from flashpoint.other_softmax import other_softmax

    causal = bool(causal_by_options(given))
    here = {name: value for name, value in given.items() if value is not None}
    dropped = _DROPOUT if here.get("training", True) else ()
    for name, value in here.items():
        if (
            (name in dropped and float(value) > 0)
            or (name in _WINDOWS and not _reaches_over(value, length, causal))
            or (name in _MASKS and isinstance(value, Tensor) and not _is_plain(value, length))
        ):
            return name
    return other_softmax(here)


def _reaches_over(window: Any, length: int, causal: bool) -> bool:
    """Return whether a window hides no token, or those alone that a causal mask hides.

    Args:
        window: (left, right), how far a query sees, below 0 or None everything, as flash-attn takes it; or how many
            tokens it sees with its own, 0 or below everything.
    """
    if not isinstance(window, tuple | list):
        return not 0 < int(window) < length
    left, right = (length if side is None or int(side) < 0 else int(side) for side in window)
    return left >= length - 1 and (causal or right == 0 or right >= length - 1)


def _is_plain(mask: Tensor, length: int) -> bool:
    """Return whether a mask closes nothing, or what a causal one does; where it is bool, True may say either."""
    if not mask.is_floating_point() and bool((mask != 0).all()):  # one of padding, of which there is none
        return True
    return masking(mask, length) is not None or (mask.dtype == torch.bool and masking(~mask, length) is not None)


@torch.no_grad()
def masking(mask: Any, length: int) -> bool | None:
    """Return whether a call with this mask is causal; None where it is neither causal nor sees every key.

    Args:
        mask: [..., T, T] as PyTorch's attention takes it: bool, True where a query sees a key, or floating point, which
            is added to the scores. Anything else, as a mask of padding [B, T], is None, too.
        length: T.
    """
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (length, length):
        return None
    if mask.dtype == torch.bool:
        seen = mask
    elif mask.is_floating_point() and bool(((mask == 0) | (mask <= CLOSED)).all()):
        seen = mask == 0
    else:
        return None
    lower = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    if bool((seen == lower).all()):
        return True
    return False if bool(seen.all()) else None


@torch.no_grad()
def masking_of(
    tensors: Sequence[Tensor], told: bool | None, scale: float | None, *, perhaps_masked: bool = False
) -> bool | None:
    """Return whether a call was causal, by what it was told or else by O; None where O is far from either.

    A named function may have its mask, its scale or its layout inside. Some rows of the first sequence show it.

    Args:
        tensors: q, k, v and O, [B, H, T, d] and for keys [B, H_kv, T, d].
        told: None is not told.
        scale: α; None is 1/√d.
        perhaps_masked: whether nearly all of these rows have to agree, in every sequence: masks can differ by sequence.
    """
    q, k, v, _ = tensors
    if q.dim() != 4 or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1] or k.shape != v.shape:
        return bool(told)  # the interceptor says what it does not take
    share = _NEARLY_ALL if perhaps_masked else 0.5
    sequences = [x if perhaps_masked else x[:1] for x in tensors]
    errors = {}
    for causal in (True, False) if told is None else (bool(told),):
        found = [_errors_of_rows(one, causal, scale) for one in zip(*sequences, strict=True)]
        over = [error - ((_NEAR + rounding).clamp_max(_FAR) if perhaps_masked else _FAR) for error, rounding in found]
        errors[causal] = max(float(one.nanquantile(share)) for one in over)
    nearest = min(errors, key=lambda causal: errors[causal])
    return None if errors[nearest] > 0 else nearest


def is_exchanged(tensors: Sequence[Tensor], told: bool | None, scale: float | None) -> bool:
    """Return whether O is attention over what is taken for heads, in nearly all rows, and not over tokens.

    Args:
        tensors, told, scale: as of :func:`masking_of`.
    """
    if any(x.dim() != 4 for x in tensors) or tensors[0].shape[1] == 1 or _fits(tensors, told, scale):
        return False
    return _fits([x.transpose(1, 2) for x in tensors], told, scale)


def _fits(tensors: Sequence[Tensor], told: bool | None, scale: float | None) -> bool:
    taken = is_self_attention(dict(zip(("q", "k", "v", "out"), (x.shape for x in tensors), strict=True)))
    return taken and masking_of(tensors, told, scale, perhaps_masked=True) is not None


@torch.no_grad()
def gradient_of_logsumexp(gradient: Tensor, values: Tensor, kept: Mapping[str, Tensor], form: Form) -> Tensor | None:
    """Return the gradient [N, H, T] of an output that is L, the logarithm of Σⱼ exp(S) of each row; None of another.

    Some rows of the first sequence show it.

    Args:
        gradient, values: of the output, L where they are [B, H, T], [B, T, H] or [B, H, T, 1].
        kept: q and k, [N, H, T, d] and [N, H_kv, T, d], of the first N sequences.
        form: of the call.
    """
    q, k = kept["q"], kept["k"]
    length = q.shape[2]
    rows = torch.linspace(0, length - 1, min(length, _ROWS), device=q.device).long()
    keys = k[0].float().repeat_interleave(q.shape[1] // k.shape[1], 0)
    scores = q[0][:, rows].float() @ keys.mT * form.scale
    scores.masked_fill_((torch.arange(length, device=q.device) > rows[:, None]) & form.is_causal, -torch.inf)
    expected = scores.logsumexp(-1)
    if values.dim() == 4 and values.shape[-1] == 1:
        gradient, values = gradient[..., 0], values[..., 0]
    for turned in (False, True) if values.dim() == 3 else ():
        gradients, found = (x.transpose(1, 2) if turned else x for x in (gradient, values))
        if found.shape[1:] == q.shape[1:3]:
            error = (found[0][:, rows].float() - expected).abs()
            if bool((error <= _NEAR * (1 + expected.abs())).all()):
                return gradients[: len(q)].float().clone(memory_format=torch.contiguous_format)
    return None


def _errors_of_rows(sequence: Sequence[Tensor], causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return how far some rows of O are from what the definition makes of q, k and v, over their norms. Each is
    [H, T, d]. The definition has the sink that the rows show in a head.

    A row that almost cancels counts by the norm that it would have if its terms were independent.

    Returns:
        The error of each head and row, and by how much weights change where scores are rounded to the dtype of O.
    """
    out = sequence[3]
    # Autocast casts what the attention is given to what O has.
    q, k, v = (x.to(out.dtype).float() for x in sequence[:3])
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    rows = torch.linspace(0, q.shape[1] - 1, min(q.shape[1], _ROWS), device=q.device).long()
    scores = q[:, rows] @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    later = (torch.arange(k.shape[1], device=q.device) > rows[:, None]) & causal
    rounding = torch.expm1(scores.masked_fill(later, 0.0).abs().amax(-1) * torch.finfo(out.dtype).eps / 2)
    scores.masked_fill_(later, -torch.inf)
    probs = scores.softmax(-1)
    logsumexp, expected, found = scores.logsumexp(-1), probs @ v, out[:, rows].float()
    beside_sink = torch.sigmoid(logsumexp - sink_of(logsumexp, expected, found)[:, None])
    expected, probs = expected * beside_sink[..., None], probs * beside_sink[..., None]
    size = torch.maximum(expected.norm(dim=-1), (probs.square() @ v.square().sum(-1, keepdim=True))[..., 0].sqrt())
    return (found - expected).norm(dim=-1) / size, rounding
