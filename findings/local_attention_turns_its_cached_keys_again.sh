#!/usr/bin/env bash
# local-attention 1.11.2: generate() of LocalTransformer turns each cached key anew at every token, and so errs.
#
# generate() keeps keys and values, which is its default and is to save time alone. So one may expect the tokens that
# the model predicts without a cache. Rotary positions turn a key by an angle that grows with its position. The cache
# takes the keys as they are after that turn, and the next token turns all of them once more: after n tokens a key has
# been turned n times, and no query meets it at its distance. The first token after the prompt is right, each later
# one less so. A trained model is sampled as one that it never was, and looks worse than its loss. Nothing warns. Pass
# use_kv_cache=False. With use_dynamic_pos_bias, which turns nothing, both ways agree.
#
# Seen with local-attention 1.11.2, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Random weights, a prompt of 8
# tokens and a window of 8: how many of 2 x 20 tokens differ, decoded greedily with and without cache; then by how
# much the logits of the 1st, 2nd and 3rd new token do, on the same tokens, in standard deviations:
#
#   rotary: 28 of 40 tokens, logits 0.00 0.36 0.61
#   rotary, xpos: 28 of 40 tokens, logits 0.00 0.49 0.52
#   dynamic bias: 0 of 40 tokens, logits 0.00 0.00 0.00
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet local-attention==1.11.2 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import random

import torch
from local_attention import LocalTransformer

KINDS, PROMPT, NEW = 50, 8, 20
torch.set_num_threads(1)


@torch.no_grad()
def differences(**options):
    random.seed(0)  # from which the model draws, too
    torch.manual_seed(0)
    model = LocalTransformer(
        num_tokens=KINDS,
        max_seq_len=64,
        dim=64,
        depth=2,
        local_attn_window_size=8,
        heads=4,
        dim_head=16,
        **options,
    ).eval()
    for weight in model.parameters():
        weight.add_(0.1 * torch.randn_like(weight))
    prompt = torch.randint(KINDS, (2, PROMPT))
    cached, plain = (model.generate(prompt, NEW, temperature=0.0, use_kv_cache=kept) for kept in (True, False))
    tokens = torch.cat([prompt, plain], dim=1)
    exact = model(tokens)
    _, cache = model(prompt, return_cache=True)
    changes = []
    for end in range(PROMPT + 1, PROMPT + 4):
        logits, cache = model(tokens[:, :end], cache=cache, return_cache=True)
        changes.append(float((logits[:, -1] - exact[:, end - 1]).abs().max() / exact.std()))
    return int((cached != plain).sum()), changes


seen = {}
for name, options in {
    "rotary": {},
    "rotary, xpos": {"use_xpos": True},
    "dynamic bias": {"use_dynamic_pos_bias": True},
}.items():
    seen[name] = differences(**options)
    print("{}: {} of {} tokens, logits {:.2f} {:.2f} {:.2f}".format(name, seen[name][0], 2 * NEW, *seen[name][1]))
wrong = all(seen[name][0] > 15 and max(seen[name][1]) > 0.1 for name in ("rotary", "rotary, xpos"))
right = seen["dynamic bias"][0] == 0 and max(seen["dynamic bias"][1]) < 1e-4
raise SystemExit(0 if wrong and right else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
