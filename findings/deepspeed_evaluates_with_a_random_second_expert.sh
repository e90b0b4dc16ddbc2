#!/usr/bin/env bash
# deepspeed 0.19.8: a mixture of experts with k=2 draws the second expert by chance in evaluations, too.
#
# In a training noise on the router's logits keeps all experts in use, and DeepSpeed's noisy gates leave it out in
# eval(). So one may expect an evaluation of the same batch to give the same loss, as with one expert or three. With
# two the second is drawn with the probability that the router gives it, whether the model trains or not:
# top2_2nd_expert_sampling is True unless it is set, and asks for no mode. So losses of evaluations scatter, a
# checkpoint is the best by chance, and the evaluation moves the random numbers of the training behind it. Nothing
# warns. TopKGate(..., top2_2nd_expert_sampling=False), or of MoE the same, takes the two likeliest.
#
# Seen with deepspeed 0.19.8, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. A gate of four experts in eval(), and
# 256 tokens twice: of how many tokens the experts differ, and whether the state of PyTorch's generator changes:
#
#   k=1: 0 of 256, stays
#   k=1, RSample: 0 of 256, stays
#   k=2: 158 of 256, changes
#   k=2, top2_2nd_expert_sampling=False: 0 of 256, stays
#   k=3: 0 of 256, stays
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy setuptools wheel packaging
"$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
cat > "$folder/program.py" <<'PY'
import torch
from deepspeed.moe.sharded_moe import TopKGate

TOKENS = 256


@torch.no_grad()
def differing(**options):
    torch.manual_seed(0)
    gate = TopKGate(8, 4, eval_capacity_factor=4.0, **options).eval()
    tokens = torch.randn(TOKENS, 8)
    before = torch.get_rng_state()
    first, second = (gate(tokens)[2].any(-1) for _ in range(2))
    return int((first != second).any(-1).sum()), not torch.equal(before, torch.get_rng_state())


seen = {}
for name, options in {
    "k=1": {"k": 1, "use_rts": False},
    "k=1, RSample": {"k": 1, "use_rts": False, "noisy_gate_policy": "RSample"},
    "k=2": {"k": 2},
    "k=2, top2_2nd_expert_sampling=False": {"k": 2, "top2_2nd_expert_sampling": False},
    "k=3": {"k": 3},
}.items():
    seen[name] = differing(**options)
    print(f"{name}: {seen[name][0]} of {TOKENS}, {'changes' if seen[name][1] else 'stays'}")
drawn = seen.pop("k=2")
raise SystemExit(0 if drawn[0] > 50 and drawn[1] and set(seen.values()) == {(0, False)} else "changed")
PY
export DS_ACCELERATOR=cpu
"$folder/venv/bin/python" -W ignore "$folder/program.py"
