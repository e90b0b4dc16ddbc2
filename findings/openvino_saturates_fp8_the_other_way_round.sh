#!/usr/bin/env bash
# openvino 2026.4.1: a cast to FP8 gives NaN where ONNX asks for 448, and a quantisation to FP8 gives -448 for NaN.
#
# ONNX's Cast and QuantizeLinear to FP8 have the attribute saturate. By its default of 1 what lies beyond the largest
# number becomes that number; by 0 it becomes NaN in E4M3, infinity in E5M2. So one may expect either of OpenVINO, as
# onnxruntime and ONNX's reference have it. On a CPU OpenVINO reads the attribute in neither. Its Cast never saturates:
# a model that is sound in onnxruntime is NaN. Its QuantizeLinear always does, and makes -448 of NaN: a model that is
# broken is finite. onnxruntime errs once: without saturation it makes NaN of 61,440 to 65,535 in E5M2, not infinity.
#
# Seen with openvino 2026.4.1, onnx 1.23.2, onnxruntime 1.32.0 and Python 3.11 on a CPU, 2026-11-30. E4M3 of 440, 470,
# 1000, infinity and NaN, and E5M2 of 63,000:
#
#   E4M3, Cast, saturate 1: reference 448 448 448 448 nan, onnxruntime 448 448 448 448 nan, openvino 448 nan nan nan nan
#   E4M3, Cast, saturate 0: reference 448 nan nan nan nan, onnxruntime 448 nan nan nan nan, openvino 448 nan nan nan nan
#   E4M3, QuantizeLinear, saturate 1: reference 448 448 448 448 nan, onnxruntime 448 448 448 448 nan, openvino 448 448 448 448 -448
#   E4M3, QuantizeLinear, saturate 0: reference 448 nan nan nan nan, onnxruntime 448 nan nan nan nan, openvino 448 448 448 448 -448
#   E5M2, Cast, saturate 1: reference 57344, onnxruntime 57344, openvino inf
#   E5M2, Cast, saturate 0: reference inf, onnxruntime nan, openvino inf
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openvino==2026.4.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import numpy as np
import onnxruntime
import openvino
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

FORMATS = {"E4M3": TensorProto.FLOAT8E4M3FN, "E5M2": TensorProto.FLOAT8E5M2}


def model_of(to, operator, saturate, length):
    scale, zero = helper.make_tensor("scale", TensorProto.FLOAT, [], [1.0]), helper.make_tensor("zero", to, [], [0.0])
    if operator == "Cast":
        nodes = [
            helper.make_node("Cast", ["x"], ["fp8"], to=to, saturate=saturate),
            helper.make_node("Cast", ["fp8"], ["y"], to=TensorProto.FLOAT),
        ]
    else:
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["fp8"], saturate=saturate),
            helper.make_node("DequantizeLinear", ["fp8", "scale", "zero"], ["y"]),
        ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [length]) for name in "xy")
    graph = helper.make_graph(nodes, "fp8", [x], [y], [] if operator == "Cast" else [scale, zero])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def told(name, operator, saturate, numbers):
    x = np.array(numbers, np.float32)
    model = model_of(FORMATS[name], operator, saturate, len(x))
    core = openvino.Core()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = {
        "reference": ReferenceEvaluator(model).run(None, {"x": x})[0],
        "onnxruntime": session.run(None, {"x": x})[0],
        "openvino": next(iter(core.compile_model(core.read_model(model.SerializeToString()), "CPU")({"x": x}).values())),
    }
    found = {library: " ".join(f"{value:.0f}" for value in y) for library, y in outputs.items()}
    line = ", ".join(f"{library} {values}" for library, values in found.items())
    print(f"{name}, {operator}, saturate {saturate}: {line}", flush=True)
    return list(found.values())


E4M3 = [440, 470, 1000, np.inf, np.nan]
found = [told("E4M3", operator, saturate, E4M3) for operator in ("Cast", "QuantizeLinear") for saturate in (1, 0)]
found += [told("E5M2", "Cast", saturate, [63_000]) for saturate in (1, 0)]
kept, lost, other = "448 448 448 448 nan", "448 nan nan nan nan", "448 448 448 448 -448"
same = found == [
    [kept, kept, lost], [lost, lost, lost], [kept, kept, other], [lost, lost, other],
    ["57344", "57344", "inf"], ["inf", "nan", "inf"],
]
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py" 2> /dev/null
