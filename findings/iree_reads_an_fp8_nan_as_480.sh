#!/usr/bin/env bash
# iree 3.13.0: on a CPU a NaN of float8_e4m3fn whose sign bit is set, as that of 0/0 on x86, is read as −480.
#
# E4M3FN has two NaN, the bytes 0x7F and 0xFF, and no number beyond 448. So one may expect both to be NaN in FP32, as
# ml_dtypes, PyTorch and JAX have it. IREE takes 0xFF for the number that its bits would be, −480, in all casts from it.
# The NaN that an x86 processor makes of 0/0, or of infinity less infinity, has its sign bit set, and ml_dtypes and
# PyTorch cast it to 0xFF. So weights that became NaN in a training, and were quantised to FP8, are −480 times their
# scale in the compiled model, whose outputs are finite. IREE's own cast makes 0x7F of each NaN.
#
# Seen with iree-base-compiler and iree-base-runtime 3.13.0, jax 0.10.2, ml_dtypes 0.6.0, numpy 2.4.6 and Python 3.11,
# 2026-11-30. Of the 256 bytes of E4M3FN all others are read rightly:
#
#   to FP32: IREE reads 1 of 256 wrongly, 0xff as -480; JAX has nan
#   to BF16: IREE reads 1 of 256 wrongly, 0xff as -480; JAX has nan
#   a row with one such NaN, times ones: IREE -473, JAX nan
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


def both(function, *arrays):
    """The results of IREE and of JAX, of one StableHLO."""
    text = str(jax.jit(function).lower(*arrays).compiler_ir("stablehlo"))
    code = iree.compiler.compile_str(
        text, input_type="stablehlo", target_backends=["llvm-cpu"], extra_args=["--iree-llvmcpu-target-cpu=x86-64-v3"]
    )
    context = iree.runtime.SystemContext(config=CONFIG)
    module = iree.runtime.VmModule.copy_buffer(context.instance, code)
    context.add_vm_module(module)
    ours = context.modules[module.name]["main"](*arrays).to_host()
    return [np.asarray(array, np.float32) for array in (ours, jax.jit(function)(*arrays))]


numbers, same = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn), True
expected = numbers.astype(np.float32)
for name, dtype in (("FP32", jnp.float32), ("BF16", jnp.bfloat16)):
    ours, theirs = both(lambda x, dtype=dtype: x.astype(dtype), numbers)
    assert np.array_equal(theirs, expected, equal_nan=True)
    wrong = np.flatnonzero((ours != expected) & ~(np.isnan(ours) & np.isnan(expected)))
    read = ", ".join(f"{number:#x} as {ours[number]:g}" for number in wrong)
    print(f"to {name}: IREE reads {len(wrong)} of 256 wrongly, {read}; JAX has {theirs[255]:g}")
    same &= wrong.tolist() == [255] and ours[255] == -480
row = np.ones(8, ml_dtypes.float8_e4m3fn)
row.view(np.uint8)[3] = 0xFF
ours, theirs = both(lambda row, x: jnp.dot(row.astype(jnp.float32), x), row, np.ones(8, np.float32))
print(f"a row with one such NaN, times ones: IREE {ours:g}, JAX {theirs:g}")
raise SystemExit(0 if same and ours == -473 and np.isnan(theirs) else "changed")
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
