"""The forward and backward pass that is observed, beside the training."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from flashpoint.lab.config import Targets
from flashpoint.lab.cuda_graph import Graphed
from flashpoint.lab.model import GPT, Block
from flashpoint.lab.precision import Precision, autocast, loss_scale
from flashpoint.lab.probes.observation import Observation, analysed
from flashpoint.lab.probes.targets import draw, with_unrounded_out


@contextlib.contextmanager
def recorded(model: GPT) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """Yield lists that a forward pass in the block fills, by layer. They have what the attention's first projection
    takes [B, T, C], and what it returns, q, k and v [B, T, 3C]. The third is what the second projection takes, O [B, T,
    C]."""
    inputs: list[Tensor] = []
    packed: list[Tensor] = []
    outs: list[Tensor] = []

    def keep_projected(_module: Any, arguments: tuple[Tensor, ...], result: Tensor) -> None:
        inputs.append(arguments[0])
        packed.append(result)

    def keep_out(_module: Any, arguments: tuple[Tensor, ...]) -> None:
        outs.append(arguments[0])

    with contextlib.ExitStack() as hooks:
        for block in model.blocks:
            attention = cast(Block, block).attention
            hooks.callback(attention.qkv.register_forward_hook(keep_projected).remove)
            hooks.callback(attention.projection.register_forward_pre_hook(keep_out).remove)
        yield inputs, packed, outs


class InstrumentedPass:
    """Runs the model on a few sequences: no gradient of a parameter, no state changes.

    Args:
        like: sequences of the shape of all that follow, [N, T + 1].
        batch_size: sequences of a whole step: dO is these sequences' part of the step's.
        targets: what they are to predict, as in the configuration.
        precision: of the training.
    """

    def __init__(
        self,
        model: GPT,
        like: Tensor,
        batch_size: int,
        device: torch.device,
        targets: Targets = "data",
        precision: Precision = "bf16",
    ) -> None:
        self._precision = precision
        self._model, self._share = model, len(like) / batch_size
        unrounded = with_unrounded_out(model, precision) if targets == "unrounded" else model
        self._predicts = None if targets == "data" else unrounded
        self._attentions = [cast(Block, block).attention for block in model.blocks]
        self._sequences = torch.zeros_like(like, device=device)
        self._seed_and_step = torch.zeros(2, dtype=torch.int64, device=device)
        self._observe = Graphed(self._run, device.type == "cuda")

    def __call__(self, sequences: Tensor, seed_and_step: Tensor) -> Observation:
        """Run one pass.

        Args:
            sequences: [N, T + 1] int64.
            seed_and_step: [2] int64, key of stochastic rounding.

        Returns:
            The observation, its ``update`` zero so far (:meth:`with_update`); good until the next call.
        """
        self._sequences.copy_(sequences)
        self._seed_and_step.copy_(seed_and_step)
        return dataclasses.replace(self._observe())  # a new one: what it derives is of this pass alone

    def with_update(self, seen: Observation) -> Observation:
        """Return the observation with what the step added to W_Q."""
        return dataclasses.replace(seen, update=self._w_q() - seen.w_q)

    def _run(self) -> Observation:
        targets = self._targets()
        with recorded(self._model) as (inputs, packed, outs), torch.enable_grad(), self._autocast():
            loss = self._model(self._sequences[:, :-1], targets, self._seed_and_step)
        scale = loss_scale(self._precision)
        grads = torch.autograd.grad(loss * (self._share * scale), [*outs, *packed])
        grad_outs, grad_packed = grads[: len(outs)], grads[len(outs) :]
        q, k, v = (self._by_head(part) for part in torch.stack(packed).detach().chunk(3, dim=-1))
        w_q = self._w_q().clone()
        return Observation(
            variant=analysed(self._attentions[0].variant, self._precision),
            x=torch.stack(inputs).detach().float(),
            q=q,
            k=k,
            v=v,
            out=self._by_head(torch.stack(outs).detach()),
            grad_out=self._by_head(torch.stack(grad_outs)).float() / scale,
            grad_q=self._by_head(torch.stack(grad_packed).chunk(3, dim=-1)[0]).float() / scale,
            seed_and_step=self._seed_and_step,
            w_q=w_q,
            update=torch.zeros_like(w_q),
        )

    def _targets(self) -> Tensor:
        """Return the tokens to predict, [N, T] int64."""
        if self._predicts is None:
            return self._sequences[:, 1:]
        with torch.no_grad(), self._autocast():  # one of its own: autocast keeps the weights that it has cast
            logits = self._predicts.logits(self._sequences[:, :-1], self._seed_and_step)
        return draw(logits, self._seed_and_step)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return autocast(self._sequences.device, self._precision)

    def _by_head(self, x: Tensor) -> Tensor:
        """Return features [L, N, T, C] by head, [L, N, H, T, d]."""
        return x.unflatten(-1, (self._model.config.n_head, -1)).transpose(2, 3)

    def _w_q(self) -> Tensor:
        """Return W_Q of each layer and head, [L, H, d, C]."""
        return torch.stack([attention.w_q.detach() for attention in self._attentions])
