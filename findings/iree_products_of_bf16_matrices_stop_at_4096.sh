#!/usr/bin/env bash
# iree 3.13.0: on a CPU the product of two BF16 or FP16 matrices is added up in that dtype, and stops growing at 4,096.
#
# A product of BF16 matrices is added up in FP32 and rounded once, by GPUs, PyTorch and XLA, so that training in BF16
# works at all. So one may expect it of the same StableHLO, as JAX writes it, compiled by IREE. There dot_general with a
# BF16 result keeps its sums in BF16: some run side by side, and each stands still at 256 times an addend. A product of
# ones of size 16,384 is 4,096, and one of normal numbers has errors 16 times those of a rounding. The same holds for
# FP16, and for sums by reduce. A dot_general whose result is FP32 is right: in JAX preferred_element_type=jnp.float32.
#
# Seen with iree-base-compiler and iree-base-runtime 3.13.0, jax 0.10.2, ml_dtypes 0.6.0, numpy 2.4.6 and Python 3.11,
# 2026-11-30, for the target x86-64-v3. A product of ones; then the largest error for normal numbers and size 4,096, as
# part of their standard deviation:
#
#   bfloat16, size 16,384: IREE 4096, JAX 16384
#   float16, size 16,384: IREE 2048, JAX 16384
#   bfloat16, normal numbers: IREE 0.123, JAX 0.008
#   bfloat16 with a result in FP32: IREE 0.000
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
import ml_dtypes
import numpy as np

CONFIG = iree.runtime.Config("local-task")


def both(a, b, **options):
    """The product by IREE and by JAX, of one StableHLO."""

    def product(a, b):
        return jnp.matmul(a, b, **options)

    text = str(jax.jit(product).lower(a, b).compiler_ir("stablehlo"))
    code = iree.compiler.compile_str(
        text, input_type="stablehlo", target_backends=["llvm-cpu"], extra_args=["--iree-llvmcpu-target-cpu=x86-64-v3"]
    )
    context = iree.runtime.SystemContext(config=CONFIG)
    module = iree.runtime.VmModule.copy_buffer(context.instance, code)
    context.add_vm_module(module)
    ours = context.modules[module.name]["main"](a, b).to_host()
    return [np.asarray(array, np.float64) for array in (ours, jax.jit(product)(a, b))]


stopped = {}
for dtype in (ml_dtypes.bfloat16, np.float16):
    ones = np.ones((8, 16_384), dtype)
    ours, theirs = both(ones, ones.T.copy())
    stopped[dtype] = ours.max()
    print(f"{np.dtype(dtype)}, size 16,384: IREE {ours.max():.0f}, JAX {theirs.max():.0f}")
numbers = np.random.default_rng(0)
a, b = (numbers.normal(size=size).astype(ml_dtypes.bfloat16) for size in ((64, 4_096), (4_096, 64)))
exact = a.astype(np.float64) @ b.astype(np.float64)
errors = [np.abs(product - exact).max() / exact.std() for product in both(a, b)]
wide, _ = (np.abs(product - exact).max() / exact.std() for product in both(a, b, preferred_element_type=jnp.float32))
print("bfloat16, normal numbers: IREE {:.3f}, JAX {:.3f}".format(*errors))
print(f"bfloat16 with a result in FP32: IREE {wide:.3f}")
same = max(stopped.values()) < 16_384 and errors[0] > 5 * errors[1] and wide < 1e-4
raise SystemExit(0 if same else "changed")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
