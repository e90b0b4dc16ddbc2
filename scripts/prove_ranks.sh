#!/usr/bin/env bash
# What two GPUs have to show: 300 steps twice with the same bits, how far one GPU with accumulation is from them, and
# what two runs side by side cost each other.
# Usage: scripts/prove_ranks.sh [PYTHON]; leaves run folders under runs/ and prints the comparisons last.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
options=(tracking=disabled attn=flash_bf16 train.steps=300)

CUDA_VISIBLE_DEVICES=0 "$python" train.py "${options[@]}" train.micro_batch_size=4 run_name=accumulated
"$python" -m torch.distributed.run --nproc-per-node=2 train.py "${options[@]}" run_name=ranks
"$python" -m torch.distributed.run --nproc-per-node=2 train.py tracking=disabled replay=ranks run_name=ranks-again
for device in 0 1; do
  CUDA_VISIBLE_DEVICES=$device "$python" train.py tracking=disabled replay=accumulated run_name="side-by-side-$device" &
done
wait
for pair in "ranks ranks-again" "ranks accumulated" "accumulated side-by-side-0" "side-by-side-0 side-by-side-1"; do
  # shellcheck disable=SC2086 - two words
  echo "$pair: $("$python" -m flashpoint compare $pair || true)"
done
"$python" -m flashpoint runs accumulated ranks ranks-again side-by-side-0 side-by-side-1 --show rates
