#!/usr/bin/env bash
# tensorflow 2.21.0, keras 3.15.1: isclose says that every finite number is close to infinity, and infinity is not.
#
# Two results are compared by isclose or allclose, and one that has become infinite is to be found so. NumPy, PyTorch
# and JAX say that 7 is not close to infinity, and that infinity is close to itself. TensorFlow's
# tf.experimental.numpy.isclose and allclose, and keras.ops.isclose with TensorFlow, ask alone for
# |a - b| <= atol + rtol |b|. With b infinite that is true of all finite a, and of a = b it is NaN <= infinity, which is
# false. So a comparison with expected values that have overflowed passes whatever was computed. Turned round it fails.
# keras.ops.allclose with TensorFlow is right, and so all of Keras with JAX and PyTorch.
#
# Seen with tensorflow 2.21.0, keras 3.15.1, jax 0.10.2, numpy 2.4 and Python 3.11 on a CPU, 2026-11-30. Of 7 and
# infinity, infinity and 7, infinity and infinity:
#
#   numpy.isclose: 0 0 1
#   tf.experimental.numpy.isclose: 1 0 0
#   tf.experimental.numpy.allclose: 1 0 0
#   keras.ops.isclose, tensorflow: 1 0 0
#   keras.ops.allclose, tensorflow: 0 0 1
#   keras.ops.isclose, jax: 0 0 1
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tensorflow-cpu==2.21.0 keras==3.15.1 jax==0.10.2 "numpy<2.5"
cat > "$folder/program.py" <<'PY'
import sys

import keras
import numpy as np

PAIRS = [(7.0, np.inf), (np.inf, 7.0), (np.inf, np.inf)]
backend = keras.backend.backend()


def told(name, close, as_told):
    found = " ".join(str(int(close(np.float32(a), np.float32(b)))) for a, b in PAIRS)
    print(f"{name}: {found}", flush=True)
    return found == as_told


wrong, right = "1 0 0", "0 0 1"
if backend == "tensorflow":
    import tensorflow.experimental.numpy as tnp

    same = [
        told("numpy.isclose", np.isclose, right),
        told("tf.experimental.numpy.isclose", tnp.isclose, wrong),
        told("tf.experimental.numpy.allclose", tnp.allclose, wrong),
        told("keras.ops.isclose, tensorflow", keras.ops.isclose, wrong),
        told("keras.ops.allclose, tensorflow", keras.ops.allclose, right),
    ]
else:
    same = [told(f"keras.ops.isclose, {backend}", keras.ops.isclose, right)]
sys.exit(0 if all(same) else "changed")
PY
for backend in tensorflow jax; do
    KERAS_BACKEND=$backend JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" -W ignore "$folder/program.py" 2> /dev/null
done
