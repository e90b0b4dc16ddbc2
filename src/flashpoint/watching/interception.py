"""Has the calls of attentions come to an interceptor: PyTorch's and this package's, those that models ask Transformers'
interface for, and functions that a user names."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from flashpoint.diagnosis.form import Form
from flashpoint.files import CONFIGS
from flashpoint.watching.functions import (
    NamedFunction,
    arguments_of,
    causal_by_options,
    changing,
    is_exchanged,
    masking,
    masking_of,
    output_of,
    perhaps_masks,
    places_of,
    queries_keys_values,
    replaced,
    scale_of,
)
from flashpoint.watching.interceptor import Interceptor
from flashpoint.watching.left_out import DROPOUT

if TYPE_CHECKING:
    from flashpoint.numerics.variant import AttentionVariant

_SDPA = F.scaled_dot_product_attention
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob", "attn_dropout")
"""Names that configurations of models have for the attention's dropout."""


def intercept(interceptor: Interceptor, functions: Sequence[NamedFunction]) -> Callable[[], None]:
    """Have calls of PyTorch's and this package's attention, of Transformers' interface and of named functions come to
    the interceptor, until what is returned is called. Compiled parts of the model run uncompiled meanwhile."""
    with contextlib.ExitStack() as entered:
        entered.callback(interceptor.remove_hooks)
        modes = _get_current_function_mode_stack()
        _set_stack([])  # the first stance imports the compiler, which PyTorch 2.6 cannot do under a device "meta"
        try:
            stance = torch.compiler.set_stance("force_eager")
        finally:
            _set_stack(modes)
        entered.enter_context(stance)
        for named in functions:
            original, intercepting = getattr(named.owner, named.name), intercepting_function(interceptor, named)
            for module, name in places_of(original):
                entered.enter_context(replaced(module, name, intercepting))
        if (asked := interface_in_use()) is not None:
            by = intercepting_interface(interceptor, asked.get_interface)
            entered.enter_context(replaced(asked, "get_interface", by))
        entered.callback(CallMode(interceptor).insert())
        return entered.pop_all().close
    raise AssertionError("unreachable")


