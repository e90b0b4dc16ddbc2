#!/usr/bin/env bash
# Transformers 5.24.0: GPT-2's reorder_and_upcast_attn changes no bit with sdpa, the default attention.
#
# The option divides q by the scale before the product and takes product and softmax in FP32, so that a training in 16
# bits does not diverge. So one may expect it of a GPT-2 whose configuration sets it. Only the eager attention reads it:
# with sdpa the logits in BF16 are those without it, bit for bit, and no warning comes. The option beside it,
# scale_attn_by_inverse_layer_idx, works with both. attn_implementation="eager" brings the former.
#
# Seen with transformers 5.24.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-29. Whether the option changes a logit
# of a GPT-2 of three layers in BF16 with random weights:
#
#   reorder_and_upcast_attn: eager yes, sdpa no
#   scale_attn_by_inverse_layer_idx: eager yes, sdpa yes
#   an attention that is named nowhere: sdpa
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from transformers import GPT2Config, GPT2LMHeadModel

ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))


def logits(**options):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=3, n_head=2, initializer_range=0.3,
                        bos_token_id=0, eos_token_id=0, **options)
    model = GPT2LMHeadModel(config).to(torch.bfloat16).eval()
    return model.config._attn_implementation, model(ids).logits


seen = {}
for option in ("reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx"):
    for attention in ("eager", "sdpa"):
        without, with_it = (logits(attn_implementation=attention, **{option: on})[1] for on in (False, True))
        seen[option, attention] = "no" if torch.equal(without, with_it) else "yes"
    print(f"{option}: eager {seen[option, 'eager']}, sdpa {seen[option, 'sdpa']}")
default = logits()[0]
print(f"an attention that is named nowhere: {default}")
raise SystemExit(0 if list(seen.values()) == ["yes", "no", "yes", "yes"] and default == "sdpa" else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
