#!/usr/bin/env bash
# PyTorch 2.13.0: exported to ONNX, rows of attention without an open key become the mean of all values, or NaN.
#
# Padding on the left and causal masks leave rows without an open key. scaled_dot_product_attention makes 0 of them.
# So one may expect 0 of the exported model, too. With the opset that the exporter takes unless told otherwise,
# attention is written as products and a softmax: a boolean mask becomes the dtype's least number, so that the row is
# the mean of all values, closed ones and later tokens among them, and a mask of -inf gives NaN, which the next layer
# spreads. Where a row that is closed is a row of padding this only shows in means over all tokens; where it is not,
# the model reads what it must not. Nothing warns. opset_version=23 has an attention of its own, and gives 0.
#
# Seen with torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0 and Python 3.11 on a CPU, 2026-11-30. Of
# six queries the first sees no key: its output in PyTorch and in ONNX, and the mean of all values, of one feature;
# and by how much the other rows differ, at most:
#
#   opset 20, boolean mask: PyTorch 0.000, ONNX 0.168, mean 0.168; others 1e-07
#   opset 20, -inf mask: PyTorch 0.000, ONNX nan, mean 0.168; others 1e-07
#   opset 23, boolean mask: PyTorch 0.000, ONNX 0.000, mean 0.168; others 1e-07
#   opset 23, -inf mask: PyTorch 0.000, ONNX 0.000, mean 0.168; others 1e-07
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 numpy
cat > "$folder/program.py" <<'PY'
import math

import onnxruntime
import torch

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
opened = torch.ones(6, 6, dtype=torch.bool).tril(-1)
MASKS = {"boolean": opened, "-inf": torch.zeros(6, 6).masked_fill(~opened, -math.inf)}


class Attention(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def exported(mask, **options):
    inputs = q, k, v, mask
    program = torch.onnx.export(Attention(), inputs, dynamo=True, verbose=False, **options)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {argument.name: tensor.numpy() for argument, tensor in zip(session.get_inputs(), inputs)}
    opset = next(entry.version for entry in program.model_proto.opset_import if not entry.domain)
    return torch.from_numpy(session.run(None, given)[0]), opset


seen = []
for options in ({}, {"opset_version": 23}):
    for name, mask in MASKS.items():
        exact = Attention()(q, k, v, mask)
        out, opset = exported(mask, **options)
        others = float((out - exact)[:, :, 1:].abs().max())
        found = [float(x) for x in (exact[0, 0, 0, 0], out[0, 0, 0, 0], v[0, 0, :, 0].mean())]
        told = "PyTorch {:.3f}, ONNX {:.3f}, mean {:.3f}; others {:.0e}".format(*found, others)
        print(f"opset {opset}, {name} mask: {told}")
        seen.append((opset, *found, others))
(default, zero, mean, true_mean, _), (_, _, nan, _, _), *newer = seen
wrong = default < 23 and zero == 0 and abs(mean - true_mean) < 1e-6 and math.isnan(nan)
right = all(found[0] == 23 and found[2] == 0 for found in newer) and all(found[4] < 1e-5 for found in seen)
raise SystemExit(0 if wrong and right else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py" 2> "$folder/log" || { cat "$folder/log" >&2; exit 1; }