class CallMode(TorchFunctionMode):
    """Sees calls of PyTorch's attention and of :func:`flashpoint.attention`."""

    def __init__(self, interceptor: Interceptor) -> None:
        super().__init__()
        self._interceptor = interceptor
        self.ended = False

    def insert(self) -> Callable[[], None]:
        """See calls from now on until what is returned is called.

        The mode lies below those of the loop, as of ``with torch.device(…)``: they may begin and end meanwhile, and
        PyTorch ends whichever is on top.
        """
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # which PyTorch wants at the bottom
        stack = [mode for mode in _get_current_function_mode_stack() if mode is not default]
        _set_stack([*([] if default is None else [default]), self, *stack])
        return self._remove

    def _remove(self) -> None:
        self.ended = True
        forget_ended()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # of nn.MultiheadAttention: inside, no mode sees calls
            packed = kwargs.get("in_proj_weight", args[5] if len(args) > 5 else None)
            weights = [packed, *(kwargs.get(f"{name}_proj_weight") for name in "qkv")]
            known = tuple(weight for weight in weights if weight is not None)
            with replaced(F, _SDPA.__name__, self._sdpa), self._interceptor.calls_with(known):
                result = func(*args, **kwargs)
            if kwargs.get("need_weights") and self._interceptor.listening:
                self._interceptor.miss("nn.MultiheadAttention with need_weights=True, which calls no attention")
            return result
        if func is not _SDPA and not _is_drop_in(func):
            return func(*args, **kwargs)
        name = "scaled_dot_product_attention" if func is _SDPA else "flashpoint.attention"
        return self._interceptor.call(name, func, args, kwargs, lambda out: self._keep(func, args, kwargs, out))

    def _keep(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = {**dict(zip(_SDPA_ARGUMENTS, args, strict=False)), **kwargs}
        mask = given.get("attn_mask")
        causal = bool(given.get("is_causal")) if mask is None else masking(mask, given["query"].shape[-2])
        if given.get("dropout_p"):
            self._interceptor.miss(f"scaled_dot_product_attention: {DROPOUT}")
        elif causal is None:
            self._interceptor.miss("scaled_dot_product_attention: a mask beside the causal one")
        else:
            name = "sdpa" if func is _SDPA else _variant_name(given["variant"])
            tensors = {"q": given["query"], "k": given["key"], "v": given["value"], "out": out}
            form = _form(causal, given.get("scale"), given["query"])
            self._interceptor.keep(name, tensors, form, in_order=True)

    def _sdpa(self, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(_SDPA, (), args, kwargs)


def forget_ended() -> None:
    """Take the modes that have ended from this thread's. Another thread may have ended one, which has a stack of its
    own."""
    stack = _get_current_function_mode_stack()
    left = [mode for mode in stack if not (isinstance(mode, CallMode) and mode.ended)]
    if len(left) < len(stack):
        _set_stack(left)


def _set_stack(modes: list[Any]) -> None:
    """Replace PyTorch's stack of function modes; the last one is on top."""
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def _is_drop_in(function: Any) -> bool:
    """Return whether a function is this package's attention, which nobody calls before it is loaded."""
    return function is getattr(sys.modules.get("flashpoint.drop_in"), "attention", _SDPA)


@functools.cache
def _variant_name(variant: AttentionVariant | str) -> str:
    """Return the name of a variant with what differs from its file: δ of two such attentions is not the same."""
    if isinstance(variant, str):
        return variant
    from flashpoint.numerics.named import named_by_choices

    return named_by_choices(variant, CONFIGS / "attn").title


def interface_in_use() -> Any:
    """Return the class through which models ask for their attention; None where no model of Transformers is loaded."""
    module = sys.modules.get("transformers.modeling_utils")  # transformers itself loads it late, at its first use
    found = getattr(module, "AttentionInterface", None)
    return found if hasattr(found, "get_interface") else None


def intercepting_interface(interceptor: Interceptor, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method in the place of ``get_interface``: the functions that it hands out are intercepted."""

    def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(interface, name, default)

        def called(*positional: Any, **options: Any) -> Any:
            return interceptor.call(
                name, function, positional, options, partial(keep, name, function, positional, options)
            )

        return called

    def keep(
        name: str, function: Callable[..., Any], positional: Sequence[Any], options: dict[str, Any], result: Any
    ) -> None:
        given = arguments_of(function, positional, options)
        module, *qkv, mask = (*positional, *[None] * 5)[:5]
        module, mask = given.get("module", module), given.get("attention_mask", mask)
        found, out = queries_keys_values(given, qkv), output_of(result)
        if found is None or out is None:
            interceptor.miss(f"{name}: called without q, k, v, or returns no O")
            return
        q, k, v = found
        causal, reason = _masked(module, q.shape[2], mask, given)
        by_head = [q, k, v, out.transpose(1, 2) if out.dim() == 4 else out]
        if not reason and masking_of(by_head, causal, given.get("scaling")) is None:
            told = "causal" if causal else "not causal"
            reason = f"O is not softmax(α·QKᵀ)V, {told}"
        if reason:
            interceptor.miss(f"{name}: {reason}")
        else:
            tensors = {"q": q, "k": k, "v": v, "out": out}
            form = _form(causal, given.get("scaling"), q)
            interceptor.keep(name, tensors, form, by_token=("out",), result=result)

    return get_interface


def _masked(module: Any, length: int, mask: Any, given: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a call is causal, and why it is not recorded; the latter is empty where it is."""
    if given.get("dropout"):
        of_config = vars(getattr(module, "config", None) or object)
        by = next(
            (f", by {name}=0.0 in the configuration of the model" for name in _DROPOUTS if of_config.get(name)), ""
        )
        return False, f"{DROPOUT}{by}"
    from flashpoint.other_softmax import other_softmax  # few loops need it

    if (changed := other_softmax(given)) is not None:
        return False, f"{changed}, which changes the softmax"
    if mask is not None:
        causal = masking(mask, length) if getattr(mask, "ndim", 0) == 4 else None
        return bool(causal), "" if causal is not None else "a mask beside the causal one"
    if _is_packed(given):
        return False, "packed sequences"
    window = given.get("sliding_window")
    if window is not None and window < length:
        return False, f"a window of {window} tokens"
    told = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if told is None else told), ""


def _is_packed(given: dict[str, Any]) -> bool:
    """Return whether a call without a mask has several sequences in a row, as FlashAttention takes them. Then positions
    begin anew, or more than the beginning and the end of one sequence are told."""
    positions, ends = given.get("position_ids"), given.get("cu_seq_lens_q")
    if isinstance(positions, Tensor) and positions.dim() == 2 and bool((positions.diff(dim=-1) < 1).any()):
        return True
    return isinstance(ends, Tensor) and ends.numel() > 2


def intercepting_function(interceptor: Interceptor, named: NamedFunction) -> Callable[..., Any]:
    """Return a function in the place of a named one: its calls are intercepted."""
    function = getattr(named.owner, named.name)

    def called(*positional: Any, **options: Any) -> Any:
        def keep(result: Any) -> None:
            _keep_named(interceptor, named, arguments_of(function, positional, options), positional, result)

        return interceptor.call(named.word, function, positional, options, keep)

    return called


def _keep_named(
    interceptor: Interceptor, named: NamedFunction, given: dict[str, Any], positional: Sequence[Any], result: Any
) -> None:
    qkv, out = queries_keys_values(given, positional), output_of(result)
    if qkv is None:
        interceptor.miss(f"{named.word}: called without q, k, v as its first three arguments, or by these names")
        return
    if out is None:
        interceptor.miss(f"{named.word}: returns {type(result).__name__}, where O or a tuple with O first is read")
        return
    scale = scale_of(given)
    tensors = dict(zip(("q", "k", "v", "out"), (*qkv, out), strict=True))
    ordered = [x.transpose(1, 2) if named.by_token else x for x in tensors.values()]
    if (by := changing(given, ordered[0].shape[-2])) is not None:
        interceptor.miss(f"{named.word}: {by}, where only softmax(QKᵀ·scale)V is recorded, causal or not")
        return
    masks = perhaps_masks(given, qkv)
    told = causal_by_options(given, perhaps_masked=bool(masks))
    is_causal = masking_of(ordered, told, scale, perhaps_masked=bool(masks))
    if is_exchanged(ordered, told, scale):
        layout, remedy = ("[B, H, T, d]", "leave out") if named.by_token else ("[B, T, H, d]", "give")
        interceptor.miss(f"{named.word}: O is softmax(QKᵀ·scale)V of tensors {layout}; {remedy} @bthd in functions=")
    elif is_causal is None:
        mask = f"a mask by {', '.join(masks)}" if masks else "a mask"
        layout = "tensors that take no @bthd" if named.by_token else "tensors that need @bthd"
        perhaps = f"{layout}, {mask}, a scale inside, or a fault"
        interceptor.miss(f"{named.word}: O is not softmax(QKᵀ·scale)V, causal or not: {perhaps}")
    else:
        by_token = tuple(tensors) if named.by_token else ()
        form = _form(is_causal, scale, tensors["q"])
        interceptor.keep(named.word, tensors, form, by_token=by_token, result=result)


def _form(is_causal: bool, scale: Any, q: Tensor) -> Form:
    """Return the form of a call of queries [..., d]; a scale of None is 1/√d."""
    return Form(is_causal, (q.shape[-1] or 1) ** -0.5 if scale is None else float(scale))
