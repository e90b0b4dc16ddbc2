"""Reads from a call's options how its weights come from q and k, as forms of which O shows the one that is so.

Options have the names of PyTorch, Transformers and flash-attn. A name with two meanings makes two forms.
True of a bool mask may close a pair, and a causal mask of two lengths may begin at either end.

Shapes: B sequences of which the first N are kept, H heads, T_q queries, T_k keys.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashpoint.diagnosis.call import fit_together
from flashpoint.diagnosis.form import Form
from flashpoint.other_softmax import BY_POSITION, CAPS, other_softmax
from flashpoint.watching.agreement import agreeing
from flashpoint.watching.functions import NoMask, SeenCall
from flashpoint.watching.left_out import DROPOUT, LeftOut
from flashpoint.watching.masks import (
    ALL,
    LOWER,
    Pairs,
    by_distance,
    check_size,
    documents,
    joined,
    least,
    masked,
    of_block_mask,
    of_score_mod,
    packed,
    padded,
    window,
)

_CAUSAL = ("causal", "is_causal")
_SCALES = ("softmax_scale", "scale", "sm_scale", "scaling")
_DROPOUTS = ("dropout_p", "dropout", "attn_dropout", "attention_dropout")
_OF_CONFIGURATION = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob", "attn_dropout", "dropout_rate")
"""Names that configurations of models have for the attention's dropout."""
_LIKE_MASKS = ("mask", "bias")
"""Parts of names. What an argument with another name says by True, False or a word is taken to be no mask."""
_NO_MASKS = ("layer", "head", "seed")
"""Parts of names whose numbers close no pair: which layer calls, how many heads there are."""
_WINDOWS = ("window_size", "sliding_window", "window")
_SINKS = ("sinks", "s_aux", "learnable_sink")
_SLOPES = "alibi_slopes"
_ENDS = ("cu_seqlens_q", "cu_seq_lens_q", "cu_seqlens"), ("cu_seqlens_k", "cu_seq_lens_k")
"""Where sequences in a row end, of queries and, where they differ, of keys. Beside them functions take the longest."""
_LONGEST = ("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k")
_UNREAD = ("qv", "attention_chunk")
_CAPS = tuple(name for name in CAPS if name not in _UNREAD)


class _Unlike(LeftOut):
    """O is not what the options say, which make these forms."""

    def __init__(self, why: str, forms: Sequence[Form]) -> None:
        super().__init__(why)
        self.forms = forms


def scale_of(given: Mapping[str, Any], q: Tensor) -> float:
    """Return α as a call was told it, or else 1/√d."""
    scale = next((given[name] for name in _SCALES if given.get(name) is not None), None)
    return float((q.shape[-1] or 1) ** -0.5 if scale is None else scale)


@torch.no_grad()
def of_sdpa(given: Mapping[str, Any], call: SeenCall) -> Form:
    """Return the form of a call of PyTorch's attention.

    Raises:
        LeftOut: O shows another one, or a tensor of it is too large.
    """
    mask = given.get("attn_mask")
    pairs = Pairs(is_causal=bool(given.get("is_causal"))) if mask is None else call.once(masked, mask, call.shape)
    dropped = _dropped(call, float(given.get("dropout_p") or 0))
    form = _form(call, pairs, dropped, scale_of(given, call.q))
    return _shown([form], call, dropped, closely=bool(dropped.p))


@torch.no_grad()
def of_interface(module: Any, mask: Any, given: Mapping[str, Any], call: SeenCall) -> Form:
    """Return the form of a call through Transformers' interface.

    Args:
        module: of the attention, with its configuration.
        mask: [B, 1, T_q, T_k] with all that closes pairs, or one of padding [B, T_k] beside the other options.
        given: the options by name.

    Raises:
        LeftOut: as of :func:`of_sdpa`.
    """
    is_causal, shape = given.get("is_causal"), call.shape
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if hasattr(mask, "mask_mod"):
        each = [of_block_mask(mask, call)]
    elif isinstance(mask, Tensor) and mask.dim() == 4:
        each = [call.once(masked, mask, shape)]
    else:
        size, beside, documents = given.get("sliding_window"), [], packed(given, call)
        if mask is not None:
            beside.append(padded(mask, call))
        if size is not None:
            beside.append(window(call, size - 1, 0 if causal else size - 1))
        causals = _causal(call) if causal else [ALL]
        # PyTorch's attention passes over the positions of documents, and the model may make no mask of them.
        among = [ALL] if documents is ALL else [documents, ALL]
        each = [joined([*beside, *some]) for some in itertools.product(causals, among)]
    if (bias := given.get(BY_POSITION)) is not None:
        each = [one & call.once(masked, bias, shape) for one in each]
    dropped = _dropped(call, float(given.get("dropout") or 0), _remedy(module))
    return _among(each, given, call, dropped)


