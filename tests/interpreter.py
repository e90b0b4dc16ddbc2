"""Triton's interpreter without the work that it does again and again: more than half of its time.

What is replaced is private to Triton. A version that calls it otherwise is slow, and computes the same.
"""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_NAMES = ("_patch_lang", "_get_np_dtype", "_LangPatchScope")
_patch_language, _in_numpy, _nothing_to_restore = (getattr(interpreter, name, None) for name in _NAMES)
_NUMPY: dict[tl.dtype, Any] = {}


def work_once() -> None:
    """For all kernels of this process."""
    if _patch_language and _in_numpy and _nothing_to_restore:
        interpreter._patch_lang, interpreter._get_np_dtype = _patch_once, _in_numpy_once


def _patch_once(function: Any) -> Any:
    """A kernel finds the language's functions replaced; so does what it calls, which Triton replaces them for again."""
    if tl.core.is_builtin(tl.load) or tl.core.is_builtin(tl.core.load):
        return _patch_language(function)
    return _nothing_to_restore()


def _in_numpy_once(dtype: tl.dtype) -> Any:
    """Triton makes a table of all types for every one that it looks up."""
    element = dtype.scalar
    if element.is_ptr():
        return _in_numpy(dtype)
    if element not in _NUMPY:
        _NUMPY[element] = _in_numpy(element)
    return _NUMPY[element]
