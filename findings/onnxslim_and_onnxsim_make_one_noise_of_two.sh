#!/usr/bin/env bash
# onnxslim 0.1.98 and onnxsim 0.8.1: noises that a model draws independently become one, and one may become a constant.
#
# Both tools make a model smaller that is to compute the same. So one may expect two draws of noise to stay two, and a
# new one in each run. Both take nodes of one kind with the same inputs for the same computation: of RandomNormalLike,
# RandomUniformLike and Bernoulli one is left. So the noises of a model are equal, a mean over 16 draws has the spread
# of a single one, and an uncertainty by repeated draws is 0. onnxslim also draws a RandomNormal, which has no input,
# while it slims, and keeps the numbers. ONNX Runtime's own optimisations leave one of two Bernoulli, and keep normal
# noises apart. Nodes with a seed= of their own stay two.
#
# Seen with onnxslim 0.1.98, onnxsim 0.8.1, onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6 and Python 3.11, 2026-11-30.
# The standard deviation of a mean of 16 noises, for 10,000 numbers; the share of numbers where two masks of Bernoulli
# differ; and whether two runs of a model with RandomNormal differ. All but the second row run without optimisation:
#
#   the model: mean of 16 noises 0.27, masks differ at 0.51, runs differ: True
#   ONNX Runtime: mean of 16 noises 0.27, masks differ at 0.00, runs differ: True
#   onnxslim: mean of 16 noises 1.00, masks differ at 0.00, runs differ: False
#   onnxsim: mean of 16 noises 1.00, masks differ at 0.00, runs differ: True
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
from onnx import TensorProto, helper

NUMBERS = 10_000
onnxruntime.set_seed(0)
TOOLS = {
    "the model": lambda model: model,
    "ONNX Runtime": lambda model: model,
    "onnxslim": onnxslim.slim,
    "onnxsim": lambda model: onnxsim.simplify(model)[0],
}


def model_of(*nodes):
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [NUMBERS]) for name in "xy")
    graph = helper.make_graph(list(nodes), "graph", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def session(name, model):
    smaller = TOOLS[name](onnx.ModelProto.FromString(model.SerializeToString()))
    options = onnxruntime.SessionOptions()
    if name != "ONNX Runtime":
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(smaller.SerializeToString(), options, providers=["CPUExecutionProvider"])


def output(run, value):
    return run.run(None, {"x": np.full(NUMBERS, value, np.float32)})[0]


draws = [f"noise_{number}" for number in range(16)]
mean = model_of(
    *(helper.make_node("RandomNormalLike", ["x"], [name]) for name in draws), helper.make_node("Mean", draws, ["y"])
)
masks = model_of(
    *(helper.make_node("Bernoulli", ["x"], [name]) for name in "ab"), helper.make_node("Sub", ["a", "b"], ["y"])
)
noisy = model_of(
    helper.make_node("RandomNormal", [], ["noise"], shape=[NUMBERS]), helper.make_node("Add", ["x", "noise"], ["y"])
)
seen = {}
for name in TOOLS:
    spread = output(session(name, mean), 0).std()
    differ = (output(session(name, masks), 0.5) != 0).mean()
    run = session(name, noisy)
    anew = not np.array_equal(output(run, 0), output(run, 0))
    print(f"{name}: mean of 16 noises {spread:.2f}, masks differ at {differ:.2f}, runs differ: {anew}")
    seen[name] = bool(spread < 0.3), bool(differ > 0.4), anew
expected = {
    "the model": (True, True, True),
    "ONNX Runtime": (True, False, True),
    "onnxslim": (False, False, False),
    "onnxsim": (False, False, True),
}
raise SystemExit(0 if seen == expected else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
