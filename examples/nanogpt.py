"""A loop after nanoGPT's shape, with flashpoint in it: three lines watch it, one chooses the attention.

python examples/nanogpt.py                                    # PyTorch's attention
python examples/nanogpt.py attention=flash_fixed              # the drop-in
flashpoint watch runs/nanogpt
flashpoint diagnose runs/nanogpt

Branches from its checkpoints, for a run whose W_Q grows (:func:`step`):

python examples/nanogpt.py keep=50 name=kept
flashpoint localize runs/kept --function examples/nanogpt.py:step --checkpoints 'runs/kept/step-*.pt' --steps 50
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashpoint  # 1

SETTINGS = {"attention": "sdpa", "steps": "200", "layers": "3", "heads": "4", "width": "128", "context": "128",
            "batch": "16", "lr": "1e-3", "name": "nanogpt", "runs": "runs", "text": __file__,
            "functions": "",  # an attention that is neither PyTorch's nor flashpoint's: MODULE:NAME
            "keep": "0"}  # steps between checkpoints; 0 keeps none  # fmt: skip


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).bfloat16()  # as autocast has it already on a GPU
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in qkv.split(C, dim=2))
        y = self.attend(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C).to(x.dtype))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, attend)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, layers: int, heads: int, width: int, context: int,
                 attend: Callable[..., Tensor]) -> None:  # fmt: skip
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads, attend) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1).float(), targets.flatten())


def attention_named(name: str) -> Callable[..., Tensor]:
    if name == "sdpa":
        return F.scaled_dot_product_attention
    return lambda q, k, v, is_causal: flashpoint.attention(q, k, v, is_causal=is_causal, variant=name)


class Loop:
    """Model, optimiser and the order of the batches: all that a step changes."""

    def __init__(self, settings: dict[str, str], attend: Callable[..., Tensor]) -> None:
        sizes = (int(settings[name]) for name in ("layers", "heads", "width", "context", "batch"))
        layers, heads, width, self.context, self.batch = sizes
        self.settings, self.done = settings, 0
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        self.model = GPT(256, layers, heads, width, self.context, attend).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=float(settings["lr"]), betas=(0.9, 0.95))
        self.data = torch.frombuffer(bytearray(Path(settings["text"]).read_bytes()), dtype=torch.uint8).long()
        self.order = torch.Generator().manual_seed(0)

    def step(self, watched: Any) -> Tensor:
        starts = torch.randint(len(self.data) - self.context - 1, (self.batch,), generator=self.order)
        sequences = torch.stack([self.data[start : start + self.context + 1] for start in starts]).to(self.device)
        # Most CPUs have no BF16 products: there the attention alone is in BF16.
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss: Tensor = self.model(sequences[:, :-1], sequences[:, 1:])
        loss.backward()
        watched.step(loss, sequences)  # 3
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return loss

    def save(self, folder: Path) -> None:
        state = {"settings": self.settings, "done": self.done, "model": self.model.state_dict(),
                 "optimizer": self.optimizer.state_dict(), "order": self.order.get_state()}  # fmt: skip
        torch.save(state, folder / f"step-{self.done:06}.pt")

    def load(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.set_state(state["order"])


def train(attend: Callable[..., Tensor], **changed: str) -> float:
    """Train on a text's bytes; return the last loss."""
    settings = {**SETTINGS, **changed}
    steps, keep, named = int(settings["steps"]), int(settings["keep"]), settings["functions"].split()
    loop, loss = Loop(settings, attend), torch.tensor(math.nan)
    with flashpoint.watch(  # 2
        loop.model, name=settings["name"], runs_dir=settings["runs"], steps=steps, functions=named
    ) as watched:
        for number in range(steps):
            if keep and number % keep == 0 and watched.run is not None:
                loop.save(watched.run.folder.path)
            if number == steps - 1:
                watched.capture()
            loss = loop.step(watched)
            if (number + 1) % 10 == 0:
                print(f"step {number + 1}: loss {loss.item():.3f}", flush=True)
    return loss.item()


def step(checkpoint: str, attention: Callable[[int], Callable[..., Tensor]], steps: int, watch: Any) -> None:
    """Train a branch for ``flashpoint localize``: so many steps from a checkpoint, each layer with its attention."""
    state = torch.load(checkpoint)
    loop = Loop(state["settings"], F.scaled_dot_product_attention)
    loop.load(state)
    attentions = [module for module in loop.model.modules() if isinstance(module, CausalSelfAttention)]
    for number, module in enumerate(attentions, 1):
        module.attend = attention(number)
    with watch(loop.model) as watched:
        for _ in range(steps):
            loop.step(watched)


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    print(f"loss {train(attention_named(given.get('attention', 'sdpa')), **given):.3f}")
