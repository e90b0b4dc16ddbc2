"""Calls of an attention function that a user names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flashpoint.capture.functions import (
    NamedFunction,
    arguments_of,
    changing,
    masking_of,
    output_of,
    queries_keys_values,
    told_causal,
)

if TYPE_CHECKING:
    from flashpoint.capture.interceptor import Interceptor


def intercepting_function(interceptor: Interceptor, named: NamedFunction) -> Callable[..., Any]:
    """Return a function in the place of a named one: its calls are intercepted."""
    function = getattr(named.owner, named.name)

    def called(*positional: Any, **options: Any) -> Any:
        def keep(result: Any) -> None:
            _keep(interceptor, named, arguments_of(function, positional, options), positional, result)

        return interceptor.call(named.word, function, positional, options, keep)

    return called


def _keep(
    interceptor: Interceptor, named: NamedFunction, given: dict[str, Any], positional: Sequence[Any], result: Any
) -> None:
    qkv, out = queries_keys_values(given, positional), output_of(result)
    if qkv is None:
        interceptor.miss(f"{named.word}: called without q, k, v as its first three arguments, or by these names")
        return
    if out is None:
        interceptor.miss(f"{named.word}: returns {type(result).__name__}, where O or a tuple with O first is read")
        return
    scale = given.get("softmax_scale", given.get("scale"))
    tensors = dict(zip(("q", "k", "v", "out"), (*qkv, out), strict=True))
    ordered = [x.transpose(1, 2) if named.by_token else x for x in tensors.values()]
    if (by := changing(given, ordered[0].shape[-2])) is not None:
        interceptor.miss(f"{named.word}: {by}, where only softmax(QKᵀ·scale)V is recorded, causal or not")
        return
    is_causal = masking_of(ordered, told_causal(given), scale)
    if is_causal is None:
        interceptor.miss(f"{named.word}: O is not softmax(QKᵀ·scale)V, causal or not: @bthd, a mask, a scale?")
    else:
        interceptor.keep(named.word, tensors, is_causal, scale, by_token=tuple(tensors) if named.by_token else ())
