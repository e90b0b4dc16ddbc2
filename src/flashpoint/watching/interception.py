"""Has the calls of attentions come to an interceptor: PyTorch's and this package's, those that models ask Transformers'
interface for, and functions that a user names."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from flashpoint.diagnosis.form import Form
from flashpoint.files import CONFIGS
from flashpoint.watching.functions import (
    NamedFunction,
    SeenCall,
    arguments_of,
    output_of,
    places_of,
    queries_keys_values,
    replaced,
)
from flashpoint.watching.interceptor import Interceptor
from flashpoint.watching.left_out import LeftOut

if TYPE_CHECKING:
    from flashpoint.numerics.variant import AttentionVariant

_SDPA = torch._C._nn.scaled_dot_product_attention
"""PyTorch's own: a program may have put another one in its place in ``F`` before this module is imported."""
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DROPOUT_ARGUMENTS = ("input", "p", "training", "inplace")


def intercept(interceptor: Interceptor, functions: Sequence[NamedFunction]) -> Callable[[], None]:
    """Have calls of PyTorch's and this package's attention, of Transformers' interface and of named functions come to
    the interceptor, until what is returned is called. Compiled parts of the model run uncompiled meanwhile."""
    with contextlib.ExitStack() as entered:
        entered.callback(interceptor.remove_hooks)
        # The first stance imports the compiler, which PyTorch 2.6 cannot do under a device "meta".
        with _only_modes(lambda _: False):
            stance = torch.compiler.set_stance("force_eager")
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
        # The watch's own operations come here, too: nearly all of them leave at once.
        if not isinstance(func, FunctionType) and func is not _SDPA and func is not torch.dropout:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # of nn.MultiheadAttention: inside, no mode sees calls
            packed = kwargs.get("in_proj_weight", args[5] if len(args) > 5 else None)
            weights = [packed, *(kwargs.get(f"{name}_proj_weight") for name in "qkv")]
            known = tuple(weight for weight in weights if weight is not None)
            inside = partial(self._sdpa, F.scaled_dot_product_attention)  # which another context may have replaced
            with replaced(F, _SDPA.__name__, inside), self._interceptor.calls_with(known):
                result = func(*args, **kwargs)
            if kwargs.get("need_weights") and self._interceptor.listening:
                self._interceptor.miss(
                    "nn.MultiheadAttention with need_weights=True, which calls no attention; give need_weights=False"
                )
            return result
        if func is F.dropout or func is torch.dropout:
            kept = func(*args, **kwargs)
            self._interceptor.see_dropout({**dict(zip(_DROPOUT_ARGUMENTS, args, strict=False)), **kwargs}, kept)
            return kept
        if func is not _SDPA and not _is_drop_in(func):
            return func(*args, **kwargs)
        return self._sdpa(func, *args, **kwargs)

    def _sdpa(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        given = _with_plain_mask({**dict(zip(_SDPA_ARGUMENTS, args, strict=False)), **kwargs})
        name = "flashpoint.attention" if "variant" in given else _SDPA.__name__
        keep = partial(self._keep, given)
        return self._interceptor.call(name, func, args, kwargs, keep, draws=bool(given.get("dropout_p")))

    def _keep(self, given: dict[str, Any], out: Any) -> None:
        name = _variant_name(given["variant"]) if "variant" in given else "sdpa"
        tensors = {"q": given["query"], "k": given["key"], "v": given["value"], "out": out}
        self._interceptor.keep(name, tensors, partial(_form_of_sdpa, given), in_order=True)


def _with_plain_mask(given: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments with a mask in the place of PyTorch's ``CausalBias``, which holds no numbers."""
    mask = given.get("attn_mask")
    known = sys.modules.get("torch.nn.attention.bias")  # loaded, where there is such a one
    if known is None or not isinstance(mask, known.CausalBias):
        return given
    if mask.seq_len_q == mask.seq_len_kv or mask.variant == known.CausalVariant.UPPER_LEFT:
        return {**given, "attn_mask": None, "is_causal": True}
    return {**given, "attn_mask": mask._materialize(given["query"].device)}


def _form_of_sdpa(given: dict[str, Any], call: SeenCall) -> Form:
    if given.get("attn_mask") is None and not given.get("dropout_p"):
        scale = given.get("scale")
        return Form(bool(given.get("is_causal")), (call.q.shape[-1] or 1) ** -0.5 if scale is None else float(scale))
    from flashpoint.watching import forms  # a plain loop does without

    return forms.of_sdpa(given, call)


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


@contextlib.contextmanager
def _only_modes(kept: Callable[[Any], bool]) -> Iterator[None]:
    """In the block, have these of this thread's function modes alone."""
    modes = _get_current_function_mode_stack()
    _set_stack([mode for mode in modes if kept(mode)])
    try:
        yield
    finally:
        _set_stack(modes)


def _unseen() -> contextlib.AbstractContextManager[None]:
    """In the block, do what no mode of a watch is shown: each operation that comes to it takes twice as long."""
    return _only_modes(lambda mode: not isinstance(mode, CallMode))


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
            def keep_result(result: Any) -> None:
                with _unseen():
                    keep(name, function, positional, options, result)

            draws = bool(options.get("dropout"))
            return interceptor.call(name, function, positional, options, keep_result, draws=draws)

        return called

    def keep(
        name: str, function: Callable[..., Any], positional: Sequence[Any], options: dict[str, Any], result: Any
    ) -> None:
        from flashpoint.watching import forms

        given = arguments_of(function, positional, options)
        module, *qkv, mask = (*positional, *[None] * 5)[:5]
        module, mask = given.get("module", module), given.get("attention_mask", mask)
        found, out = queries_keys_values(given, qkv), output_of(result)
        if found is None or out is None:
            raise LeftOut("called without q, k, v, or returns no O")
        tensors = dict(zip(("q", "k", "v", "out"), (*found, out), strict=True))
        read = partial(forms.of_interface, module, mask, given)
        interceptor.keep(name, tensors, read, by_token=("out",), result=result)

    return get_interface


def intercepting_function(interceptor: Interceptor, named: NamedFunction) -> Callable[..., Any]:
    """Return a function in the place of a named one: its calls are intercepted."""
    function = getattr(named.owner, named.name)

    def called(*positional: Any, **options: Any) -> Any:
        def keep(result: Any) -> None:
            with _unseen():
                _keep_named(interceptor, named, arguments_of(function, positional, options), positional, result)

        return interceptor.call(named.word, function, positional, options, keep)

    return called


def _keep_named(
    interceptor: Interceptor, named: NamedFunction, given: dict[str, Any], positional: Sequence[Any], result: Any
) -> None:
    from flashpoint.watching import forms

    qkv, out = queries_keys_values(given, positional), output_of(result)
    if qkv is None:
        raise LeftOut(
            "called without q, k, v as its first three arguments, or by these names; name a function of your own that "
            "takes them and calls it"
        )
    if out is None:
        raise LeftOut(
            f"returns {type(result).__name__}, where O or a tuple with O first is read; name a function of your own "
            "that calls it and returns O"
        )
    tensors = dict(zip(("q", "k", "v", "out"), (*qkv, out), strict=True))
    by_token = tuple(tensors) if named.by_token else ()
    read = partial(forms.of_named, given, qkv, named.by_token)
    interceptor.keep(named.word, tensors, read, by_token=by_token, result=result)
