"""A plain PyTorch loop, with no language model: a forecaster of noisy sine waves, watched.

python examples/plain_pytorch.py                                 # PyTorch's attention
python examples/plain_pytorch.py attention=flash_fixed           # the drop-in
"""

import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flashpoint

SETTINGS = {"attention": "sdpa", "epochs": "2", "layers": "2", "heads": "4", "width": "64", "length": "64",
            "waves": "256", "batch": "16", "lr": "1e-3", "name": "plain", "runs": "runs", "functions": ""}  # fmt: skip


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return x + self.out(F.gelu(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))


def waves(count: int, length: int) -> Tensor:
    """Return noisy sine waves [count, length + 1, 1]."""
    generator = torch.Generator().manual_seed(0)
    phase, period = (torch.rand(2, count, 1, generator=generator) * 6 + 1).unbind()
    noise = 0.1 * torch.randn(count, length + 1, generator=generator)
    return (torch.sin(torch.arange(length + 1) / period + phase) + noise)[..., None]


def attention_named(name: str) -> Callable[..., Tensor]:
    if name == "sdpa":
        return F.scaled_dot_product_attention
    return lambda q, k, v, is_causal: flashpoint.attention(q, k, v, is_causal=is_causal, variant=name)


def train(attend: Callable[..., Tensor], **changed: str) -> float:
    """Train to predict the next value; return the last loss."""
    settings = {**SETTINGS, **changed}
    layers, heads, width, length, batch = (
        int(settings[name]) for name in ("layers", "heads", "width", "length", "batch")
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    blocks = [Layer(width, heads, attend) for _ in range(layers)]
    model = nn.Sequential(nn.Linear(1, width), *blocks, nn.Linear(width, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(settings["lr"]))
    loader = DataLoader(TensorDataset(waves(int(settings["waves"]), length)), batch, shuffle=True, drop_last=True)
    steps = int(settings["epochs"]) * len(loader)
    loss, done = torch.tensor(math.nan), 0
    with flashpoint.watch(
        model, name=settings["name"], runs_dir=settings["runs"], steps=steps, functions=settings["functions"].split()
    ) as watched:
        for _epoch in range(int(settings["epochs"])):
            for (batch_of_waves,) in loader:
                if (done := done + 1) == steps:
                    watched.capture()
                series = batch_of_waves.to(device)
                with torch.autocast(device, torch.bfloat16):
                    loss = F.mse_loss(model(series[:, :-1]).float(), series[:, 1:])
                loss.backward()
                watched.step(loss, series)
                optimizer.step()
                optimizer.zero_grad()
                if done % 10 == 0:
                    print(f"step {done}: loss {loss.item():.3f}", flush=True)
    return loss.item()


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    print(f"loss {train(attention_named(given.get('attention', 'sdpa')), **given):.3f}")
