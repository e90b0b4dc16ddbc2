#!/usr/bin/env bash
# What the probes cost: none, the default, and everything at every step, on both shapes.
# Usage: scripts/benchmarks/measure_probes.sh [PYTHON]; leaves run folders under runs/ and prints a table last.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
off=(probes.weights_interval=0 probes.attention_interval=0)
every=(probes.weights_interval=1 probes.attention_interval=1)

measure() {  # name, steps, settings
    local name=$1 steps=$2
    shift 2
    "$python" train.py "$@" tracking=disabled train.steps="$steps" run_name="$name-unprobed" "${off[@]}"
    "$python" train.py "$@" tracking=disabled train.steps="$steps" run_name="$name-probed"
    "$python" train.py "$@" tracking=disabled train.steps=200 run_name="$name-probed-every-step" "${every[@]}"
}
measure ignite 2000
measure gpt2 800 experiment=gpt2_124m data=python_corpus data.vocab_size=8192 train.batch_size=32 train.eval_sequences=32
for name in ignite gpt2; do
    "$python" -m flashpoint runs "runs/$name-unprobed" "runs/$name-probed" "runs/$name-probed-every-step" --show overhead
done
