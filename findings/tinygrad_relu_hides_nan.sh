#!/usr/bin/env bash
# tinygrad 0.14.0: ReLU and ELU make 0 of NaN, so that a layer whose weights are NaN trains on with a finite loss.
#
# A NaN in a weight is to reach the loss, where one looks for it: so it is with the ReLU of PyTorch, NumPy and JAX, and so
# one may expect it here. tinygrad's relu takes the number where it is above 0, and else 0, and NaN is not above 0. The
# same holds for relu6, elu and hardsigmoid, and a product with the constant 0 is 0 before anything is computed. The loss
# is that of a network without the broken unit, the gradient of its weights is 0 where it was to be NaN, and the NaN
# stays for good: neither the loss, nor a norm of the gradients, nor a skipped step shows it. leaky_relu, gelu and silu
# let NaN through. Look at the weights themselves.
#
# Seen with tinygrad 0.14.0, numpy 2.4.6 and Python 3.11, 2026-11-30, on the device PYTHON, which needs no compiler; the
# graph says the same for all devices. Two layers with normal weights, of which one in the first is NaN: the loss, and
# the numbers of NaN in the gradients of 24 and of 18 weights; then what becomes of NaN:
#
#   relu: loss 1.325; gradients 0 NaN, 0 NaN
#   elu: loss 1.533; gradients 4 NaN, 0 NaN
#   leaky_relu: loss nan; gradients 24 NaN, 18 NaN
#   gelu: loss nan; gradients 24 NaN, 18 NaN
#   relu 0, relu6 0, elu 0, hardsigmoid 0, times 0 0, leaky_relu nan, plus 0 nan
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tinygrad==0.14.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math

import numpy as np
from tinygrad import Tensor

numbers = np.random.default_rng(0)
first, second, batch = (numbers.normal(size=size).astype(np.float32) for size in ((4, 6), (6, 3), (5, 4)))
first[1, 2] = math.nan


def trained(activation):
    weights = Tensor(first.copy()), Tensor(second.copy())
    hidden = getattr(Tensor(batch) @ weights[0], activation)()
    loss = (hidden @ weights[1]).square().mean()
    broken = [int(np.isnan(gradient.numpy()).sum()) for gradient in loss.gradient(*weights)]
    print("{}: loss {:.3f}; gradients {} NaN, {} NaN".format(activation, loss.item(), *broken))
    return math.isnan(loss.item()), *broken


losses = {activation: trained(activation) for activation in ("relu", "elu", "leaky_relu", "gelu")}
nan = Tensor([math.nan])
values = {name: getattr(nan, name)().item() for name in ("relu", "relu6", "elu", "hardsigmoid")}
values |= {"times 0": (nan * 0).item(), "leaky_relu": nan.leaky_relu().item(), "plus 0": (nan + 0).item()}
print(", ".join(f"{name} {value:g}" for name, value in values.items()))
hidden = {name for name, value in values.items() if value == 0}
same = losses["relu"] == (False, 0, 0) and losses["gelu"] == losses["leaky_relu"] == (True, 24, 18)
same = same and not losses["elu"][0]
raise SystemExit(0 if same and hidden == {"relu", "relu6", "elu", "hardsigmoid", "times 0"} else "changed")
PY
DEV=PYTHON "$folder/venv/bin/python" "$folder/program.py"