@torch.no_grad()
def of_named(given: Mapping[str, Any], qkv: Sequence[Tensor], by_token: bool, call: SeenCall) -> Form:
    """Return the form of a call of a function that a user named.

    Args:
        given: its arguments by name.
        qkv: those that are q, k and v.
        by_token: whether they are taken for [B, T, H, d].

    Raises:
        LeftOut: as of :func:`of_sdpa`.
    """
    here = {name: value for name, value in given.items() if value is not None and not any(value is x for x in qkv)}
    masks = {name: value for name, value in here.items() if name not in _READ and _may_be_mask(name, value)}
    read = {name: _readings(call, name, value) for name, value in masks.items()}
    unknown = [name for name, each in read.items() if not each]
    is_causal = next((bool(here[name]) for name in _CAUSAL if name in here), None)
    causal = _causal(call) if is_causal else [ALL] if is_causal is False and not masks else [LOWER, ALL]
    readings = [*(each for each in read.values() if each), *_documents(call, here)]
    readings += [_windows(call, here[name], bool(is_causal)) for name in _WINDOWS if name in here]
    told_to_drop = [float(here[name]) for name in _DROPOUTS if isinstance(here.get(name), int | float)]
    dropped = _dropped(call, max(told_to_drop, default=0.0) if here.get("training", True) else 0.0)
    if (
        is_causal is None and call.shape[2] < call.shape[3]
    ):  # it may be causal as flash-attn is: then O shows that closely
        each = [joined(some) for some in itertools.product([*_causal(call), ALL], *readings)]
        with contextlib.suppress(_Unlike):
            return _among(each, here, call, dropped, closely=True)
    each = [joined(some) for some in itertools.product(causal, *readings)]
    scale, has_scale = scale_of(here, call.q), any(name in here for name in _SCALES)
    exchanged = f"O is softmax(QKᵀ·scale)V of tensors {'[B, H, T, d]; leave out' if by_token else '[B, T, H, d]; give'}"
    try:
        found = _among(each, here, call, dropped, closely=bool(unknown))
    except _Unlike as why:
        if not dropped.p and _is_plain(call, scale, exchanged=True):
            raise LeftOut(f"{exchanged} @bthd in functions=") from None
        if unknown and not dropped.p:
            meaning = f"what {' and '.join(unknown)} means is not known; give it by one of these names"
            raise LeftOut(f"{why}: perhaps a fault, and {meaning}: {KNOWN}") from None
        if own := _untold(why.forms, call, has_scale):
            return own
        if dropped.p:
            raise
        layout = "tensors that take no @bthd" if by_token else "tensors that need @bthd"
        raise LeftOut(f"{why}: perhaps {layout}, a mask or a scale inside, or a fault") from None
    if found.is_plain and not _is_plain(call, scale, exchanged=False) and _is_plain(call, scale, exchanged=True):
        raise LeftOut(f"{exchanged} @bthd in functions=")
    return _untold([found], call, has_scale) or found


_READ = {
    *_CAUSAL, *_SCALES, *_DROPOUTS, *_WINDOWS, *_SINKS, *_CAPS, *_UNREAD, *_ENDS[0], *_ENDS[1], *_LONGEST, _SLOPES,
    "score_mod",
}  # fmt: skip
KNOWN = (
    f"{', '.join((*_CAUSAL, *_SCALES, *_WINDOWS, *_CAPS, *_SINKS, *_DROPOUTS, *_ENDS[0], *_ENDS[1]))}, score_mod, "
    f"{_SLOPES} [H] or [B, H]; or by any name a block_mask, a mask or a bias that fits [B, H, T_q, T_k]"
)
"""What a named function's arguments can say beside q, k and v, as people are told it."""


