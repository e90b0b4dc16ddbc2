#!/usr/bin/env bash
# transformers 5.24.0: Mamba, FalconMamba and Jamba begin anew where a cache is followed by more than one token.
#
# A chat hands the cache of the last turn on, so that the text before need not be read again, and generate() takes it.
# So one may expect the tokens of a run without cache. In these three models the scan over several tokens starts at a
# state of 0, whatever the cache holds; only single tokens go on from it. So at the next turn all that was said is
# forgotten but the last tokens that the convolution keeps, and the cache then holds the state of the new turn alone.
# The prompt of Jamba that prefill_chunk_size cuts is forgotten up to its last piece. Nothing warns, and the text stays
# fluent. Jamba's attention layers still see all, which hides it further. Models of Mamba 2, as Falcon-H1, had the
# fault and are right since pull request 46741; so is Qwen3-Next.
#
# Seen with transformers 5.24.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Random weights, a turn of eight
# tokens and one of six; by how many standard deviations the logits behind both are others than without cache, where
# the second turn comes token by token, and at once:
#
#   Mamba: 0.00, 3.52
#   FalconMamba: 0.00, 2.37
#   Jamba: 0.00, 1.89
#   FalconH1: 0.00, 0.00
#   Qwen3Next: 0.00, 0.00
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

WRONG, RIGHT = ("Mamba", "FalconMamba", "Jamba"), ("FalconH1", "Qwen3Next")
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MORE = {
    "Mamba": {"state_size": 8, "time_step_rank": 4},
    "FalconMamba": {"state_size": 8, "time_step_rank": 4},
    "Jamba": {**HEADS, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
    "FalconH1": {
        **HEADS,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
    },
    "Qwen3Next": {
        **HEADS,
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


def model_of(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MORE[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3) if weight.dim() > 1 else weight.add_(0.1 * torch.randn_like(weight))
    return model


@torch.no_grad()
def changes(name):
    model = model_of(name)
    tokens = torch.randint(3, 64, (2, 14))
    whole = model(tokens, use_cache=False).logits

    def change(pieces):
        cache = None
        for piece in tokens.split(pieces, dim=1):
            out = model(piece, use_cache=True, **({key: cache} if cache is not None else {}))
            key = next(key for key in ("cache", "past_key_values") if out.get(key) is not None)
            cache = out[key]
        return ((out.logits[:, -1] - whole[:, -1]).abs().max() / whole.std()).item()

    return change([8] + [1] * 6), change([8, 6])


seen = {name: changes(name) for name in (*WRONG, *RIGHT)}
for name, found in seen.items():
    print("{}: {:.2f}, {:.2f}".format(name, *found))
single = max(one for one, _ in seen.values()) < 1e-2
wrong, right = min(seen[name][1] for name in WRONG), max(seen[name][1] for name in RIGHT)
raise SystemExit(0 if single and wrong > 0.3 and right < 1e-2 else "changed")
PY
HF_HUB_OFFLINE=1 HF_HOME="$folder" "$folder/venv/bin/python" -W ignore "$folder/program.py" 2> "$folder/log" ||
    { tail -3 "$folder/log"; exit 1; }
