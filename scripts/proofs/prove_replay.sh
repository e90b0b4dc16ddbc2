#!/usr/bin/env bash
# What one GPU has to show for replay: a run twice, killed and resumed; an explosion repeated from the checkpoint before
# its onset, and branched with other attentions from the checkpoint before its precursor.
# Usage: scripts/proofs/prove_replay.sh [PYTHON]; leaves run folders under runs/ and prints the comparisons last.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
train() { "$python" train.py tracking=disabled "$@"; }

train attn=flash_bf16 train.steps=2000 run_name=proof
train attn=flash_bf16 train.steps=2000 run_name=proof-again
"$python" train.py tracking=disabled attn=flash_bf16 train.steps=2000 run_name=proof-killed & victim=$!
until ls runs/proof-killed/checkpoints/*.json > /dev/null 2>&1; do
  kill -0 "$victim" || { echo "it ended before it could be killed" >&2; exit 1; }
  sleep 0.1
done
sleep 1
kill -KILL "$victim"
wait "$victim" || true
train resume=proof-killed

train attn=flash_bf16 run_name=explosion
onset=$("$python" -c 'import json; print(json.load(open("runs/explosion/outcome.json"))["onset_step"])')
train replay=explosion "from_step=$((onset - 1))" run_name=explosion-rewound
for attention in flash_fp32 flash_centered flash_fixed; do
  train replay=explosion "from_step=$((onset - 1000))" "attn=$attention" "train.steps=$((onset + 3000))" "run_name=branch-$attention"
done

for other in proof-again proof-killed; do
  echo "proof against $other: $("$python" -m flashpoint compare proof "$other" || true)"
done
for other in explosion-rewound branch-flash_fp32 branch-flash_centered branch-flash_fixed; do
  echo "explosion against $other: $("$python" -m flashpoint compare explosion "$other" || true)"
done
grep -H -E '"(outcome|step|onset_step|digest|seconds)"' runs/{proof,proof-again,proof-killed,explosion,explosion-rewound,branch-*}/outcome.json
