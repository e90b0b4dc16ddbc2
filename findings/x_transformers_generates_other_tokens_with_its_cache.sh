#!/usr/bin/env bash
# x-transformers 2.31.10: with shift_tokens or data-dependent ALiBi, generate() writes another text than without cache.
#
# generate() keeps keys and values, which is its default and is to save time alone; where a model cannot do so, as with
# memory tokens, it leaves the cache. So one may expect the tokens that the model predicts without one. shift_tokens
# mixes each token with the one before it: with the cache a new token comes alone, and is mixed with zeros.
# attn_data_dependent_alibi sums gates from the first token on: with the cache it sums those of the new tokens. So a
# trained model is sampled as one that it never was, and looks worse than its loss. Nothing warns. Pass cache_kv=False.
# Rotary positions, ALiBi and T5's bias write the same text either way.
#
# Seen with x-transformers 2.31.10, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Random weights; how many of 2 x
# 24 tokens differ, greedily decoded with and without cache; and by how much the logits do, in standard deviations:
#
#   rotary_pos_emb: 0 of 48 tokens, logits 0.00
#   alibi_pos_bias: 0 of 48 tokens, logits 0.00
#   rel_pos_bias: 0 of 48 tokens, logits 0.00
#   shift_tokens: 41 of 48 tokens, logits 1.71
#   attn_data_dependent_alibi: 0 of 48 tokens, logits 0.09
#   attn_data_dependent_alibi_per_row: 42 of 48 tokens, logits 3.59
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet x-transformers==2.31.10 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

KINDS, PROMPT, NEW = 50, 6, 24
torch.set_num_threads(1)


@torch.no_grad()
def differences(**options):
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=3, heads=4, attn_dim_head=32, **options)
    model = TransformerWrapper(num_tokens=KINDS, max_seq_len=64, attn_layers=layers).eval()
    for weight in model.parameters():
        weight.add_(0.1 * torch.randn_like(weight))
    prompt = torch.randint(KINDS, (2, PROMPT))
    wrapper = AutoregressiveWrapper(model)
    cached, plain = (wrapper.generate(prompt, NEW, temperature=0.0, cache_kv=cache_kv) for cache_kv in (True, False))
    tokens = torch.cat([prompt, plain], dim=1)
    logits, cache = model(tokens[:, :-1], return_intermediates=True)
    last, _ = model(tokens, return_intermediates=True, cache=cache)
    uncached = model(tokens)
    change = (last[:, -1] - uncached[:, -1]).abs().max() / uncached.std()
    return int((cached != plain).sum()), change.item()


seen = {}
for option, value in {
    "rotary_pos_emb": True,
    "alibi_pos_bias": True,
    "rel_pos_bias": True,
    "shift_tokens": 1,
    "attn_data_dependent_alibi": True,
    "attn_data_dependent_alibi_per_row": True,
}.items():
    options = {option: value}
    if option == "attn_data_dependent_alibi_per_row":
        options["attn_data_dependent_alibi"] = True
    seen[option] = differences(**options)
    print("{}: {} of {} tokens, logits {:.2f}".format(option, seen[option][0], 2 * NEW, seen[option][1]))
same, other = list(seen.values())[:3], list(seen.values())[3:]
right = all(tokens == 0 and change < 1e-3 for tokens, change in same)
wrong = sum(tokens > 20 for tokens, _ in other) == 2 and min(change for _, change in other) > 0.02
raise SystemExit(0 if right and wrong else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
