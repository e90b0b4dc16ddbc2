#!/usr/bin/env bash
# litgpt 0.5.13: with a cache of keys and values Gemma 2 reads the later tokens of its prompt, and generates other
# text.
#
# A cache is to save time alone. So one may expect the logits of the whole sequence from a prompt and one token after
# the other. With a cache the causal mask is a boolean one, of which scaled_dot_product_attention closes what is
# False. Gemma 2 caps its scores, and so litgpt computes its attention itself: there the mask is added to the scores,
# where True is 1 and False is 0. That closes nothing, and lowers later tokens by 1 nat. The prompt reads itself to
# its end, its keys and values are those of no training, and all that is generated comes from them. Trained, or
# evaluated without a cache, the same model is causal, so that its loss is better than its text. Nothing warns. Gemma
# 3 and Llama, without a cap, agree.
#
# Seen with litgpt 0.5.13, lightning 2.6.6, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Random weights, four
# layers, a prompt of 12 tokens and 8 more: by how much the logits differ from those without a cache, at most, in
# standard deviations, of the prompt and of the 8; by how much those of the prompt's first 11 tokens change with its
# last; and how many of 12 generated tokens are others:
#
#   Llama-3.2-1B: prompt 0.00, then 0.00; with the last token 0.00; 0 tokens
#   Gemma-3-1b-it: prompt 0.00, then 0.00; with the last token 0.00; 0 tokens
#   Gemma-2-2b: prompt 0.92, then 0.27; with the last token 0.34; 8 tokens
#   Gemma-2-2b without a cap: prompt 0.00, then 0.00; with the last token 0.00; 0 tokens
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet litgpt==0.5.13 lightning==2.6.6 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from litgpt.config import Config
from litgpt.generate.base import generate
from litgpt.model import GPT

PROMPT, MORE, NEW = 12, 8, 12
SIZES = {
    "n_layer": 4,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 16,
    "n_embd": 64,
    "intermediate_size": 128,
    "padded_vocab_size": 96,
    "block_size": 64,
}
torch.set_num_threads(1)


@torch.no_grad()
def differences(name, **options):
    torch.manual_seed(0)
    model = GPT(Config.from_name(name, **SIZES, **options)).eval()
    tokens = torch.randint(96, (1, PROMPT + MORE))
    exact = model(tokens)

    def of_prompt(last):
        model.set_kv_cache(batch_size=1, max_seq_length=64)
        prompt = torch.cat([tokens[:, : PROMPT - 1], torch.tensor([[last]])], dim=1)
        return model(prompt, torch.arange(PROMPT), PROMPT)

    seen_later = float((of_prompt(1) - of_prompt(2))[:, :-1].abs().max() / exact.std())
    logits = [of_prompt(int(tokens[0, PROMPT - 1]))]
    for at in range(PROMPT, PROMPT + MORE):
        logits.append(model(tokens[:, at : at + 1], torch.tensor([at]), at + 1))
    change = (torch.cat(logits, dim=1) - exact).abs().amax(-1)[0] / exact.std()
    model.clear_kv_cache()
    model.set_kv_cache(batch_size=1, max_seq_length=64)
    cached = generate(model, tokens[0, :PROMPT], PROMPT + NEW, temperature=0.0, top_k=1)
    model.clear_kv_cache()
    plain = tokens[:, :PROMPT]
    for _ in range(NEW):
        plain = torch.cat([plain, model(plain)[:, -1:].argmax(-1)], dim=1)
    return float(change[:PROMPT].max()), float(change[PROMPT:].max()), seen_later, int((cached != plain[0]).sum())


seen = {}
for name, options in {
    "Llama-3.2-1B": {},
    "Gemma-3-1b-it": {"sliding_window_indices": [1, 1, 1, 0], "rope_indices": [1, 1, 1, 0]},
    "Gemma-2-2b": {"sliding_window_indices": [1, 0, 1, 0]},
    "Gemma-2-2b without a cap": {"sliding_window_indices": [1, 0, 1, 0], "attention_logit_softcapping": None},
}.items():
    seen[name] = differences(name.split()[0], **options)
    print("{}: prompt {:.2f}, then {:.2f}; with the last token {:.2f}; {} tokens".format(name, *seen[name]))
opened = seen.pop("Gemma-2-2b")
raise SystemExit(0 if min(opened[:3]) > 0.05 and all(max(found) < 1e-3 for found in seen.values()) else "changed")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/program.py"
