#!/usr/bin/env bash
# The kernels under compute-sanitizer on small shapes: accesses out of bounds, and races in shared memory.
# Usage: scripts/kernels/sanitize_kernels.sh [PYTHON]; needs a GPU and the CUDA toolkit.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
python=${1:-python3}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # else every tensor lies inside one allocation, and bounds mean little
status=0
for tool in memcheck racecheck; do
  compute-sanitizer --tool "$tool" --error-exitcode 9 --launch-timeout 300 --kernel-name-exclude kernel_substring=at:: \
    "$python" -m pytest -p no:cacheprovider tests/numerics/test_kernels.py \
    -k 'edges or outside' 2>&1 | grep -E '=========|passed|failed' | tail -4 | sed "s/^/$tool: /"
  [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
done
exit $status
