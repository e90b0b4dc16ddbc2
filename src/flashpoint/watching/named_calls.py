"""Calls of an attention function that a user names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flashpoint.watching.functions import (
    NamedFunction,
    arguments_of,
    changing,
    masking_of,
    output_of,
    perhaps_masks,
    queries_keys_values,
    scale_of,
    told_causal,
)
from flashpoint.watching.interceptor import Interceptor


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
    scale = scale_of(given)
    tensors = dict(zip(("q", "k", "v", "out"), (*qkv, out), strict=True))
    ordered = [x.transpose(1, 2) if named.by_token else x for x in tensors.values()]
    if (by := changing(given, ordered[0].shape[-2])) is not None:
        interceptor.miss(f"{named.word}: {by}, where only softmax(QKᵀ·scale)V is recorded, causal or not")
        return
    masks = perhaps_masks(given, qkv)
    told = told_causal(given, perhaps_masked=bool(masks))
    is_causal = masking_of(ordered, told, scale, perhaps_masked=bool(masks))
    if is_causal is None:
        mask = f"a mask by {', '.join(masks)}" if masks else "a mask"
        perhaps = f"tensors that need @bthd, {mask}, a scale inside, or a fault"
        interceptor.miss(f"{named.word}: O is not softmax(QKᵀ·scale)V, causal or not: {perhaps}")
    else:
        interceptor.keep(named.word, tensors, is_causal, scale, by_token=tuple(tensors) if named.by_token else ())
