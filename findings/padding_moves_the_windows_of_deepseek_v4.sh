#!/usr/bin/env bash
# transformers 5.24.0: DeepSeek-V4 and RecurrentGemma read the padding of a batch, whatever its mask says.
#
# generate() takes prompts of several lengths as a batch, padded on the left, with an attention mask. So one may expect
# each prompt to have the tokens that it has alone, as with Llama. DeepSeek-V4 makes one key of each window of tokens,
# counted from the first column of the batch: padding moves all windows, and is part of those it falls into. The
# convolution of RecurrentGemma mixes padding into the first tokens. So what a prompt generates goes by the longest
# prompt of its batch, and an evaluation in batches has another score than one by one. Nothing warns, where RWKV says
# that it drops the mask. Give batches of prompts of one length. Mamba, which has a convolution too, heeds the mask.
#
# Seen with transformers 5.24.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Random weights; how many of 2 x 16
# greedily decoded tokens differ where the same prompts of 14 tokens have five columns of padding before them:
#
#   DeepseekV4: 9 of 32
#   RecurrentGemma: 5 of 32
#   Llama: 0 of 32
#   Mamba: 0 of 32
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
import transformers

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MODELS = {
    "DeepseekV4": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "o_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    "RecurrentGemma": {**HEADS, "lru_width": 32, "attention_window_size": 64, "head_dim": 8},
    "Llama": HEADS,
    "Mamba": {"state_size": 8, "time_step_rank": 4},
}
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


@torch.no_grad()
def different(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.normal_(0, 0.3) if weight.dim() > 1 else weight.add_(0.1 * torch.randn_like(weight))
    prompts, padding = torch.randint(3, 64, (2, 14)), torch.zeros(2, 5, dtype=torch.long)

    def written(columns):
        tokens = torch.cat([columns, prompts], dim=1)
        mask = torch.cat([columns, torch.ones_like(prompts)], dim=1)
        out = model.generate(
            tokens, attention_mask=mask, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return out[:, tokens.shape[1] :]

    alone, padded = written(padding[:, :0]), written(padding)
    return int((alone != padded).sum()), alone.numel()


seen = {}
for name in MODELS:
    seen[name], number = different(name)
    print(f"{name}: {seen[name]} of {number}", flush=True)
read = min(seen[name] for name in ("DeepseekV4", "RecurrentGemma"))
raise SystemExit(0 if read > 2 and seen["Llama"] == seen["Mamba"] == 0 else "changed")
PY
HF_HUB_OFFLINE=1 HF_HOME="$folder" "$folder/venv/bin/python" -W ignore "$folder/program.py" 2> "$folder/log" ||
    { tail -3 "$folder/log"; exit 1; }