def _may_be_mask(name: str, value: Any) -> bool:
    """Return whether an argument may hold a mask for all that is known: a tensor, a block mask of flex_attention, any
    object, the length of a prefix."""
    if isinstance(value, int | float | str):
        if any(part in name for part in _NO_MASKS) and not any(part in name for part in _LIKE_MASKS):
            return False
        return bool(value) and not (isinstance(value, bool | str) and not any(part in name for part in _LIKE_MASKS))
    return not isinstance(value, NoMask)


def _among(
    each: Sequence[Pairs],
    given: Mapping[str, Any],
    call: SeenCall,
    dropped: _Dropped,
    *,
    closely: bool = False,
) -> Form:
    """Return the form that O shows, of those with each pairs and the other options."""
    if (unread := other_softmax({name: given.get(name) for name in _UNREAD})) is not None:
        raise LeftOut(f"{unread}, with which it is another attention")
    by_place, caps = [], [float(given.get(name) or 0) for name in _CAPS]
    if given.get(_SLOPES) is not None:
        by_place.append(by_distance(given[_SLOPES], call))
    if given.get("score_mod") is not None:
        cap, pairs = of_score_mod(given["score_mod"], call)
        by_place.append(pairs)
        caps.append(cap)
    sinks = [given[name] for name in _SINKS if given.get(name) is not None]
    sink = sinks[0].detach().float().flatten() if sinks else None
    scale = scale_of(given, call.q)
    forms = [_form(call, joined([one, *by_place]), dropped, scale, max(caps), sink) for one in each]
    closely = closely or sink is not None or not all(form.is_plain for form in forms)
    return _shown(forms, call, dropped, closely=closely)


def _form(
    call: SeenCall, pairs: Pairs, dropped: _Dropped, scale: float, softcap: float = 0.0, sink: Tensor | None = None
) -> Form:
    """Return a form of copies in their least shapes: a causal mask is one by ``is_causal``."""
    causal, seen = call.once(least, pairs.seen, call.shape) if pairs.seen is not None else (False, None)
    form = Form(pairs.is_causal or causal, scale, softcap, pairs.bias, seen, sink, dropped.p, dropped.kept)
    for name, x in form.tensors.items():
        check_size(name, x.shape, x.element_size())
    return form


def _shown(forms: Sequence[Form], call: SeenCall, dropped: _Dropped, *, closely: bool) -> Form:
    """Return the form that O shows."""
    found = agreeing(forms, [call.q, call.k, call.v, call.out], closely=closely, known=call.measured)
    if found is None and dropped.p:
        raise _Unlike(f"{DROPOUT}{dropped.remedy}", forms)
    if found is None:
        expected = list(dict.fromkeys(map(_described, forms)))
        raise _Unlike(f"O is not softmax(QKᵀ·scale)V, {', or '.join(expected[:3])}", forms)
    return found


def _untold(forms: Sequence[Form], call: SeenCall, has_scale: bool) -> Form | None:
    """Return the first form that has another scale, which the call was not told, or another window, as O shows it."""
    from flashpoint.watching.untold import with_scale, with_window  # few loops name a function

    tensors = [call.q, call.k, call.v, call.out]
    scaled = (found for form in forms if not has_scale and (found := with_scale(form, tensors)))
    if (one := next(scaled, None)) or agreeing(forms, tensors, closely=True, known=call.measured):
        return one
    return next((found for form in forms if (found := with_window(form, tensors))), None)


def _is_plain(call: SeenCall, scale: float, *, exchanged: bool) -> bool:
    """Return whether nearly all rows of O are those of causal or full attention, perhaps over what is taken for
    heads."""
    tensors = {name: getattr(call, name) for name in ("q", "k", "v", "out")}
    turned = {name: x.transpose(1, 2) if exchanged else x for name, x in tensors.items()}
    plain = [Form(causal, scale) for causal in (True, False)]
    fits = fit_together({name: x.shape for name, x in turned.items()})
    fits = fits and bool(call.out.isfinite().all(-1).any())  # NaN is like every form
    known = None if exchanged else call.measured
    return fits and agreeing(plain, list(turned.values()), closely=True, known=known) is not None


def _described(form: Form) -> str:
    parts = ["causal" if form.is_causal else "not causal"]
    parts += [f"a soft cap of {form.softcap:g}"] * bool(form.softcap)
    return " with ".join((parts[0], " and ".join([*parts[1:], *form.tensors]))).removesuffix(" with ")


# Options with several meanings.


