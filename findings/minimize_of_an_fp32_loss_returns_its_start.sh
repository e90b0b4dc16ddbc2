#!/usr/bin/env bash
# scipy 1.17.1: minimize returns the starting point of a fit as a success where the loss is computed in FP32.
#
# Scaling laws are fitted by scipy.optimize.minimize, and their loss is easily written in PyTorch or JAX, in FP32. So
# one may expect a fit of FP32's precision, or a failure. Without a gradient of its own minimize takes the difference of
# two losses 1.5e-8 apart. An FP32 loss has seven digits, and the parameters are rounded to FP32 on their way: both
# losses are the same, the gradient is 0, and BFGS, L-BFGS-B, CG and TNC end at once, with success=True and "converged".
# A fit that starts near its end looks right. Compute in FP64, or hand a gradient over by jac=. Nelder-Mead and Powell,
# which take no gradient, fit.
#
# Seen with scipy 1.17.1, numpy 2.4.6 and Python 3.11, 2026-11-30. A law E + A / N^a of 12 losses with a = 0.34, as a
# Huber loss of logarithms from a = 0.5 on; the a that is found with a loss in FP64 and in FP32, and success of the
# latter:
#
#   BFGS: 0.340, 0.500 True
#   L-BFGS-B: 0.340, 0.500 True
#   CG: 0.339, 0.500 True
#   TNC: 0.286, 0.500 True
#   Nelder-Mead: 0.340, 0.340 True
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet scipy==1.17.1 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import numpy as np
from scipy.optimize import minimize

SIZES = np.logspace(6, 9, 12)
LOSSES = 1.7 + 400 / SIZES**0.34


def fitted(method, dtype):
    sizes, losses = np.log(SIZES).astype(dtype), np.log(LOSSES).astype(dtype)

    def loss(parameters):
        floor, scale, power = parameters.astype(dtype)
        distance = np.abs(np.logaddexp(floor, scale - power * sizes) - losses)
        huber = np.where(distance < dtype(1e-3), distance**2 / 2, dtype(1e-3) * (distance - dtype(5e-4)))
        assert huber.dtype == dtype
        return huber.mean()

    result = minimize(loss, [0.5, 5.0, 0.5], method=method)
    return float(result.x[2]), bool(result.success)


seen = {}
for method in ("BFGS", "L-BFGS-B", "CG", "TNC", "Nelder-Mead"):
    seen[method] = (*fitted(method, np.float64), *fitted(method, np.float32))
    print("{}: {:.3f}, {:.3f} {}".format(method, seen[method][0], *seen[method][2:]))
free = seen.pop("Nelder-Mead")
fits = all(abs(exact - 0.34) < 0.1 for exact, *_ in seen.values()) and abs(free[2] - 0.34) < 0.02
starts = all((power, success) == (0.5, True) for _, _, power, success in seen.values())
raise SystemExit(0 if fits and starts else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
