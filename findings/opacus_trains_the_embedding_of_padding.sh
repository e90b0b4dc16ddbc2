#!/usr/bin/env bash
# opacus 1.6.0: the row of padding_idx of an embedding has a gradient, so that padding is trained, and clips the rest.
#
# nn.Embedding(padding_idx=0) promises that row 0 gets no gradient and stays as it is, 0. So one may expect it behind
# PrivacyEngine, apart from noise. The gradients of each sample are computed anew from the tokens, and padding counts as
# any token. So the row moves from the first step on, in "hooks", the default, and in "ew". And as it stands in the
# sample's norm, a padded sample is clipped more: the gradients of its real tokens are smaller the more padding it has.
# grad_sample_mode="functorch" leaves the row alone.
#
# Seen with opacus 1.6.0, torch 2.13.0 and Python 3.11, 2026-11-30, without noise, for 16 texts of 4 tokens and 28 of
# padding: the norm of the row of padding after a step of SGD, and of the gradient of the real tokens, clipped to 1:
#
#   PyTorch: row of padding 0.000
#   hooks: row of padding 0.193, gradient of real tokens 0.017
#   ew: row of padding 0.193, gradient of real tokens 0.017
#   functorch: row of padding 0.000, gradient of real tokens 0.228
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 opacus==1.6.0 numpy
cat > "$folder/program.py" <<'PY'
import copy
import warnings

warnings.simplefilter("ignore")
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean(1)


torch.manual_seed(0)
tokens = torch.zeros(16, 32, dtype=torch.long)
tokens[:, :4] = torch.randint(1, 50, (16, 4))
labels = torch.randint(5, (16,))
model = torch.nn.Sequential(torch.nn.Embedding(50, 8, padding_idx=0), Mean(), torch.nn.Tanh(), torch.nn.Linear(8, 5))
model[3].requires_grad_(False)


def stepped(mode):
    """Norms of the row of padding after a step, and of the other rows' gradient."""
    private = copy.deepcopy(model)
    optimizer = torch.optim.SGD(private.parameters(), 1.0)
    if mode != "PyTorch":
        private, optimizer, _ = PrivacyEngine().make_private(
            module=private, optimizer=optimizer, data_loader=DataLoader(TensorDataset(tokens, labels), 16),
            noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode,
        )
    (100 * torch.nn.functional.cross_entropy(private(tokens), labels)).backward()
    optimizer.step()
    weight = next(private.parameters())
    return weight[0].norm().item(), weight.grad[1:].norm().item()


rows = {mode: stepped(mode) for mode in ("PyTorch", "hooks", "ew", "functorch")}
print(f"PyTorch: row of padding {rows['PyTorch'][0]:.3f}")
for mode in ("hooks", "ew", "functorch"):
    print("{}: row of padding {:.3f}, gradient of real tokens {:.3f}".format(mode, *rows[mode]))
same = rows["PyTorch"][0] == rows["functorch"][0] == 0 and min(rows["hooks"][0], rows["ew"][0]) > 0.1
raise SystemExit(0 if same and rows["hooks"][1] < rows["functorch"][1] / 3 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
