"""Triton's interpreter without the work that it does again and again, or for nothing: three quarters of its time.

What is replaced is private to Triton. A version that calls it otherwise is slow, and computes the same.
"""

from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_NAMES = ("_patch_lang", "_get_np_dtype", "_LangPatchScope")
_patch_language, _in_numpy, _nothing_to_restore = (getattr(interpreter, name, None) for name in _NAMES)
_check_overflow = getattr(TritonSemantic, "binary_op_sanitize_overflow_impl", None)
_make_block_type, _make_tensor = tl.block_type.__init__, tl.tensor.__init__
_NUMPY: dict[tl.dtype, Any] = {}
_BLOCK_TYPES: dict[Any, dict[str, Any]] = {}
_SHAPES: dict[str, dict[str, Any]] = {}


def work_once() -> None:
    """For all kernels of this process."""
    if _patch_language and _in_numpy and _nothing_to_restore:
        interpreter._patch_lang, interpreter._get_np_dtype = _patch_once, _in_numpy_once
    if _check_overflow:
        TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow_to_tell_it
    tl.block_type.__init__, tl.tensor.__init__ = _make_block_type_once, _make_tensor_with_a_shape


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


def _check_overflow_to_tell_it(self: TritonSemantic, *operands: Any) -> None:
    """Triton computes in 64 bits whether an operation overflows, and then asserts it in its debug mode alone."""
    if self.builder.options.debug:
        _check_overflow(self, *operands)


def _make_block_type_once(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    key = type(element_ty), element_ty.name, tuple(shape)
    if key not in _BLOCK_TYPES:
        _make_block_type(self, element_ty, shape)
        _BLOCK_TYPES[key] = dict(vars(self))
    vars(self).update(_BLOCK_TYPES[key], element_ty=element_ty)


def _make_tensor_with_a_shape(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """Numbers and tuples of Triton's own are made for the shape of every tensor; the name of a type has its shape."""
    if type.name not in _SHAPES:
        _make_tensor(self, handle, type)
        _SHAPES[type.name] = {**vars(self), "handle": None}
    vars(self).update(_SHAPES[type.name], handle=handle, type=type, dtype=type.scalar)
