#!/usr/bin/env bash
# transformers 5.24.0: a causal model in training attends across packed documents, as long as it makes a cache.
#
# Documents packed into one row have positions that begin anew. Without an attention_mask, transformers makes a mask of
# such position_ids, so that no document sees another. It does so only where there is no cache. A model in training
# mode makes one, too, which nothing uses: config.use_cache is True. Its documents then see those before them, without
# a word. With use_cache=False they do not.
#
# Seen with transformers 5.24.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-29. The number is by how much the logits
# of a document of 5 tokens change, at most, where one of 7 tokens is packed in front of it, seed 0:
#
#   sdpa: 0.2170
#   sdpa, use_cache=False: 0.0000
#   eager: 0.2170
#   eager, use_cache=False: 0.0000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from transformers import MistralConfig, MistralForCausalLM

config = MistralConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4, sliding_window=None,
)
seen = []
for attention in ("sdpa", "eager"):
    torch.manual_seed(0)
    model = MistralForCausalLM._from_config(config, attn_implementation=attention).train()
    tokens = torch.randint(32, (1, 12))
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    alone = model(input_ids=tokens[:, 7:]).logits
    for told, options in (("", {}), (", use_cache=False", {"use_cache": False})):
        packed = model(input_ids=tokens, position_ids=positions, **options).logits[:, 7:]
        changed = float((packed - alone).detach().abs().max())
        print(f"{attention}{told}: {changed:.4f}")
        seen.append(changed > 1e-3)
raise SystemExit(0 if seen == [True, False, True, False] else "changed")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
