#!/usr/bin/env bash
# What one GPU has to show for the trainer: throughput, bitwise replay, the tests marked gpu.
# Usage: scripts/measure_gpu.sh [PYTHON]; leaves run folders under runs/ and prints a table last.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
train() { "$python" train.py tracking=disabled "$@"; }

SECONDS=0
train attn=flash_bf16 train.steps=600 run_name=ignite
echo "ignite, first run with preparation and compilation: $SECONDS s"
train replay=ignite run_name=ignite-again
train replay=ignite train.cuda_graph=false run_name=ignite-single
train replay=ignite train.deterministic=false run_name=ignite-nondeterministic
train replay=ignite checkpoints.interval=0 train.checksum_interval=0 run_name=ignite-unrecorded
train replay=ignite attn=sdpa run_name=ignite-sdpa
train replay=ignite attn=flash_centered run_name=ignite-centered
gpt2=(experiment=gpt2_124m data=python_corpus data.vocab_size=8192 train.batch_size=32 train.eval_sequences=32)
train "${gpt2[@]}" train.steps=100 run_name=gpt2
train "${gpt2[@]}" train.steps=100 train.deterministic=false run_name=gpt2-nondeterministic
train "${gpt2[@]}" train.steps=100 attn=sdpa run_name=gpt2-sdpa
"$python" -m pytest -m gpu || true
"$python" -m flashpoint runs ignite ignite-again ignite-single ignite-nondeterministic ignite-unrecorded ignite-sdpa ignite-centered gpt2 gpt2-nondeterministic gpt2-sdpa --show rates
grep -H '"digest"' runs/{ignite,ignite-again,ignite-single}/outcome.json
