"""A loop after nanoGPT's shape, with flashpoint in it: three lines watch it, one chooses the attention.

python examples/nanogpt.py                                    # PyTorch's attention
python examples/nanogpt.py attention=flash_exact_rowsum       # the drop-in
flashpoint watch runs/nanogpt
flashpoint diagnose runs/nanogpt
"""

import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashpoint  # 1

SETTINGS = {"attention": "sdpa", "steps": "200", "layers": "3", "heads": "4", "width": "128", "context": "128",
            "batch": "16", "lr": "1e-3", "name": "nanogpt", "runs": "runs",
            "functions": ""}  # fmt: skip


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        y = self.attend(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


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


def train(text: bytes, attend: Callable[..., Tensor], **changed: str) -> float:
    """Train on a text's bytes; return the last loss."""
    settings = {**SETTINGS, **changed}
    layers, heads, width, context, batch, steps = (
        int(settings[name]) for name in ("layers", "heads", "width", "context", "batch", "steps")
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = GPT(256, layers, heads, width, context, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(settings["lr"]), betas=(0.9, 0.95))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    order = torch.Generator().manual_seed(0)
    loss = torch.tensor(math.nan)
    named = settings["functions"].split()  # an attention that is neither PyTorch's nor flashpoint's: MODULE:NAME
    with flashpoint.watch(  # 2
        model, name=settings["name"], runs_dir=settings["runs"], steps=steps, functions=named
    ) as watched:
        for step in range(steps):
            starts = torch.randint(len(data) - context - 1, (batch,), generator=order)
            sequences = torch.stack([data[start : start + context + 1] for start in starts]).to(device)
            if step == steps - 1:
                watched.capture()
            with torch.autocast(device, torch.bfloat16):
                loss = model(sequences[:, :-1], sequences[:, 1:])
            loss.backward()
            watched.step(loss, sequences)  # 3
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return loss.item()


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    with open(given.pop("text", __file__), "rb") as file:
        content = file.read()
    print(f"loss {train(content, attention_named(given.get('attention', 'sdpa')), **given):.3f}")
