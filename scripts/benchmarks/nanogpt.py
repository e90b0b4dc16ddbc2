"""A GPT-2 after nanoGPT's shape, for a plain loop: PyTorch's attention and layers, no biases, tied embeddings.

It has the parameters of :class:`flashpoint.lab.model.GPT` and none of its code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpoint.lab.config import ModelConfig


class CausalSelfAttention(nn.Module):
    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.n_head = shape.n_head
        self.c_attn = nn.Linear(shape.d_model, 3 * shape.d_model, bias=False)
        self.c_proj = nn.Linear(shape.d_model, shape.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return out


class Block(nn.Module):
    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        width = shape.d_model
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attn = CausalSelfAttention(shape)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class NanoGPT(nn.Module):
    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.d_model)
        self.wpe = nn.Embedding(shape.context, shape.d_model)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.ln_f = nn.LayerNorm(shape.d_model, bias=False)
        self.lm_head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.lm_head.weight = self.wte.weight  # tied

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy [], nats, of tokens and targets [B, T] int64."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for one in self.h:
            x = one(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
