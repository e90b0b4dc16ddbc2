#!/usr/bin/env bash
# onnx 1.23.2: its reference Attention returns soft-capped scores where one asks for the raw ones.
#
# ONNX's operator Attention has a second output for looking at the scores: of mode 0 "the output of qk matmul", of mode
# 1 that behind the soft cap. So one may expect mode 0 to show how large the scores are, which the cap hides. The
# reference evaluator, by which one checks other implementations, gives the capped scores in both modes: with a cap of
# 2 none exceeds 2, however far the scores have grown. onnxruntime gives the raw ones. O is the same in both, and
# without a cap so are the scores.
#
# Seen with onnx 1.23.2, onnxruntime 1.32.0 and Python 3.11 on a CPU, 2026-11-30. The largest scaled score in
# size, of one q and k, by either implementation:
#
#   softcap 0, mode 0: reference 20.72, onnxruntime 20.72
#   softcap 2, mode 0: reference 2.00, onnxruntime 20.72
#   softcap 2, mode 1: reference 2.00, onnxruntime 2.00
#   O with softcap 2: apart by less than 1e-5
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet onnx==1.23.2 onnxruntime==1.32.0 numpy
cat > "$folder/program.py" <<'PY'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

SHAPE = (1, 2, 4, 8)
generator = np.random.default_rng(0)
inputs = {name: (3 * generator.normal(size=SHAPE)).astype(np.float32) for name in "QKV"}


def values(name):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE if name in inputs else None)


def largest(softcap, mode):
    node = helper.make_node(
        "Attention", list(inputs), ["O", "", "", "S"], softcap=float(softcap), qk_matmul_output_mode=mode
    )
    graph = helper.make_graph([node], "attention", [values(name) for name in inputs], [values("O"), values("S")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = ReferenceEvaluator(model).run(None, inputs), session.run(None, inputs)
    found = [float(np.abs(scores).max()) for _, scores in outputs]
    print(f"softcap {softcap}, mode {mode}: reference {found[0]:.2f}, onnxruntime {found[1]:.2f}")
    return found, float(np.abs(outputs[0][0] - outputs[1][0]).max())


(raw, _), (asked, apart), (capped, _) = largest(0, 0), largest(2, 0), largest(2, 1)
print(f"O with softcap 2: apart by {'less' if apart < 1e-5 else 'more'} than 1e-5")
product = float(np.abs(inputs["Q"] @ inputs["K"].swapaxes(2, 3)).max()) * SHAPE[-1] ** -0.5
same = np.allclose([*raw, asked[1]], product) and max(asked[0], *capped) <= 2
raise SystemExit(0 if same and apart < 1e-5 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
