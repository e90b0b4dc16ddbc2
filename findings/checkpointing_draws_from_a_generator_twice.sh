#!/usr/bin/env bash
# PyTorch 2.13.0: a checkpointed layer that draws from a generator of its own has the gradients of another draw.
#
# torch.utils.checkpoint computes a layer a second time for its backward pass. preserve_rng_state, which is on, brings
# the random numbers of the first time back, so that dropout has one mask: so one may expect it of every draw by
# PyTorch. It restores the global generators alone. A torch.Generator that a layer holds, so that its noise can be
# replayed, goes on: the second pass draws another mask, and gradients are those of a function that was never computed.
# The check of the second pass compares shapes and dtypes, which agree. Nothing warns, and losses are right. Restore the
# generator's state by context_fn, as below, or draw the noise outside.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. A mask that drops half of 1,000 numbers: the share of
# numbers whose gradient is that of the mask in the forward pass:
#
#   global generator: not checkpointed 1.00, checkpointed 1.00
#   its own generator: not checkpointed 1.00, checkpointed 0.47
#   its own generator, restored by context_fn: 1.00
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import contextlib

import torch
from torch.utils.checkpoint import checkpoint

own = torch.Generator().manual_seed(0)


def restoring():
    state = own.get_state()

    @contextlib.contextmanager
    def second_pass():
        after = own.get_state()
        own.set_state(state)
        yield
        own.set_state(after)

    return contextlib.nullcontext(), second_pass()


def share(generator, checkpointed, **options):
    torch.manual_seed(0)
    x = torch.ones(1000, requires_grad=True)

    def drop(x):
        return x * (torch.rand(len(x), generator=generator) < 0.5)

    y = checkpoint(drop, x, use_reentrant=False, **options) if checkpointed else drop(x)
    y.sum().backward()
    return (x.grad == y).float().mean().item()


seen = []
for name, generator in (("global generator", None), ("its own generator", own)):
    seen += [share(generator, False), share(generator, True)]
    print(f"{name}: not checkpointed {seen[-2]:.2f}, checkpointed {seen[-1]:.2f}")
seen.append(share(own, True, context_fn=restoring))
print(f"its own generator, restored by context_fn: {seen[-1]:.2f}")
right = seen[:3] == [1, 1, 1] and seen[4] == 1
raise SystemExit(0 if right and 0.4 < seen[3] < 0.6 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