def _causal(call: SeenCall) -> list[Pairs]:
    """Return what a causal attention closes: of two lengths, as flash-attn or as PyTorch has it."""
    if call.shape[2] == call.shape[3]:
        return [LOWER]
    return [window(call, None, 0), LOWER]


def _windows(call: SeenCall, window_size: Any, causal: bool) -> list[Pairs]:
    """Return what a window may mean. (left, right) is flash-attn's, where below 0 or None is everything. A number is
    how many tokens a query sees with its own, or beside it, where 0 or below is everything."""
    if isinstance(window_size, tuple | list):
        return [window(call, *(None if side is None or int(side) < 0 else int(side) for side in window_size))]
    size = int(window_size)
    if size <= 0:
        return [ALL]
    each = [(left, 0) for left in (size - 1, size)]
    each += [] if causal else [(side, side) for side in (size - 1, size, size // 2)]
    return [window(call, *one) for one in each]


def _documents(call: SeenCall, given: Mapping[str, Any]) -> list[list[Pairs]]:
    """Return the pairs of sequences in a row, as of ``flash_attn_varlen_func``; nothing where there are none."""
    of_queries, of_keys = (next((given[name] for name in names if name in given), None) for names in _ENDS)
    if not isinstance(of_queries, Tensor):
        return []
    of_keys = of_keys if isinstance(of_keys, Tensor) else of_queries
    return [[call.once(documents, of_queries, of_keys, *call.shape[2:])]]


def _readings(call: SeenCall, name: str, value: Any) -> list[Pairs]:
    """Return what an argument of a named function may close or add; nothing where it cannot be read.

    A tensor of any name can be a mask if it has the shape of one.
    """
    if not isinstance(value, Tensor):
        return [of_block_mask(value, call)] if hasattr(value, "mask_mod") else []
    whole = (call.batch, *call.shape[1:])
    shapes = [value]
    if value.dim() == 2 and value.shape == (whole[0], whole[3]):  # of padding
        shapes = [value[:, None, None]] + [value] * (value.shape == whole[2:])
    elif value.dim() == 3 and len(value) == whole[0]:
        shapes = [value[:, None]]
    called_mask = any(part in name for part in _LIKE_MASKS)
    if value.dim() < 2 or not all(map(partial(_fits, whole), shapes)):
        if called_mask:
            raise LeftOut(f"{name} {list(value.shape)}, where [B, H, T_q, T_k] is {list(whole)}")
        return []
    each = [] if called_mask else [ALL]
    for one in shapes:
        each.append(pairs := masked(one, call.shape))
        if not one.is_floating_point() and pairs.seen is not None and not bool(pairs.seen.all()):
            each.append(Pairs(~pairs.seen))  # True closes a pair, as in nn.MultiheadAttention
    return each


def _fits(whole: Sequence[int], mask: Tensor) -> bool:
    sizes = zip(reversed(mask.shape), reversed(whole), strict=False)
    return mask.dim() <= 4 and all(have in (1, want) for have, want in sizes)


# Dropout.


class _Dropped(NamedTuple):
    """p of a call's dropout, the weights that it kept [N, H, T_q, T_k], and how to do without."""

    p: float
    kept: Tensor | None
    remedy: str


def _dropped(call: SeenCall, given_p: float, remedy: str = "") -> _Dropped:
    """Return what a call dropped, as F.dropout was seen to do inside it, or as PyTorch draws it on a CPU."""
    shape = (call.batch, *call.shape[1:])
    for weights, p, kept in call.dropped:
        if weights == shape or weights == (shape[0] * shape[1], *shape[2:]):
            return _Dropped(p, kept.reshape(shape)[: call.shape[0]].clone(), remedy)
    if not given_p:
        return _Dropped(0.0, None, remedy)
    if call.generator is None or call.q.device.type != "cpu":
        raise LeftOut(f"{DROPOUT}{remedy}")
    generator = torch.Generator()
    generator.set_state(call.generator)
    drawn = torch.empty(shape, dtype=call.out.dtype).bernoulli_(1 - given_p, generator=generator)
    return _Dropped(given_p, drawn[: call.shape[0]] != 0, remedy)


def _remedy(module: Any) -> str:
    of_config = vars(getattr(module, "config", None) or object)
    option = next((name for name in _OF_CONFIGURATION if of_config.get(name)), None)
    return "" if option is None else f", by {option}=0.0 in the configuration of the model"
