"""Files of tensors that are read for a model: each has to hold the model's own tensors, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from flashpoint.errors import UserError, one_line
from flashpoint.files import open_tensors

_NAMES = {torch.float32: "F32", torch.int64: "I64"}
"""What such a file calls a dtype."""


@dataclass(frozen=True)
class Form:
    """What a tensor has to be."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{_NAMES[self.dtype]} {list(self.shape)}"


Forms = Mapping[str, Form]
"""By the tensor's name."""


def read_tensors(path: Path, forms: Forms, remedy: str, beside: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a file, in host memory. Nothing is read of a file that holds others.

    Args:
        beside: what names of tensors begin with that are none of the model's, and may be there.

    Raises:
        UserError: the file cannot be read, or a tensor is missing, of another form or of no model like this. The
            message names the file and the tensor.
    """
    try:
        with open_tensors(path) as file:
            names = sorted(file.keys())
            found = {name: file.get_slice(name) for name in names}
            told = {name: f"{one.get_dtype()} {one.get_shape()}" for name, one in found.items()}
            if wrong := _wrong(told, forms, beside):
                raise UserError(f"{path}: {wrong}; {remedy}")
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: {one_line(error)}; {remedy}") from error


def _wrong(told: Mapping[str, str], forms: Forms, beside: str | None) -> str | None:
    for name, form in forms.items():
        if told.get(name) != str(form):
            return f"{name}: {told.get(name, 'missing')}, expected {form}"
    others = (name for name in told if name not in forms and not (beside and name.startswith(beside)))
    return next((f"{name}: no tensor of this model" for name in others), None)


def check_finite(path: Path, tensors: Mapping[str, Tensor], names: Iterable[str], remedy: str) -> None:
    """Refuse NaN and infinity in the named tensors of a file: of a run that had computed none by then.

    Raises:
        UserError: some tensor holds one, with file and tensor.
    """
    for name in names:
        if not tensors[name].isfinite().all():
            raise UserError(f"{path}: {name}: holds NaN or infinity, before which the run had computed none; {remedy}")
