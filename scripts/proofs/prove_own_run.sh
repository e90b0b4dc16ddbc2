#!/usr/bin/env bash
# Tests whether a GPT-2 of Transformers explodes with PyTorch's attention, is warned of, diagnosed and localised, and
# holds with the drop-in on the same batches. One GPU, an hour or more.
# Usage: scripts/proofs/prove_own_run.sh OUT [KEY=VALUE …]; the settings are those of examples/explode_gpt2.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
run=$out/explode-sdpa
python examples/explode_gpt2.py runs="$out" "$@" 2>&1 | tee "$out/1-explodes.txt"
flashpoint diagnose "$run" | tee "$out/2-diagnose.txt"
flashpoint diagnose "$run" --attention sdpa:"${BACKEND:-flash}" | tee "$out/2-diagnose-anew.txt"
python examples/explode_gpt2.py runs="$out" attention=flash_unrounded_out "$@" 2>&1 | tee "$out/3-holds.txt"
cmp -n "$(stat -c %s "$run/batches.csv")" "$run/batches.csv" "$out/explode-flash_unrounded_out/batches.csv"
# It refuses a run whose W_Q does not outgrow its twin's: an answer, too.
flashpoint localize "$run" --function examples/explode_gpt2.py:step --checkpoints "$run/step-*.pt" \
    --steps "${STEPS:-300}" --minutes 30 2>&1 | tee "$out/4-localize.txt" || true
flashpoint report "$run" "$out/explode-flash_unrounded_out" --out "$out/report"
