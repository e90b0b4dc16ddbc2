#!/usr/bin/env bash
# onnx 1.23.2: its reference of LayerNormalization and RMSNormalization makes 0 of FP16 activations of a few hundred.
#
# The reference evaluator shows what an operator's result is, and kernels are checked against it. Both operators have
# stash_type, by default FP32: the first stage is to be computed in it. So one may expect of FP16 activations what
# FP64 gives, rounded. The reference squares in FP16: from 256 on a square is infinite, and the output 0. Around a mean
# of 100 the error is 30 times that of onnxruntime. LogSoftmax takes the logarithm of an FP16 softmax: -inf below -17.
# So a right kernel fails its test, and one that computes in FP16 passes. NumPy's overflow is the only warning.
# onnxruntime is right. Pull request 8439 is to mend the norms. Give the reference FP32 inputs.
#
# Seen with onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6 and Python 3.11 on a CPU, 2026-11-30. Rows of 64 normal
# numbers in FP16: the largest error against FP64 of onnxruntime, and of the reference; at last what both return:
#
#   LayerNormalization, mean 0, deviation 1: 0.0009, 0.0021
#   LayerNormalization, mean 0, deviation 500: 0.0010, 3.7410
#   LayerNormalization, mean 100, deviation 1: 0.0010, 0.0289
#   RMSNormalization, mean 0, deviation 1: 0.0009, 0.0011
#   RMSNormalization, mean 0, deviation 500: 0.0009, 3.8262
#   RMSNormalization, mean 100, deviation 1: 0.0005, 0.0007
#   LogSoftmax of 0 beside 20: -20.00, -inf
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

HALF, ROWS = TensorProto.FLOAT16, [8, 64]
numbers = np.random.default_rng(0).normal(size=ROWS)


def outputs(operator, rows, *weights):
    names = ["rows", "scale", "shift"][: 1 + len(weights)]
    node = helper.make_node(operator, names, ["found"])
    inputs = [helper.make_tensor_value_info(name, HALF, ROWS[name != "rows" :]) for name in names]
    found = helper.make_tensor_value_info("found", HALF, ROWS)
    graph = helper.make_graph([node], "graph", inputs, [found])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    fed = dict(zip(names, (rows, *weights), strict=True))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, fed)[0].astype(float), ReferenceEvaluator(model).run(None, fed)[0].astype(float)


def layer_norm(rows):
    centred = rows - rows.mean(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)


def rms_norm(rows):
    return rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + 1e-5)


one, zero = np.ones(ROWS[1], np.float16), np.zeros(ROWS[1], np.float16)
seen = []
for operator, right, weights in (
    ("LayerNormalization", layer_norm, (one, zero)),
    ("RMSNormalization", rms_norm, (one,)),
):
    for scale, mean in ((1, 0), (500, 0), (1, 100)):
        rows = (scale * numbers + mean).astype(np.float16)
        errors = [np.abs(found - right(rows.astype(float))).max() for found in outputs(operator, rows, *weights)]
        seen.append(errors)
        print("{}, mean {}, deviation {}: {:.4f}, {:.4f}".format(operator, mean, scale, *errors))
row = np.zeros(ROWS, np.float16)
row[:, 0] = 20
found, reference = (found[0, 1] for found in outputs("LogSoftmax", row))
print(f"LogSoftmax of 0 beside 20: {found:.2f}, {reference:.2f}")
same = all(found < 0.002 for found, _ in seen) and seen[1][1] > 2 and seen[4][1] > 2 and seen[2][1] > 0.01
raise SystemExit(0 if same and found == -20 and np.isneginf(reference) else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
