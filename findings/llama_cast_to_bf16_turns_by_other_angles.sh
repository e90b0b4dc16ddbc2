#!/usr/bin/env bash
# transformers 5.24.0: a Llama cast by .to(torch.bfloat16) gives other logits once it is saved and loaded again.
#
# Weights in BF16 are saved and loaded bit for bit. So one may expect the loaded model to give the logits of the one that
# was trained, and a resumed training to go on at its loss. .to(torch.bfloat16) also rounds the frequencies of the
# rotary positions, a buffer that is not saved. from_pretrained with dtype=torch.bfloat16 makes them anew, in FP32. A
# frequency that is off by a 500th turns token 1,000 by an angle that is off by more than a radian: short inputs agree,
# and long ones part. Nothing warns. from_config(config, dtype=torch.bfloat16) makes a model in BF16 whose frequencies
# are FP32, and keeps them.
#
# Seen with transformers 5.24.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Two layers of two heads of 128, with
# random weights, seed 0. Around a token the largest error of an angle, and |a − b| / |b| of the logits, from those of
# the same weights in FP32:
#
#   weights equal: True; frequencies: cast bfloat16, loaded float32, made in BF16 float32
#   token 16: angle off by 0.02; logits off by: cast 0.02, loaded 0.02
#   token 512: angle off by 0.63; logits off by: cast 0.17, loaded 0.02
#   token 2048: angle off by 2.51; logits off by: cast 0.55, loaded 0.02
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import tempfile

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

transformers.utils.logging.disable_progress_bar()
WIDTH = 8  # tokens that an error is taken over
config = LlamaConfig(
    vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.1,
)
torch.manual_seed(0)
tokens = torch.randint(64, (1, 2048))
cast = LlamaForCausalLM(config).to(torch.bfloat16)
with tempfile.TemporaryDirectory() as folder:
    cast.save_pretrained(folder)
    loaded, exact = (LlamaForCausalLM.from_pretrained(folder, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
equal = all(torch.equal(a, b) for a, b in zip(cast.state_dict().values(), loaded.state_dict().values(), strict=True))
of_cast, of_loaded, of_made = (model.model.rotary_emb.inv_freq for model in (cast, loaded, made))
dtypes = [str(of.dtype).removeprefix("torch.") for of in (of_cast, of_loaded, of_made)]
print("weights equal: {}; frequencies: cast {}, loaded {}, made in BF16 {}".format(equal, *dtypes))
with torch.no_grad():
    *found, right = (model(tokens).logits[0].float() for model in (cast, loaded, exact))
same = equal and dtypes == ["bfloat16", "float32", "float32"]
for token in (16, 512, 2048):
    angle = token * float((of_cast.float() - of_loaded).abs().max())
    here = slice(token - WIDTH, token)
    errors = [float((logits[here] - right[here]).norm() / right[here].norm()) for logits in found]
    print("token {}: angle off by {:.2f}; logits off by: cast {:.2f}, loaded {:.2f}".format(token, angle, *errors))
    same &= errors[1] < 0.05 and (errors[0] < 0.05 if token == 16 else errors[0] > 0.1)
raise SystemExit(0 if same else "changed")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/program.py" 2> /dev/null
