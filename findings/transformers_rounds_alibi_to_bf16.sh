#!/usr/bin/env bash
# Transformers 5.24.0: the ALiBi of Bloom in BF16, and of Falcon also in FP32, gives the nearest keys one weight.
#
# ALiBi takes a slope times the distance off each score, so that a key weighs more the nearer it is. So one may expect
# the same weights at token 2,000 as at token 16, up to the rounding of a number near 0. Bloom and Falcon add the slope
# times the key's own position, which softmax cannot tell from the distance, and round it to BF16. Its numbers near
# 1,000 lie 4 apart: with a slope of 0.5 the last four of 2,048 keys share one bias, and the eight before them one that
# is 4 lower. Falcon rounds so in FP32 and FP16, too. The error grows with the position, and nothing warns. MPT counts
# from the last token, and has the right weights in BF16. Bloom has them in FP32.
#
# Seen with transformers 5.24.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-29. All tokens of the input are the
# same, so that ALiBi alone makes the weights; those of the last five keys of two tokens in the first of eight heads:
#
#   Bloom in float32: token 16: 0.05 0.09 0.14 0.24 0.39; token 2,048: 0.05 0.09 0.14 0.24 0.39
#   Bloom in bfloat16: token 16: 0.05 0.09 0.14 0.24 0.39; token 2,048: 0.00 0.24 0.24 0.24 0.24
#   Falcon in float32: token 16: 0.07 0.10 0.15 0.21 0.30; token 2,048: 0.01 0.22 0.22 0.22 0.22
#   MPT in bfloat16: token 16: 0.05 0.09 0.14 0.24 0.39; token 2,048: 0.05 0.09 0.14 0.24 0.39
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from transformers import BloomConfig, BloomModel, FalconConfig, FalconModel, MptConfig, MptModel

TOKENS = 2048
SIZES = {"vocab_size": 64, "hidden_size": 64, "attn_implementation": "eager"}
MODELS = {
    "Bloom": lambda: BloomModel(BloomConfig(n_layer=1, n_head=8, **SIZES)),
    "Falcon": lambda: FalconModel(FalconConfig(num_hidden_layers=1, num_attention_heads=8, alibi=True, **SIZES)),
    "MPT": lambda: MptModel(MptConfig(n_layers=1, n_heads=8, max_seq_len=TOKENS, **SIZES)),
}


def weights(name, dtype):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).eval()
    with torch.no_grad():
        found = model(torch.full((1, TOKENS), 5), output_attentions=True).attentions[0][0, 0].float()
    return found[15, 11:16], found[-1, -5:]


ok = True
for name, dtype, wrong in (
    ("Bloom", torch.float32, False),
    ("Bloom", torch.bfloat16, True),
    ("Falcon", torch.float32, True),
    ("MPT", torch.bfloat16, False),
):
    early, late = weights(name, dtype)
    of_both = (" ".join(f"{x:.2f}" for x in of) for of in (early, late))
    print(f"{name} in {str(dtype)[6:]}:", "token 16: {}; token 2,048: {}".format(*of_both), flush=True)
    ok &= bool((early.diff() > 0.02).all())
    ok &= bool((late[1:] == late[1]).all()) if wrong else bool((late - early).abs().max() < 0.01)
raise SystemExit(0 if ok else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
