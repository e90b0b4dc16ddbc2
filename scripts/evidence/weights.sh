#!/usr/bin/env bash
# How far weights come apart where two runs differ in one thing (arXiv 2405.02803, figures 7 and 8).
# Usage: scripts/evidence/weights.sh SEEDS [KEY=VALUE …], e.g. scripts/evidence/weights.sh 0,1,2,3 experiment=laptop train.steps=600
# PRECISIONS=fp16,fp32,tf32 adds TF32, which a CPU does not have; RUNS_PER_GPU and INTERVAL, in steps, have defaults below.
# Leaves run folders under runs/weights-*/, prints the tables and writes figures with their data into runs/weights-figures/.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
seeds=$1
shift
sweep() {
  local name=$1
  shift
  "$python" train.py -m hydra/launcher=gpus hydra.launcher.sweep="weights-$name" tracking=disabled \
    probes.attention_interval=0 checkpoints.interval=0 detector.margin=100 "$@" seed="$seeds"
}
slots=hydra.launcher.runs_per_gpu=${RUNS_PER_GPU:-2}
against() { echo "probes.weights_against=runs/weights-twins/$1_seed-\${seed}"; }

sweep twins "$slots" attn=standard,sdpa checkpoints.weights_interval="${INTERVAL:-50}" "$@"
sweep attention "$slots" attn=flash_fp32,flash_bf16 "$(against standard)" "$@"
sweep weight "$slots" attn=standard model.init_ulps=65536 "$(against standard)" "$@"
sweep order "$slots" attn=standard train.order_seed=1000 "$(against standard)" "$@"
sweep initial "$slots" attn=standard model.init_seed=1000 "$(against standard)" "$@"
sweep precision "$slots" attn=sdpa train.precision="${PRECISIONS:-fp16,fp32}" "$(against sdpa)" "$@"
"$python" -m flashpoint weights 'runs/weights-[!t]*/*' --control "initial weights" --figures runs/weights-figures
