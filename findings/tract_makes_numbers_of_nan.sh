#!/usr/bin/env bash
# tract 0.23.9: the sigmoid and tanh of NaN are numbers in FP32, and in FP16 no sigmoid is below 0.001.
#
# A NaN in a weight is to reach the outputs of a network, where one looks for it, and a sigmoid is to close a gate: that
# of −20 is 2e-9, and 0 in FP16. So ONNX has it, and so one may expect it of a runtime. tract clamps the input to where
# its polynomials hold, and NaN becomes the lower end: in FP32 its sigmoid is 5e-7, and its tanh −1. By the same clamp
# no sigmoid is below 5e-7 in FP32, nor below 0.001 in FP16, where 1,000 closed gates let through as much as an open one.
# Softplus of 12 is infinite in FP16. Max, Min, Clip, Relu and the pools pass over NaN as well.
#
# Seen with tract 0.23.9, onnx 1.23.2, numpy 2.4.6 and Python 3.11, 2026-11-30. Each function of NaN, −1,000, −20 and
# 12; in brackets that of ONNX's reference:
#
#   Sigmoid float32: 4.8e-07 4.8e-07 4.8e-07 1 (nan 0 2.1e-09 1)
#   Sigmoid float16: nan 0.00098 0.00098 1 (nan 0 0 1)
#   Tanh float32: -1 -1 -1 1 (nan -1 -1 1)
#   Tanh float16: nan -1 -1 1 (nan -1 -1 1)
#   Softplus float16: nan 0 0 inf (nan 0 0 12)
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tract==0.23.9 onnx==1.23.2 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math
import warnings

import numpy as np
import onnx
import tract
from onnx import helper
from onnx.reference import ReferenceEvaluator

warnings.simplefilter("ignore")


def outputs(operator, dtype):
    """What tract and ONNX's reference make of the four numbers."""
    numbers = np.array([math.nan, -1_000, -20, 12], dtype)
    x, y = (helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(numbers.dtype), [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "graph", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, "model.onnx")
    runnable = tract.onnx().load("model.onnx").into_model().into_runnable()
    return runnable.run([numbers])[0].to_numpy(), ReferenceEvaluator(model).run(None, {"x": numbers})[0]


seen = {}
single, half = np.float32, np.float16
for operator, dtype in (("Sigmoid", single), ("Sigmoid", half), ("Tanh", single), ("Tanh", half), ("Softplus", half)):
    ours, reference = seen[operator, dtype] = outputs(operator, dtype)
    ours, reference = (" ".join(f"{float(value):.2g}" for value in values) for values in (ours, reference))
    print(f"{operator} {dtype.__name__}: {ours} ({reference})")
numbers = all(0 < seen["Sigmoid", single][0][:3]) and seen["Tanh", single][0][0] < -0.99
same = numbers and seen["Sigmoid", half][0][1] > 5e-4 and math.isinf(seen["Softplus", half][0][3])
right = all(math.isnan(reference[0]) for _, reference in seen.values())
raise SystemExit(0 if same and right else "changed")
PY
cd "$folder"
venv/bin/python program.py
