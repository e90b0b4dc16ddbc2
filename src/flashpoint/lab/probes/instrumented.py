"""The forward and backward pass that is observed, beside the training."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flashpoint.lab.config import Targets
from flashpoint.lab.cuda_graph import Graphed
from flashpoint.lab.model import GPT, Block, CausalSelfAttention, by_head
from flashpoint.lab.precision import Precision, autocast, loss_scale
from flashpoint.lab.probes.observation import Observation, analysed
from flashpoint.lab.probes.targets import draw, with_unrounded_out
from flashpoint.numerics.production import repeat_kv


class Recorded(NamedTuple):
    """Tensors of a forward pass, by layer."""

    inputs: list[Tensor]
    """What the attention's first projection takes, [B, T, C]."""
    projected: list[Tensor]
    """What it returns, [B, T, (H + 2 H_kv) d]."""
    q: list[Tensor]
    """What the attention takes, [B, H, T, d]."""
    k: list[Tensor]
    """[B, H_kv, T, d]."""
    v: list[Tensor]
    """[B, H_kv, T, d]."""
    outs: list[Tensor]
    """What the second projection takes, O [B, T, C]."""


@contextlib.contextmanager
def recorded(model: GPT) -> Iterator[Recorded]:
    """Yield lists that a forward pass in the block fills."""
    kept = Recorded([], [], [], [], [], [])

    def keep_projected(_module: Any, arguments: tuple[Tensor, ...], result: Tensor) -> None:
        kept.inputs.append(arguments[0])
        kept.projected.append(result)

    def keep_taken(_module: Any, arguments: tuple[Tensor, ...]) -> None:
        for taken, tensor in zip((kept.q, kept.k, kept.v), arguments[:3], strict=True):
            taken.append(tensor)

    def keep_out(_module: Any, arguments: tuple[Tensor, ...]) -> None:
        kept.outs.append(arguments[0])

    with contextlib.ExitStack() as hooks:
        for block in model.blocks:
            attention = cast(Block, block).attention
            hooks.callback(attention.qkv.register_forward_hook(keep_projected).remove)
            hooks.callback(attention.core.register_forward_pre_hook(keep_taken).remove)
            hooks.callback(attention.projection.register_forward_pre_hook(keep_out).remove)
        yield kept


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
        with recorded(self._model) as kept, torch.enable_grad(), self._autocast():
            loss = self._model(self._sequences[:, :-1], targets, self._seed_and_step)
        scale = loss_scale(self._precision)
        grads = torch.autograd.grad(loss * (self._share * scale), [*kept.outs, *kept.q])
        grad_outs, grad_q = grads[: len(kept.outs)], grads[len(kept.outs) :]
        w_q = self._w_q().clone()
        return Observation(
            variant=analysed(self._attentions[0].core.variant, self._precision),
            x=torch.stack(kept.inputs).detach().float(),
            q=torch.stack(kept.q).detach(),
            k=torch.stack([repeat_kv(q, k) for q, k in zip(kept.q, kept.k, strict=True)]).detach(),
            v=torch.stack([repeat_kv(q, v) for q, v in zip(kept.q, kept.v, strict=True)]).detach(),
            out=self._by_head(torch.stack(kept.outs).detach()),
            grad_out=self._by_head(torch.stack(grad_outs)).float() / scale,
            grad_q=torch.stack(grad_q).float() / scale,
            seed_and_step=self._seed_and_step,
            w_q=w_q,
            update=torch.zeros_like(w_q),
            to_projection=None if self._attentions[0].takes_projected else self._to_projection(kept.projected),
        )

    def _to_projection(self, projected: list[Tensor]) -> Callable[[Tensor], Tensor]:
        """Return :attr:`.Observation.to_projection` of a pass with these projections, [B, T, (H + 2 H_kv) d] each."""
        of_q = [by_head(one.detach(), each.n_head, each.n_kv_head)[0] for each, one in self._of_layers(projected)]

        def back(grads: Tensor) -> Tensor:
            found: list[Tensor] = []
            for (attention, w_q_x), grad in zip(self._of_layers(of_q), grads, strict=True):
                with torch.enable_grad():
                    at = w_q_x.float().requires_grad_()
                    found += torch.autograd.grad(attention.queries(at), at, grad)
            return torch.stack(found)

        return back

    def _of_layers(self, tensors: list[Tensor]) -> Iterator[tuple[CausalSelfAttention, Tensor]]:
        return zip(self._attentions, tensors, strict=True)

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
        return torch.stack([attention.weights[0].detach() for attention in self._attentions])
