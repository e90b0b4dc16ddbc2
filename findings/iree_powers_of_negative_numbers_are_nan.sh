#!/usr/bin/env bash
# iree 3.13.0: on a CPU x ** 4.0 of a negative number is NaN, and so is every power whose exponent is no constant.
#
# StableHLO's power is that of IEEE 754: −2 to the 3 is −8, and 0 to the 0 is 1. So one may expect of JAX's powers,
# compiled by IREE, what JAX computes. IREE makes exp(y · log x) of them, but for a few constants y: the powers of
# negative numbers are NaN, and so is 0 to the 0. A kurtosis, a loss whose power is configured or learned, or a sign of
# (−1)^i is NaN in the exported model alone. cbrt of infinity is NaN, too. The constants 2.0 and 3.0 are right, and
# integers, as x ** 4, which JAX writes as products.
#
# Seen with iree-base-compiler and iree-base-runtime 3.13.0, jax 0.10.2, numpy 2.4.6 and Python 3.11, 2026-11-30, in
# FP32. Last the mean of x ** 4.0 of 1,000 normal numbers:
#
#   -2 ** 2: IREE nan, JAX 4
#   -2 ** 3: IREE nan, JAX -8
#   -1 ** 0: IREE nan, JAX 1
#   0 ** 0: IREE nan, JAX 1
#   2 ** 3: IREE 8, JAX 8
#   cbrt of infinity: IREE nan, JAX inf
#   fourth moment: IREE nan, JAX 3.02
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet iree-base-compiler==3.13.0 iree-base-runtime==3.13.0 jax==0.10.2 \
    ml_dtypes==0.6.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import iree.compiler
import iree.runtime
import jax
import jax.numpy as jnp
import numpy as np

CONFIG = iree.runtime.Config("local-task")


def both(function, *arrays):
    """The results of IREE and of JAX, of one StableHLO."""
    text = str(jax.jit(function).lower(*arrays).compiler_ir("stablehlo"))
    code = iree.compiler.compile_str(
        text, input_type="stablehlo", target_backends=["llvm-cpu"], extra_args=["--iree-llvmcpu-target-cpu=x86-64-v3"]
    )
    context = iree.runtime.SystemContext(config=CONFIG)
    module = iree.runtime.VmModule.copy_buffer(context.instance, code)
    context.add_vm_module(module)
    return context.modules[module.name]["main"](*arrays).to_host(), np.asarray(jax.jit(function)(*arrays))


bases, exponents = np.array([-2, -2, -1, 0, 2], np.float32), np.array([2, 3, 0, 0, 3], np.float32)
ours, theirs = both(jnp.power, bases, exponents)
for base, exponent, one, other in zip(bases, exponents, ours, theirs, strict=True):
    print(f"{base:g} ** {exponent:g}: IREE {one:g}, JAX {other:g}")
(root,), (right,) = both(jnp.cbrt, np.array([np.inf], np.float32))
print(f"cbrt of infinity: IREE {root:g}, JAX {right:g}")
fourth, moment = both(lambda x: (x**4.0).mean(), np.random.default_rng(0).normal(size=1_000).astype(np.float32))
print(f"fourth moment: IREE {fourth:.3g}, JAX {moment:.3g}")
same = np.isnan(ours).tolist() == [True] * 4 + [False] and theirs.tolist() == [4, -8, 1, 1, 8]
raise SystemExit(0 if same and np.isnan([root, fourth]).all() and right == np.inf else "changed")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
