#!/usr/bin/env bash
# opacus 1.6.0: a convolution with circular, reflected or replicated padding trains on the gradients of zero padding.
#
# A model behind PrivacyEngine has the loss that it had, and each sample's gradient, clipped, summed and made noisy. So
# one may expect, with a clip that is never reached and no noise, the gradients of PyTorch, or an error for a layer that
# is not supported. The gradient of a convolution's weights is computed anew from its input, which is padded with
# zeros whatever padding_mode says. The validator passes the layer, and loss and bias are right. "hooks" is the default;
# grad_sample_mode="functorch" has the right gradients.
#
# Seen with opacus 1.6.0, torch 2.13.0 and Python 3.11, 2026-11-30, in FP64. The error of the gradient of a 3×3
# convolution of 8×8 images, as part of its norm; the number of the validator's complaints; functorch's error:
#
#   zeros: 0.000, 0 complaints; functorch 0.000
#   circular: 0.364, 0 complaints; functorch 0.000
#   reflect: 0.403, 0 complaints; functorch 0.000
#   replicate: 0.394, 0 complaints; functorch 0.000
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
from opacus.validators import ModuleValidator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
images, labels = torch.randn(16, 3, 8, 8), torch.randint(5, (16,))


def gradient(model, optimizer=None):
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    if optimizer is not None:
        optimizer.pre_step()
    return next(model.parameters()).grad


def error(model, mode):
    """Of the gradient of an engine without noise and without a clip that is reached."""
    private = copy.deepcopy(model)
    optimizer = torch.optim.SGD(private.parameters(), 0.1)
    private, optimizer, _ = PrivacyEngine().make_private(
        module=private, optimizer=optimizer, data_loader=DataLoader(TensorDataset(images, labels), 16),
        noise_multiplier=0.0, max_grad_norm=1e9, poisson_sampling=False, grad_sample_mode=mode,
    )
    expected = gradient(copy.deepcopy(model))
    return ((gradient(private, optimizer) - expected).norm() / expected.norm()).item()


same = True
for padding in ("zeros", "circular", "reflect", "replicate"):
    convolution = torch.nn.Conv2d(3, 4, 3, padding=1, padding_mode=padding)
    model = torch.nn.Sequential(convolution, torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(256, 5))
    hooks, functorch = error(model, "hooks"), error(model, "functorch")
    complaints = len(ModuleValidator.validate(model))
    print(f"{padding}: {hooks:.3f}, {complaints} complaints; functorch {functorch:.3f}")
    same &= (hooks > 0.05) == (padding != "zeros") and complaints == 0 and functorch < 1e-9
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
