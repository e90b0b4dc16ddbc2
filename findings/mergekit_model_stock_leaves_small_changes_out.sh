#!/usr/bin/env bash
# mergekit 0.1.5: model_stock of three copies of a fine-tuned model is near the base, where training moved it little.
#
# Model Stock goes from the base towards the mean of several fine-tuned models, the farther the more their changes
# agree: by the cosine of the angle between two. So one may expect three equal models to make that model, whatever the
# size of the changes. The cosine is the product of two changes over that of their norms, and this divisor is at least
# 1e-6. Where the change of a tensor, or with filter_wise of a row, has a norm below 0.001, the cosine is too small, and
# so is the step. Weights of a norm layer, which have few numbers, are left at the base first; with filter_wise and a
# low learning rate all are.
#
# Seen with mergekit 0.1.5, torch 2.13.0, transformers 5.24.0 and Python 3.11, 2026-11-30, in FP32. Every weight of a
# small Llama moves by plus or minus a size, three times alike. What part of that change the merge has:
#
#   moved by 0.01000: norm 1.000, others 1.000; filter_wise: norm 1.000, others 1.000
#   moved by 0.00010: norm 0.841, others 1.000; filter_wise: norm 0.841, others 0.861
#   moved by 0.00001: norm 0.020, others 0.779; filter_wise: norm 0.020, others 0.020
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 mergekit==0.1.5 transformers==5.24.0 safetensors==0.8.0
cat > "$folder/program.py" <<'PY'
import copy
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=100)
base = LlamaForCausalLM(config)
base.save_pretrained("base")
HERE = Path.cwd()


def kept(size, filter_wise):
    """Parts of the change of the norms' weights, and of the others, that the merge of three equal models has."""
    tuned = copy.deepcopy(base)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.add_(torch.randn_like(weight).sign(), alpha=size)
    names = [f"{size}_{filter_wise}_{number}" for number in range(3)]
    for name in names:
        tuned.save_pretrained(name)
    merge = {
        "merge_method": "model_stock",
        "base_model": str(HERE / "base"),
        "models": [{"model": str(HERE / name)} for name in names],
        "parameters": {"filter_wise": filter_wise},
        "dtype": "float32",
    }
    out = Path(f"merged_{size}_{filter_wise}")
    run_merge(MergeConfiguration.model_validate(merge), str(out), MergeOptions(copy_tokenizer=False, cuda=False))
    before, after = base.state_dict(), tuned.state_dict()
    products = {True: [0, 0], False: [0, 0]}
    for file in out.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            change, whole = (array.double() - before[name].double() for array in (weight, after[name]))
            products["norm" in name][0] += (change * whole).sum().item()
            products["norm" in name][1] += whole.square().sum().item()
    return [some / all_of_it for some, all_of_it in products.values()]


seen = {}
for size in (1e-2, 1e-4, 1e-5):
    seen[size] = [kept(size, filter_wise) for filter_wise in (False, True)]
    (norm, others), (norm_wise, others_wise) = seen[size]
    print(
        f"moved by {size:.5f}: norm {norm:.3f}, others {others:.3f}; "
        f"filter_wise: norm {norm_wise:.3f}, others {others_wise:.3f}"
    )
right = all(part > 0.99 for parts in seen[1e-2] for part in parts)
raise SystemExit(0 if right and seen[1e-5][0][0] < 0.1 and max(seen[1e-5][1]) < 0.1 else "changed")
PY
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python program.py 2> /dev/null | grep moved
