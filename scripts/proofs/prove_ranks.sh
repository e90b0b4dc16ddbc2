#!/usr/bin/env bash
# What two GPUs have to show: the same bits twice, how far one GPU with accumulation is from them, how fast they are
# beside one GPU at 7 M and 124 M parameters, and that the end of one process ends the other, whose run goes on. Twice
# the tokens/s of one GPU with half the batch is what two could reach if nothing were exchanged.
# Usage: scripts/proofs/prove_ranks.sh [PYTHON]; leaves run folders in runs/prove-ranks/, in the place of those of an earlier
# call, and prints the comparisons last.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
runs=runs/prove-ranks
two=("$python" -m torch.distributed.run --nproc-per-node=2 train.py tracking=disabled "runs_dir=$runs")
one=("$python" train.py tracking=disabled "runs_dir=$runs")
small=(attn=flash_bf16 train.steps=600)
large=(experiment=gpt2_124m data=packages data.tokenizer=bpe attn=flash_bf16 train.batch_size=64 train.micro_batch_size=32
  train.steps=60 train.eval_interval=60 train.eval_sequences=1 checkpoints.interval=0)

rm -rf $runs
mkdir -p $runs
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0,1}
first=${CUDA_VISIBLE_DEVICES%%,*}
"${two[@]}" "${small[@]}" run_name=ranks
"${two[@]}" replay=ranks run_name=ranks-again
CUDA_VISIBLE_DEVICES=$first "${one[@]}" "${small[@]}" run_name=one
CUDA_VISIBLE_DEVICES=$first "${one[@]}" "${small[@]}" train.micro_batch_size=4 run_name=accumulated
CUDA_VISIBLE_DEVICES=$first "${one[@]}" "${small[@]}" train.batch_size=4 run_name=half
CUDA_VISIBLE_DEVICES=$first "${one[@]}" "${large[@]}" run_name=large-one
CUDA_VISIBLE_DEVICES=$first "${one[@]}" "${large[@]}" train.batch_size=32 run_name=large-half
"${two[@]}" "${large[@]}" run_name=large-ranks

"${two[@]}" attn=flash_bf16 checkpoints.interval=200 run_name=killed 2>$runs/killed.txt &
launcher=$!
until [ -n "$(ls $runs/killed/checkpoints/*.json 2>/dev/null)" ]; do
  kill -0 $launcher
  sleep 1
done
kill -9 "$(pgrep -P $launcher | tail -1)"
SECONDS=0
wait $launcher || true
echo "a process was killed: the other ended after $SECONDS s; beside the report of torchrun it said:"
grep -v '^W\|^E\|^ \|^$\|^[-=]\|step/s' $runs/killed.txt || true
"${two[@]}" resume=killed train.steps=1000

for other in ranks-again accumulated; do
  echo "ranks against $other: $("$python" -m flashpoint compare $runs/ranks $runs/$other || true)"
done
"$python" -m flashpoint runs $runs/{ranks,ranks-again,accumulated,large-one,large-ranks,killed}
"$python" -m flashpoint runs $runs/{one,half,ranks,large-one,large-half,large-ranks} --show rates
