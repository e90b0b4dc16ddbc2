#!/usr/bin/env bash
# onnxslim 0.1.98: a factor along the width behind a convolution becomes one of the channels, where both are as many.
#
# A product with a constant behind a convolution can become part of its weights, if it has one factor for each channel.
# So one may expect a factor along height or width to stay where it is. onnxslim asks how many factors there are alone:
# as many as channels are taken for those of the channels, whatever axis they lie along. So a window over 8 positions
# behind a convolution with 8 channels scales the channels, and the output is another one without a word. With
# model_check=True, which is off, slim compares the outputs, and returns None.
#
# Seen with onnxslim 0.1.98, onnxsim 0.8.1, onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6 and Python 3.11, 2026-11-30. A
# 3×3 convolution with an output of [1, channels, 8, 8], times factors from 1 on; the largest error, as part of the
# largest output:
#
#   8 channels, factors [8], of the width: onnxslim 0.7, onnxsim 0.0
#   8 channels, factors [8, 1], of the height: onnxslim 0.7, onnxsim 0.0
#   8 channels, factors [8, 1, 1], of the channels: onnxslim 0.0, onnxsim 0.0
#   4 channels, factors [8], of the width: onnxslim 0.0, onnxsim 0.0
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnxslim==0.1.98 onnxsim==0.8.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import numpy as np
import onnx
import onnxruntime
import onnxsim
import onnxslim
from onnx import TensorProto, helper, numpy_helper


def output(model, x):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0].astype(np.float64)


def errors(channels, shape):
    numbers = np.random.default_rng(0)
    x, weights = (numbers.normal(size=size).astype(np.float32) for size in ((1, 3, 10, 10), (channels, 3, 3, 3)))
    factors = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    constants = [numpy_helper.from_array(array, name) for name, array in (("w", weights), ("f", factors))]
    nodes = helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Mul", ["c", "f"], ["y"])
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, size)]
        for name, size in (("x", x.shape), ("y", (1, channels, 8, 8)))
    ]
    graph = helper.make_graph(list(nodes), "graph", *ends, initializer=constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    expected = output(model, x)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), axis=(2, 3))
    assert np.allclose(np.einsum("nchwij,kcij->nkhw", windows, weights) * factors, expected, atol=1e-3)
    smaller = onnxslim.slim(onnx.ModelProto.FromString(model.SerializeToString())), onnxsim.simplify(model)[0]
    return [np.abs(output(one, x) - expected).max() / np.abs(expected).max() for one in smaller]


seen = []
for channels, shape, axis in ((8, [8], "width"), (8, [8, 1], "height"), (8, [8, 1, 1], "channels"), (4, [8], "width")):
    slim, sim = errors(channels, shape)
    print(f"{channels} channels, factors {shape}, of the {axis}: onnxslim {slim:.1f}, onnxsim {sim:.1f}")
    seen.append((bool(slim > 0.1), bool(sim > 1e-4)))
raise SystemExit(0 if seen == [(True, False), (True, False), (False, False), (False, False)] else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
