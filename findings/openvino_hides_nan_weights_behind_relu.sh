#!/usr/bin/env bash
# openvino 2026.4.1: on a CPU a network with a weight of NaN has finite outputs behind a ReLU, a clamp or a maximum.
#
# Whoever exports a model and runs it on a batch to see whether it is sound may expect NaN where PyTorch, NumPy and ONNX
# Runtime have it: in all outputs that a NaN weight reaches. OpenVINO's kernels for a CPU take the larger of two numbers
# by an instruction that returns the bound where the other is NaN. relu makes 0 of NaN, clamp its lower bound, and
# reduce_max the largest of the others, while exp makes infinity of it. A network with ReLU has the outputs that it
# would have without the unit, so that the check passes, and a training that failed is deployed. gelu, swish and a sum
# let NaN through, and so does attention. Nothing warns. Look for NaN in the weights, or in what PyTorch computes.
#
# Seen with openvino 2026.4.1, numpy 2.4.6 and Python 3.11 on an x86-64 CPU in FP32, 2026-11-30. Two layers of which one
# weight of the first is NaN: how many of 32 outputs are NaN, and by how much the finite ones differ, at most, from
# those of a network without that unit; then what becomes of NaN:
#
#   relu: 0 of 32 outputs are NaN, they differ by 0
#   clamp to 0 and 6: 0 of 32 outputs are NaN, they differ by 0
#   gelu: 32 of 32 outputs are NaN
#   NaN 1 -1 3: relu 0 1 0 3; clamp to -1 and 1 -1 1 -1 1; exp inf 2.72 0.368 20.1; reduce_max 3; reduce_sum nan
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openvino==2026.4.1 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import numpy as np
import openvino as ov
from openvino import opset13 as ops

CORE = ov.Core()
numbers = np.random.default_rng(0)
first, second, batch = (numbers.normal(size=size).astype(np.float32) for size in ((16, 32), (32, 8), (4, 16)))
broken, without_unit = first.copy(), first.copy()
broken[3, 5] = np.nan
without_unit[:, 5] = 0


def run(inputs, graph):
    parameter = ops.parameter(list(inputs.shape), ov.Type.f32)
    model = ov.Model([graph(parameter)], [parameter])
    return CORE.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(inputs)[0]


def outputs(weights, activation):
    def graph(parameter):
        hidden = activation(ops.matmul(parameter, ops.constant(weights), False, False))
        return ops.matmul(hidden, ops.constant(second), False, False)

    return run(batch, graph)


def compared(what, activation):
    found = outputs(broken, activation)
    count = int(np.isnan(found).sum())
    difference = np.abs(found - outputs(without_unit, activation)).max()
    end = "" if count else f", they differ by {difference:g}"
    print(f"{what}: {count} of {found.size} outputs are NaN{end}")
    return count, float(difference)


networks = [
    compared("relu", ops.relu),
    compared("clamp to 0 and 6", lambda hidden: ops.clamp(hidden, 0.0, 6.0)),
    compared("gelu", lambda hidden: ops.gelu(hidden, "erf")),
]
four = np.array([np.nan, 1, -1, 3], np.float32)
axis = np.array([0])
values = {
    "relu": run(four, ops.relu),
    "clamp to -1 and 1": run(four, lambda parameter: ops.clamp(parameter, -1.0, 1.0)),
    "exp": run(four, ops.exp),
    "reduce_max": run(four, lambda parameter: ops.reduce_max(parameter, axis)),
    "reduce_sum": run(four, lambda parameter: ops.reduce_sum(parameter, axis)),
}
said = "; ".join(f"{name} " + " ".join(f"{value:.3g}" for value in np.ravel(found)) for name, found in values.items())
print(f"NaN 1 -1 3: {said}")
same = networks[0] == networks[1] == (0, 0.0) and networks[2][0] == 32
same = same and values["relu"][0] == 0 and values["clamp to -1 and 1"][0] == -1 and values["reduce_max"] == 3
raise SystemExit(0 if same and np.isinf(values["exp"][0]) and np.isnan(values["reduce_sum"]) else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
