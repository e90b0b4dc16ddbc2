#!/usr/bin/env bash
# jax 0.10.2: on a CPU, jnp.max of a sharded array is finite where the array holds a NaN, and so are pmax and min.
#
# jnp.max of an array with a NaN is NaN, as in NumPy, and sharding changes how an array is computed, not what it is. So
# one may expect the NaN of a sharded array, too, where one looks at the largest gradient or activation. Each device's
# part has its NaN. But the devices' maxima are joined by a comparison that drops NaN, and what is left is the maximum of
# the other devices: finite, plausible, and smaller where the largest number was beside the NaN. So a check by
# isfinite(x.max()) passes, and a norm by ord=inf is that of the sound part. isnan(x).any(), argmax, sums and norms keep
# the NaN. A training that is debugged on devices simulated on a CPU passes where one device fails.
#
# Seen with jax 0.10.2, optax 0.2.8 and Python 3.11 on a CPU, 2026-11-30. The numbers 0 to 7 with a NaN in place of 3,
# on one device, and two each on four devices:
#
#   max: whole nan, sharded 7
#   min: whole nan, sharded 0
#   optax.tree.norm(ord="inf"): whole nan, sharded 7
#   isfinite(max): whole 0, sharded 1
#   isnan().any(): whole 1, sharded 1
#   sum: whole nan, sharded nan
#   optax.global_norm: whole nan, sharded nan
#   jax.lax.pmax in shard_map: 7
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 optax==0.2.8 numpy
cat > "$folder/program.py" <<'PY'
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
whole = jnp.arange(8.0).at[3].set(jnp.nan)
sharded = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("data")))
MEASURES = {
    "max": jnp.max,
    "min": jnp.min,
    'optax.tree.norm(ord="inf")': lambda x: optax.tree.norm(x, ord="inf"),
    "isfinite(max)": lambda x: jnp.isfinite(x.max()),
    "isnan().any()": lambda x: jnp.isnan(x).any(),
    "sum": jnp.sum,
    "optax.global_norm": optax.global_norm,
}
told = []
for name, measure in MEASURES.items():
    told.append("whole {:.0f}, sharded {:.0f}".format(*(float(jax.jit(measure)(x)) for x in (whole, sharded))))
    print(f"{name}: {told[-1]}", flush=True)
joined = jax.shard_map(
    lambda x: jax.lax.pmax(x.max(), "data"), mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
)(sharded)
print(f"jax.lax.pmax in shard_map: {joined:.0f}")
wrong = told[:4] == ["whole nan, sharded 7", "whole nan, sharded 0", "whole nan, sharded 7", "whole 0, sharded 1"]
right = told[4:] == ["whole 1, sharded 1", *["whole nan, sharded nan"] * 2]
raise SystemExit(0 if wrong and right and joined == 7 else "changed")
PY
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 "$folder/venv/bin/python" "$folder/program.py"
