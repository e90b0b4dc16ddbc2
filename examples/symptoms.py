"""A small model whose training goes wrong in one way: the rehearsals of docs/symptoms.md, each in seconds on a CPU.

python examples/symptoms.py nan         # a backward pass of the attention makes dQ NaN from step 20 on
python examples/symptoms.py no_labels   # one batch without labels
python examples/symptoms.py resume      # a checkpoint goes on without optimiser state, at a learning rate too large
python examples/symptoms.py rise        # targets come apart from the tokens, a few more at every step
python examples/symptoms.py zero        # no batch has labels, and the loss's sum is divided by 1
python examples/symptoms.py scores      # W_Q is multiplied at every step
flashpoint diagnose runs/nan
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashpoint

VOCABULARY, WIDTH, HEADS, CONTEXT, BATCH = 64, 32, 2, 16, 8
STEPS = {"nan": 40, "no_labels": 60, "resume": 100, "rise": 900, "zero": 20, "scores": 60}


class BrokenBackward(torch.autograd.Function):
    """Returns its input; its gradient is NaN once ``broken``."""

    broken = False

    @staticmethod
    def forward(_context: Any, q: Tensor) -> Tensor:
        return q.view_as(q)

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan") if BrokenBackward.broken else gradient


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(BrokenBackward.apply(q), k, v, is_causal=is_causal)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.q = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        parts = (self.q(x), *self.kv(x).split(WIDTH, -1))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        return self.head(F.layer_norm(x + self.out(attend(q, k, v, True).transpose(1, 2).flatten(2)), (WIDTH,)))


def batch(wrong: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return tokens, and what follows each: its double, or by the probability ``wrong`` a random token."""
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT))
    return tokens, torch.where(
        torch.rand(tokens.shape) < wrong, torch.randint_like(tokens, VOCABULARY), 2 * tokens % VOCABULARY
    )


def main(symptom: str) -> None:
    torch.manual_seed(0)
    model = Model()
    first_step = 300 if symptom == "resume" else 0
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(first_step):
        tokens, targets = batch(0.3)
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if symptom == "resume":
        optimizer = torch.optim.AdamW(model.parameters(), 0.3)
    logits_interval = 10 if symptom == "scores" else None
    with flashpoint.watch(
        model, name=symptom, first_step=first_step, functions=[f"{__name__}:attend"], logits_interval=logits_interval
    ) as watched:
        for step in range(STEPS[symptom]):
            BrokenBackward.broken = symptom == "nan" and step >= 20
            tokens, targets = batch(0.3 + max(0, step - 300) / 600 * (symptom == "rise"))
            if symptom == "zero" or (symptom == "no_labels" and step == 24):
                targets[:] = -100
            logits = model(tokens).flatten(0, 1)
            if symptom == "zero":
                loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
            else:
                loss = F.cross_entropy(logits, targets.flatten())
            loss.backward()
            watched.step(loss, tokens)
            if symptom == "nan" or torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.step()
            optimizer.zero_grad()
            if symptom == "scores":
                with torch.no_grad():
                    model.q.weight *= 1.2
            if watched.verdict != "stable" and not watched.busy:
                break


if __name__ == "__main__":
    main(sys.argv[1])
