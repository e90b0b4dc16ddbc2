#!/usr/bin/env bash
# safetensors 0.8.0: numpy arrays that are transposed, or slices, are saved with their numbers in another order.
#
# A checkpoint that goes from PyTorch to JAX has its matrices transposed on the way, and numpy's x.T is a view. So one
# may expect a saved view to be loaded with the numbers that it has, as 0.7.0 does, or to be refused, as
# safetensors.torch does. safetensors.numpy writes the memory from the view's first number on, in the shape of the
# view: the shape is right, and the numbers stand in other places. A slice comes back with numbers that it had left
# out. Nothing warns: a model that is loaded from it has norms and histograms as before, and predicts nothing.
# safetensors.torch forgets a conjugation, which is a mark on a view, too. numpy.ascontiguousarray(x), or
# tensor.resolve_conj(), helps.
#
# Seen with safetensors 0.8.0 and 0.7.0, numpy 2.4.6, torch 2.13.0 and Python 3.11, 2026-11-30. Whether what is loaded
# equals what was saved:
#
#   0.7.0 numpy: contiguous True, transposed True, Fortran order True, every other column True
#   0.8.0 numpy: contiguous True, transposed False, Fortran order False, every other column False
#   0.8.0 torch: contiguous True, transposed refused, conjugate False
#   [[0, 1, 2], [3, 4, 5]].T comes back as [[0, 1], [2, 3], [4, 5]]
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/before" safetensors==0.7.0
cat > "$folder/program.py" <<'PY'
import sys

import numpy
import safetensors
import safetensors.numpy

x = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
saved = {"contiguous": x, "transposed": x.T, "Fortran order": numpy.asfortranarray(x), "every other column": x[:, ::2]}
loaded = safetensors.numpy.load(safetensors.numpy.save(saved))
seen = [bool((loaded[name] == array).all()) and loaded[name].shape == array.shape for name, array in saved.items()]
print(f"{safetensors.__version__} numpy: " + ", ".join(f"{name} {same}" for name, same in zip(saved, seen)))
if safetensors.__version__ == "0.7.0":
    raise SystemExit(0 if seen == [True] * 4 else "changed")

import safetensors.torch
import torch


def kept(tensor):
    try:
        return torch.equal(safetensors.torch.load(safetensors.torch.save({"x": tensor}))["x"], tensor)
    except ValueError:
        return "refused"


y = torch.arange(6.0).reshape(2, 3)
of_torch = {"contiguous": kept(y), "transposed": kept(y.T), "conjugate": kept(torch.complex(y, y + 1).conj())}
print("0.8.0 torch: " + ", ".join(f"{name} {value}" for name, value in of_torch.items()))
small = numpy.arange(6).reshape(2, 3)
back = safetensors.numpy.load(safetensors.numpy.save({"x": small.T}))["x"].tolist()
print(f"{small.tolist()}.T comes back as {back}")
same = seen == [True, False, False, False] and list(of_torch.values()) == [True, "refused", False]
raise SystemExit(0 if same and back == [[0, 1], [2, 3], [4, 5]] else "changed")
PY
PYTHONPATH="$folder/before" "$folder/venv/bin/python" "$folder/program.py"
"$folder/venv/bin/python" "$folder/program.py"
