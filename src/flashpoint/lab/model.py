"""GPT-2 (Radford et al. 2019) as in the code of Qiu & Yao, which is nanoGPT's: pre-LayerNorm, GELU, learned positions,
tied embeddings, no biases.

Shapes: B sequences, T tokens, C = d_model, H heads of d = C / H features, V tokens in the vocabulary.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpoint.lab.config import ModelConfig
from flashpoint.lab.embedding import token_embedding
from flashpoint.lab.linear import Linear, linear
from flashpoint.numerics.dispatch import attention
from flashpoint.numerics.variant import AttentionVariant

INIT_STD = 0.02


class LayerNorm(nn.Module):
    """LayerNorm with a gain and no bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight)


class CausalSelfAttention(nn.Module):
    """Attention of all heads between its two projections, from [B, T, C] to [B, T, C]; ``layer`` counts from 1."""

    def __init__(self, config: ModelConfig, variant: AttentionVariant, layer: int) -> None:
        super().__init__()
        self.n_head, self.variant, self.layer = config.n_head, variant, layer
        self.qkv = Linear(config.d_model, 3 * config.d_model)
        self.projection: nn.Linear = Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, seed_and_step: Tensor) -> Tensor:
        return self.projection(self.attend(self.qkv(x), seed_and_step))

    def attend(self, qkv: Tensor, seed_and_step: Tensor) -> Tensor:
        """Return O of all heads, [B, T, C], from their q, k and v, [B, T, 3C]: what lies between the projections."""
        B, T, C = *qkv.shape[:2], qkv.shape[2] // 3
        q, k, v = qkv.view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, T, d] each
        out = attention(q, k, v, self.variant, layer=self.layer, seed_and_step=seed_and_step)
        return out.transpose(1, 2).reshape(B, T, C)

    @property
    def w_q(self) -> Tensor:
        """W_Q by head, [H, d, C]: q = W_Q x."""
        C = self.qkv.in_features
        return self.qkv.weight[:C].view(self.n_head, C // self.n_head, C)


class MLP(nn.Module):
    """Two projections with a GELU between them, from [..., C] to [..., C]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expand = Linear(config.d_model, 4 * config.d_model)
        self.projection = Linear(4 * config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(F.gelu(self.expand(x)))


class Block(nn.Module):
    """One layer: attention and MLP, each of a normalised input and added to the residual stream [B, T, C]."""

    def __init__(self, config: ModelConfig, variant: AttentionVariant, layer: int) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.d_model)
        self.attention = CausalSelfAttention(config, variant, layer)
        self.mlp_norm = LayerNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, seed_and_step: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), seed_and_step)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """GPT-2 with one attention variant.

    Args:
        config: the shape.
        variant: numerics of the attention; the model only hands it on.
        seed: of the initial weights, which are the same on any device; ``config.init_seed`` has precedence.
        z_loss: coefficient of the mean of logsumexp(logits)², which the loss's gradient is of, too.
    """

    def __init__(self, config: ModelConfig, variant: AttentionVariant, seed: int, z_loss: float = 0.0) -> None:
        super().__init__()
        self.config, self._z_loss = config, z_loss
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context, config.d_model)
        self.blocks = nn.ModuleList(Block(config, variant, layer + 1) for layer in range(config.n_layer))
        self.final_norm = LayerNorm(config.d_model)
        self.initialize(seed)

    def forward(self, tokens: Tensor, targets: Tensor, seed_and_step: Tensor) -> Tensor:
        """Return the mean cross-entropy, [] float32, in nats.

        Its gradient is that of cross-entropy + z_loss · mean(logsumexp(logits)²).

        Args:
            tokens, targets: [B, T] int64, T ≤ context.
            seed_and_step: [2] int64, key of stochastic rounding.

        Raises:
            ValueError: T is longer than the positions.
        """
        logits = self.logits(tokens, seed_and_step).flatten(0, 1).float()
        loss = F.cross_entropy(logits, targets.flatten())
        if self._z_loss:
            z_loss = self._z_loss * logits.logsumexp(-1).square().mean()
            loss = loss + (z_loss - z_loss.detach())  # + 0: who reads the loss sees the cross-entropy alone
        return loss

    def logits(self, tokens: Tensor, seed_and_step: Tensor) -> Tensor:
        """Return the next tokens' logits, [B, T, V] in the dtype of autocast; arguments and errors as for the loss."""
        T = tokens.shape[1]
        if self.config.context < T:
            raise ValueError(f"sequences of {T} tokens, but model.context={self.config.context} positions")
        x = token_embedding(tokens, self.token_embedding.weight) + self.position_embedding.weight[:T]  # [B, T, C]
        for block in self.blocks:
            x = block(x, seed_and_step)
        return linear(self.final_norm(x), self.token_embedding.weight)  # tied

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set gains to 1 and matrices to normal values with std 0.02; projections into the residual stream × 1/√(2L).

        NumPy draws them: unlike PyTorch's, its stream does not depend on the CPU's instruction set.
        """
        own = self.config.init_seed
        generator = np.random.Generator(np.random.PCG64(seed if own is None else own))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            std = INIT_STD / math.sqrt(2 * self.config.n_layer) if "projection" in name else INIT_STD
            normal = generator.standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.copy_(torch.from_numpy(normal) * std)
        attention = cast(Block, self.blocks[0]).attention
        attention.qkv.weight.view(torch.int32)[0, 0] += self.config.init_ulps  # away from zero
