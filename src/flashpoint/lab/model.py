"""GPT-2 (Radford et al. 2019) as in the code of Qiu & Yao, which is nanoGPT's: pre-LayerNorm, GELU, learned positions,
tied embeddings, no biases. Or Llama (Touvron et al. 2023), which has RMSNorm, SwiGLU and rotary positions in their
place.

Llama 2 and its larger successors do not tie the embeddings; Llama 3.2 of 1B and 3B does, and so do we. Meta has not
published its initial weights: they are nanoGPT's here.

Shapes: B sequences, T tokens, C = d_model, H heads of d = C / H features, H_kv heads of keys and values, V tokens in
the vocabulary.
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
from flashpoint.numerics.production import capped
from flashpoint.numerics.variant import AttentionVariant

INIT_STD = 0.02
RMS_NORM_EPS = 1e-5
"""Llama 2's and 3's."""
ROTARY_BASE = 10_000.0
"""Llama 2's; Llama 3 has 500,000, for contexts longer than ours."""
KEY_MEAN_DECAY = 0.9
"""Of c, a step: ten steps even out a batch's mean, and W_K takes hundreds to change much."""
_ROWS = 1024
"""Logits of so many tokens are in FP32 at a time, where no gradient is taken. A multiple of 4: how a GPU adds up a row
goes with the row's address modulo 16 bytes."""


class LayerNorm(nn.Module):
    """LayerNorm of features [..., C] with a gain and no bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight)


def normalization(config: ModelConfig) -> nn.Module:
    """Return a layer that normalises features [..., C]."""
    return nn.RMSNorm(config.d_model, RMS_NORM_EPS) if config.family == "llama" else LayerNorm(config.d_model)


class RotaryPositions(nn.Module):
    """Rotates features i and i + d/2 of a token as a pair, by an angle that goes with its position (RoPE, Su et al.
    2021).

    The pairs are those of GPT-NeoX and Transformers. Meta's code pairs neighbours, which is another order of W_Q's and
    W_K's rows. The rotation is in FP32, as there.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, size: int) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)  # [T, d/2]
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return queries or keys at their positions, [..., T, d] float32 both."""
        (a, b), T = x.chunk(2, -1), x.shape[-2]
        cos, sin = self.cos[:T], self.sin[:T]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def by_head(qkv: Tensor, n_head: int, n_kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, H, T, d], k and v [B, H_kv, T, d] of their projections side by side, [B, T, (H + 2 H_kv) d]."""
    heads = qkv.unflatten(-1, (n_head + 2 * n_kv_head, -1))
    q, k, v = heads.split([n_head, n_kv_head, n_kv_head], 2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class CoreAttention(nn.Module):
    """Attention of all heads with one variant, without weights; ``layer`` counts from 1."""

    def __init__(self, variant: AttentionVariant, layer: int, score_cap: float | None) -> None:
        super().__init__()
        self.variant, self.layer = variant, layer
        self.score_mod = None if score_cap is None else capped(score_cap)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seed_and_step: Tensor) -> Tensor:
        """Return O [B, H, T, d] of q [B, H, T, d], k and v [B, H_kv, T, d]."""
        return attention(q, k, v, self.variant, layer=self.layer, seed_and_step=seed_and_step, score_mod=self.score_mod)


