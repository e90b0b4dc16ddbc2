#!/usr/bin/env bash
# PyTorch 2.13.0: Categorical(probs=…) in BF16 gives no token less than 0.78 %, and rarer ones have no gradient.
#
# Policies hand a softmax to torch.distributions.Categorical and train on its log_prob. BF16 holds 1e-4 within 0.4 %,
# so one may expect log_prob to be −9.21 within that. Categorical clamps probabilities to between eps and 1 − eps of
# their dtype, and eps is the step at 1: 1.2e-7 in FP32, but 0.0078 in BF16 and 0.00098 in FP16. Each rarer token has
# −4.84, whatever its probability: of a vocabulary that is nearly all tokens. The gradient of a clamped one is 0, so
# that a policy never learns from rare actions, and the ratio of two policies is 1 for them. entropy() of many equal
# tokens is too small. Bernoulli clamps in the same way. logits= is right. Nothing warns.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. A token of probability 1e-4: its log_prob, the gradient
# of that with respect to its probability, and that with logits=; then the entropy of 1,000 equal tokens, which is
# 6.91:
#
#   float32: log_prob -9.21, gradient 9999, by logits -9.21; Bernoulli -9.21; entropy 6.91
#   bfloat16: log_prob -4.84, gradient 0, by logits -9.19; Bernoulli -4.84; entropy 4.84
#   float16: log_prob -6.93, gradient 0, by logits -9.21; Bernoulli -6.93; entropy 6.91
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torch.distributions import Bernoulli, Categorical

EXACT = torch.tensor([1e-4, 1 - 1e-4])
RARE = torch.tensor(0)


def rare(dtype):
    given = EXACT.to(dtype, copy=True).requires_grad_()
    found = Categorical(probs=given).log_prob(RARE)
    found.backward()
    by_logits = Categorical(logits=EXACT.log().to(dtype)).log_prob(RARE).item()
    alone = Bernoulli(probs=EXACT[0].to(dtype)).log_prob(torch.ones((), dtype=dtype)).item()
    entropy = Categorical(probs=torch.full((1000,), 1e-3, dtype=dtype)).entropy().item()
    told = "{}: log_prob {:.2f}, gradient {:.0f}, by logits {:.2f}; Bernoulli {:.2f}; entropy {:.2f}"
    print(told.format(str(dtype)[6:], found.item(), given.grad[0].item(), by_logits, alone, entropy), flush=True)
    return found.item(), given.grad[0].item(), by_logits, alone, entropy


single, brain, half = (rare(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))
right = all(abs(found[2] + 9.21) < 0.05 for found in (single, brain, half)) and abs(single[0] + 9.21) < 0.01
same = right and brain[0] > -5 and brain[3] > -5 and half[0] > -7 and brain[1] == half[1] == 0 < single[1]
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
