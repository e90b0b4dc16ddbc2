#!/usr/bin/env bash
# mlx 0.32.4 and gguf 0.19.0: a weight of NaN becomes a finite one where it is quantised, of 896 in MXFP8.
#
# Four bits have no code for NaN, but a block's scale is a float, and the E4M3 of MXFP8 has a NaN. So one may expect the
# whole block to be NaN, as gguf's Q8_0 has it, or an error, and a failed training to show in the model's outputs. In
# MLX's own format the NaN becomes the largest number of its block. In MXFP4 and NVFP4 its block becomes 0, as in gguf's
# MXFP4. In MXFP8 all 32 weights of its block become 896 or -896, where they were about 0.02: mx.to_fp8 makes 448 of
# NaN. Outputs and losses of a failed model are then finite, and a check of them for NaN passes. Check before quantising.
#
# Seen with mlx 0.32.4, gguf 0.19.0 and Python 3.11 on a CPU, 2026-11-30. One of 64 normal weights is NaN, the others have
# a standard deviation of 0.02, seed 0. The norm is that of all weights over that without the NaN:
#
#   not quantised: NaN in the output True
#   mlx affine, 4 bits: NaN in the output False, norm 1.05, largest weight 0.05
#   mlx mxfp4: NaN in the output False, norm 0.78, largest weight 0.05
#   mlx nvfp4: NaN in the output False, norm 0.87, largest weight 0.04
#   mlx mxfp8: NaN in the output False, norm 34738.66, largest weight 896.00
#   gguf MXFP4: NaN in the output False, norm 0.78, largest weight 0.05
#   gguf Q8_0: NaN in the output True, norm nan, largest weight nan
#   mx.to_fp8 of NaN: 448
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "mlx[cpu]==0.32.4" gguf==0.19.0 numpy
cat > "$folder/program.py" <<'PY'
import warnings

import gguf
import mlx.core as mx
import numpy as np

warnings.simplefilter("ignore")  # NumPy's, of casts of NaN
mx.set_default_device(mx.cpu)
generator = np.random.default_rng(0)
clean = generator.normal(0, 0.02, (1, 64)).astype(np.float32)
inputs = generator.normal(size=64).astype(np.float32)
spoilt = clean.copy()
spoilt[0, 5] = np.nan


def mlx_weights(weights, mode, **options):
    quantised = mx.quantize(mx.array(weights), mode=mode, **options)
    return np.array(mx.dequantize(*quantised, mode=mode, **options).astype(mx.float32))


def gguf_weights(weights, name):
    kind = gguf.GGMLQuantizationType[name]
    return gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)


FORMATS = {
    "mlx affine, 4 bits": lambda weights: mlx_weights(weights, "affine", bits=4),
    "mlx mxfp4": lambda weights: mlx_weights(weights, "mxfp4"),
    "mlx nvfp4": lambda weights: mlx_weights(weights, "nvfp4"),
    "mlx mxfp8": lambda weights: mlx_weights(weights, "mxfp8"),
    "gguf MXFP4": lambda weights: gguf_weights(weights, "MXFP4"),
    "gguf Q8_0": lambda weights: gguf_weights(weights, "Q8_0"),
}
print("not quantised: NaN in the output", bool(np.isnan(spoilt @ inputs).any()))
seen = {}
for name, quantised in FORMATS.items():
    weights = quantised(spoilt)
    norm = float(np.linalg.norm(weights) / np.linalg.norm(quantised(clean)))
    seen[name] = bool(np.isnan(weights @ inputs).any()), norm, float(np.abs(weights).max())
    print("{}: NaN in the output {}, norm {:.2f}, largest weight {:.2f}".format(name, *seen[name]))
fp8 = mx.from_fp8(mx.to_fp8(mx.array([np.nan])), mx.float32).item()
print(f"mx.to_fp8 of NaN: {fp8:.0f}")
*hidden, kept = seen.values()
same = kept[0] and not any(nan for nan, *_ in hidden) and seen["mlx mxfp8"][2] == 896 and fp8 == 448
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
