#!/usr/bin/env bash
# PyTorch 2.13.0: TensorBoard's SummaryWriter logs a BF16 gradient norm of 70,000 as infinite, and one of 1e-8 as 0.
#
# TensorBoard keeps scalars in FP32, which holds every BF16 number. So one may expect a BF16 tensor to come back as it
# is. NumPy knows no BF16, so that the writer casts such a tensor to FP16 on its way: above 65,504 all is infinite,
# below 3e-8 all is 0, and of small numbers digits are lost. A norm that grows looks like an overflow, a gradient that
# fades like one that vanished, and nothing warns. Histograms refuse the infinite number, and count the small ones as 0.
# .float() before the writer keeps the number.
#
# Seen with torch 2.13.0, tensorboard 2.20.0 and Python 3.11, 2026-11-30. A scalar of BF16, as the event file has it:
#
#   bfloat16 1.5: logged 1.5; its .float() 1.5
#   bfloat16 7e+04: logged inf; its .float() 7.01e+04
#   bfloat16 1e+20: logged inf; its .float() 9.97e+19
#   bfloat16 1e-08: logged 0; its .float() 1e-08
#   histogram of 1,000 weights of about 1e-08: between 0 and 0
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 tensorboard==2.20.0 numpy setuptools
cd "$folder"
cat > program.py <<'PY'
import math

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

values = (1.5, 7e4, 1e20, 1e-8)
torch.manual_seed(0)
with SummaryWriter("log") as writer:
    for step, value in enumerate(values):
        norm = torch.tensor(value, dtype=torch.bfloat16)
        writer.add_scalar("norm", norm, step)
        writer.add_scalar("norm as float", norm.float(), step)
    writer.add_histogram("weights", 1e-8 * torch.rand(1000).bfloat16(), 0)
events = EventAccumulator("log")
events.Reload()
logged, as_float = ([event.value for event in events.Scalars(tag)] for tag in ("norm", "norm as float"))
for value, found, right in zip(values, logged, as_float, strict=True):
    print(f"bfloat16 {value:.3g}: logged {found:.3g}; its .float() {right:.3g}")
(histogram,) = events.Histograms("weights")
low, high = histogram.histogram_value.min, histogram.histogram_value.max
print(f"histogram of 1,000 weights of about 1e-08: between {low:.3g} and {high:.3g}")
same = logged == [1.5, math.inf, math.inf, 0.0] and (low, high) == (0.0, 0.0)
raise SystemExit(0 if same and all(math.isclose(*pair, rel_tol=0.01) for pair in zip(values, as_float)) else "changed")
PY
venv/bin/python program.py
