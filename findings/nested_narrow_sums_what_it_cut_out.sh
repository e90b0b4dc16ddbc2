#!/usr/bin/env bash
# PyTorch 2.13.0: the mean or sum of a jagged tensor made by torch.nested.narrow counts what the cut left out.
#
# torch.nested.narrow takes of each padded row its own tokens, without a copy, and with layout=torch.jagged gives a
# nested tensor of them: its rows, its numel() and its unbind() are those of the tokens alone. So one may expect their
# mean, as of a loss or an activation, to be that of the tokens. sum(), mean(), max(), any() and the like over all
# dimensions take the whole buffer below, padding included, and mean() divides by its length. So a mean loss is that of
# padding, too, a NaN there makes it NaN, and the gradient reaches the padding. Sums along the ragged dimension are
# refused. contiguous() copies the tokens out, and their mean is right, but has no gradient: backward() fails. Whoever
# trains joins the parts of unbind(). nested_tensor_from_jagged with lengths is alike.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Two rows of six with 4 and 2 tokens of loss 1, behind
# which padding has a loss of 9:
#
#   numel: 6
#   mean: tokens 1.000, narrow 5.000, contiguous 1.000
#   sum: tokens 6.000, narrow 60.000, contiguous 6.000
#   max: tokens 1.000, narrow 9.000, contiguous 1.000
#   gradients of the mean that are not 0: tokens 6, narrow 12
#   mean with padding of NaN: tokens 1.000, narrow nan, contiguous 1.000
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import math

import torch

LENGTHS = torch.tensor([4, 2])


def padded(padding):
    within = torch.arange(6) < LENGTHS[:, None]
    return torch.where(within, 1.0, padding).requires_grad_()


def views(losses):
    narrow = torch.nested.narrow(losses, 1, torch.tensor([0, 0]), LENGTHS, layout=torch.jagged)
    return {"tokens": torch.cat(narrow.unbind()), "narrow": narrow, "contiguous": narrow.contiguous()}


def told(name, of, padding=9.0, form="{:.3f}", among=("tokens", "narrow", "contiguous")):
    found = {}
    for view in among:
        losses = padded(padding)
        found[view] = of(views(losses)[view], losses)
    print(f"{name}: " + ", ".join(f"{view} {form.format(x)}" for view, x in found.items()), flush=True)
    return list(found.values())


def counted(view, losses):
    view.mean().backward()
    return int((losses.grad != 0).sum())


print("numel:", views(padded(9.0))["narrow"].numel())
mean = told("mean", lambda view, _: view.mean().item())
total = told("sum", lambda view, _: view.sum().item())
largest = told("max", lambda view, _: view.max().item())
reached = told("gradients of the mean that are not 0", counted, form="{}", among=("tokens", "narrow"))
broken = told("mean with padding of NaN", lambda view, _: view.mean().item(), math.nan)
same = [mean, total, largest, reached] == [[1, 5, 1], [6, 60, 6], [1, 9, 1], [6, 12]]
raise SystemExit(0 if same and broken[::2] == [1, 1] and math.isnan(broken[1]) else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