class ShiftingProjection(Linear):
    """W_Q, W_K and W_V below each other, whose keys are K − c: a bias of the product, which softmax does not see.

    c is the exponential running mean of W_K x over batch and tokens. W_K of the mean x gives that of a step, so that
    nothing passes over the keys. Training does not learn c. A forward pass adds the mean of its x to ``inputs``, as a
    backward pass adds to gradients; :meth:`step` takes it.

    Attributes:
        key_mean: c of all heads, [H_kv d] float32, a part of the training's state; 0 before the first step.
        inputs: [C] float32, no part of it.

    Args:
        rows: of W_Q, W_K and W_V.
    """

    key_mean: Tensor
    inputs: Tensor

    def __init__(self, in_features: int, rows: tuple[int, int, int]) -> None:
        super().__init__(in_features, sum(rows))
        self._rows = rows
        self.register_buffer("key_mean", torch.zeros(rows[1]))
        self.register_buffer("inputs", torch.zeros(in_features), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.add_(x.detach().float().mean((0, 1)))
        of_q, _, of_v = self._rows
        return linear(x, self.weight, F.pad(-self.key_mean, (of_q, of_v)))

    @torch.no_grad()
    def step(self, passes: int) -> None:
        """Move c towards the mean of the keys in so many forward passes, which began with ``inputs`` of 0."""
        w_k = self.weight.split(self._rows)[1]
        self.key_mean.lerp_(w_k @ (self.inputs / passes), 1 - KEY_MEAN_DECAY)


class CausalSelfAttention(nn.Module):
    """Attention of all heads between its two projections, from [B, T, C] to [B, T, C]; ``layer`` counts from 1.

    ``seed_and_step``, int64 [2], is where stochastic rounding takes its random bits from.
    """

    def __init__(self, config: ModelConfig, variant: AttentionVariant, layer: int) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.kv_heads
        d = config.head_size
        rows = config.n_head * d, config.kv_heads * d, config.kv_heads * d
        shifts = config.shift_keys == "running"
        self.qkv = ShiftingProjection(config.d_model, rows) if shifts else Linear(config.d_model, sum(rows))
        # QK-norm as in Qwen3 (arXiv 2505.09388): over the features of a head, with gains that all heads share. OLMo 2
        # normalises all heads at once.
        self.q_norm, self.k_norm = (nn.RMSNorm(d, RMS_NORM_EPS) if config.qk_norm else None for _ in "qk")
        self.rotary = RotaryPositions(config.context, d) if config.family == "llama" else None
        self.core = CoreAttention(variant, layer, config.score_cap)
        self.projection: nn.Linear = Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, seed_and_step: Tensor) -> Tensor:
        q, k, v = by_head(self.qkv(x), self.n_head, self.n_kv_head)
        out = self.core(self.queries(q), self.keys(k), v, seed_and_step)
        return self.projection(out.transpose(1, 2).flatten(2))

    def queries(self, projected: Tensor) -> Tensor:
        """Return what the attention takes of W_Q x, [..., H, T, d] both."""
        return self._placed(projected, self.q_norm)

    def keys(self, projected: Tensor) -> Tensor:
        """Return what the attention takes of W_K x, [..., H_kv, T, d] both."""
        return self._placed(projected, self.k_norm)

    @property
    def takes_projected(self) -> bool:
        """Whether q is W_Q x itself."""
        return self.q_norm is None and self.rotary is None

    def _placed(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        if self.takes_projected:
            return projected
        x = projected.float()  # rounded once, at the end
        x = x if norm is None else norm(x)
        return (x if self.rotary is None else self.rotary(x)).to(projected.dtype)

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_Q by head, [H, d, C], and W_K and W_V by theirs, [H_kv, d, C]."""
        heads = self.qkv.weight.unflatten(0, (self.n_head + 2 * self.n_kv_head, -1))
        w_q, w_k, w_v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head])
        return w_q, w_k, w_v


class MLP(nn.Module):
    """Two projections with a GELU between them, from [..., C] to [..., C]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expand = Linear(config.d_model, config.d_mlp)
        self.projection = Linear(config.d_mlp, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(F.gelu(self.expand(x)))


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020): a projection that another one gates, and one back, from [..., C] to [..., C]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.d_model, config.d_mlp)
        self.expand = Linear(config.d_model, config.d_mlp)
        self.projection = Linear(config.d_mlp, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(F.silu(self.gate(x)) * self.expand(x))


class Block(nn.Module):
    """One layer: attention and MLP, each of a normalised input and added to the residual stream [B, T, C]."""

    def __init__(self, config: ModelConfig, variant: AttentionVariant, layer: int) -> None:
        super().__init__()
        self.attention_norm = normalization(config)
        self.attention = CausalSelfAttention(config, variant, layer)
        self.mlp_norm = normalization(config)
        self.mlp = GatedMLP(config) if config.family == "llama" else MLP(config)

    def forward(self, x: Tensor, seed_and_step: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), seed_and_step)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """GPT-2 or Llama with one attention variant.

    Args:
        config: the family and the shape.
        variant: numerics of the attention; the model only hands it on.
        seed: of the initial weights, which are the same on any device; ``config.init_seed`` has precedence.
        z_loss: coefficient of the mean of logsumexp(logits)², which the loss's gradient is of, too.
    """

    def __init__(self, config: ModelConfig, variant: AttentionVariant, seed: int, z_loss: float = 0.0) -> None:
        super().__init__()
        self.config, self._z_loss = config, z_loss
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = None if config.family == "llama" else nn.Embedding(config.context, config.d_model)
        self.blocks = nn.ModuleList(Block(config, variant, layer + 1) for layer in range(config.n_layer))
        self.final_norm = normalization(config)
        self.initialize(seed)

    def forward(self, tokens: Tensor, targets: Tensor, seed_and_step: Tensor) -> Tensor:
        """Return the mean cross-entropy, [] float32, in nats.

        Its gradient is that of cross-entropy + z_loss · mean(logsumexp(logits)²). Without gradients it takes less
        memory, and the loss has the same bits.

        Args:
            tokens, targets: [B, T] int64, T ≤ context.
            seed_and_step: [2] int64, key of stochastic rounding.

        Raises:
            ValueError: T is longer than the positions.
        """
        logits, targets = self.logits(tokens, seed_and_step).flatten(0, 1), targets.flatten()
        if not torch.is_grad_enabled():
            return _loss_alone(logits, targets)
        logits = logits.float()
        loss = F.cross_entropy(logits, targets)
        if self._z_loss:
            z_loss = self._z_loss * logits.logsumexp(-1).square().mean()
            loss = loss + (z_loss - z_loss.detach())  # + 0: who reads the loss sees the cross-entropy alone
        return loss

    def logits(self, tokens: Tensor, seed_and_step: Tensor) -> Tensor:
        """Return the next tokens' logits, [B, T, V] in the dtype of autocast; arguments and errors as for the loss."""
        T = tokens.shape[1]
        if self.config.context < T:
            raise ValueError(f"sequences of {T} tokens, but model.context={self.config.context} positions")
        x = token_embedding(tokens, self.token_embedding.weight)  # [B, T, C]
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[:T]
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


def _loss_alone(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the bits of ``F.cross_entropy(logits.float(), targets)``, [] float32, with a few rows in FP32 at a time.

    Args:
        logits: [N, V] of any dtype.
        targets: [N] int64.
    """
    parts = zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)
    log_probs = [F.log_softmax(rows.float(), -1).gather(1, right[:, None]) for rows, right in parts]
    return F.nll_loss(torch.cat(log_probs), torch.zeros_like(targets))  # which adds up in the same order
