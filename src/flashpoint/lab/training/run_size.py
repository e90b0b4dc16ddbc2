"""What a run needs of memory and disk, in bytes: a lower bound, from the configuration alone.

It counts what is certainly there at the same time, so that no run is refused that fits. A run takes 1.3 to 3.4 times as
much memory (docs/robustness.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flashpoint.errors import UserError
from flashpoint.lab.config import SIMILARITY_TOKENS, CheckpointsConfig, Config, d_mlp

Sizes = Mapping[str, int]
"""Bytes by what they are for."""
_FLOAT, _HALF, _INT64 = 4, 2, 8
_LOADED = {"cpu": 300 << 20, "cuda": 400 << 20}
"""PyTorch itself: its libraries in memory, or a CUDA context."""
CHECKPOINT_OVERHEAD = 1 << 16
"""Names, metadata and the sidecar of a checkpoint."""
LEAST_CHECKPOINTS = 3
"""That a budget is to hold."""
_TAPE_DIGEST, _CHAIN_RECORD, _METRICS_LINE = 8, 24, 120
_OF_ALL_SCORES = frozenset(("delta_error", "scores", "rows", "null_direction", "similarity"))
"""Probes for which S and P of each head are held whole."""


@dataclass(frozen=True)
class RunSize:
    """The numbers that sizes depend on, each named as its key."""

    family: str
    n_layer: int
    n_head: int
    n_kv_head: int
    d_model: int
    qk_norm: bool
    shifts_keys: bool
    """Whether the state has running means of keys."""
    muon: bool
    """Whether Muon has the matrices of the layers."""
    context: int
    vocab_size: int
    steps: int
    first_step: int
    """0 but for a branch."""
    batch_size: int
    micro_batch_size: int
    log_interval: int
    sequences: int
    """0 where no probe needs scores."""
    remembers: bool
    """Whether a probe compares the directions of tokens with those of the observation before."""
    interval: int
    weights_interval: int
    budget_gib: float
    value_bytes: int
    """Of an operand of a matrix product."""
    fused: bool
    """Whether a compiler fuses logits and loss."""
    world: int

    @classmethod
    def of_config(cls, config: Config, device: str, world: int = 1) -> RunSize:
        """Return those of a run.

        Args:
            device: ``cpu`` or ``cuda``.
            world: processes that share each batch.
        """
        model, train, probes, kept = config.model, config.train, config.probes, config.checkpoints
        observed = {*probes.attention} if probes.attention_interval else set()
        return cls(
            family=model.family, n_layer=model.n_layer, n_head=model.n_head, n_kv_head=model.kv_heads,
            d_model=model.d_model, qk_norm=model.qk_norm, shifts_keys=model.shift_keys == "running",
            muon=config.optimizer.name == "muon", context=model.context, vocab_size=model.vocab_size, steps=train.steps,
            first_step=min(config.from_step or 0, train.steps), batch_size=train.batch_size,
            micro_batch_size=train.micro_batch_size or max(1, train.batch_size // world),
            log_interval=train.log_interval,
            sequences=probes.sequences if _OF_ALL_SCORES & observed else 0, remembers="similarity" in observed,
            interval=kept.interval, weights_interval=kept.weights_interval, budget_gib=kept.budget_gib,
            value_bytes=_HALF if train.precision in ("bf16", "fp16") else _FLOAT,
            fused=train.compiles(device), world=world,
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        C, positions = self.d_model, 0 if self.family == "llama" else self.context
        gains = 2 * C + (2 * C // self.n_head if self.qk_norm else 0)
        return (self.vocab_size + positions + 1) * C + self.n_layer * gains + self._of_projections

    @property
    def _of_projections(self) -> int:
        """Parameters of the layers' matrices."""
        C, of_mlp = self.d_model, 3 if self.family == "llama" else 2
        projections = 2 * C + 2 * C * self.n_kv_head // self.n_head + of_mlp * d_mlp(self.family, C)
        return self.n_layer * projections * C

    @property
    def _trained_bytes(self) -> int:
        """Bytes of the weights and their moments, of which AdamW has two and Muon one."""
        return _FLOAT * (3 * self.parameters - (self._of_projections if self.muon else 0))

    @property
    def state_bytes(self) -> int:
        """Bytes of the tensors of a checkpoint."""
        tensors = 2 + 7 * self.n_layer if self.family == "llama" else 3 + 6 * self.n_layer
        tensors += 2 * self.n_layer if self.qk_norm else 0
        if self.muon:  # which counts no steps
            tensors -= (5 if self.family == "llama" else 4) * self.n_layer
        means = self.n_layer * self.d_model * self.n_kv_head // self.n_head if self.shifts_keys else 0
        return self._trained_bytes + _FLOAT * (tensors + means) + 2 * _INT64 + self._remembered_bytes

    @property
    def _remembered_bytes(self) -> int:
        """Bytes of (PK)[T] of all heads and X[T], each as wide as the model, of the tokens of an observation."""
        tokens = min(SIMILARITY_TOKENS, self._observed * self.context) if self.remembers else 0
        return 2 * _FLOAT * self.n_layer * self.d_model * tokens

    @property
    def _observed(self) -> int:
        """Sequences that this process observes."""
        return min(self.sequences, max(1, self.batch_size // self.world))

    @property
    def checkpoint_bytes(self) -> int:
        return self.state_bytes + CHECKPOINT_OVERHEAD

    @property
    def least_budget_gib(self) -> int:
        """The least ``checkpoints.budget_gib``, in whole GiB, that :func:`capacity` takes."""
        return math.ceil(LEAST_CHECKPOINTS * self.checkpoint_bytes / 2**30)

    def memory(self, device: str) -> Sizes:
        """Return what is in the memory of the device at the moment at which most is: in a backward pass, in an update
        of the weights, or in an observation."""
        n = self.micro_batch_size * self.context
        always = {
            "PyTorch itself": _LOADED[device],
            "weights and the optimiser's moments": self._trained_bytes,
            "the batch": _INT64 * self.batch_size // self.world * (self.context + 1),
            "losses that wait to be read": 3 * _FLOAT * self.log_interval,
        }
        of_logits = 2 * self.value_bytes if self.fused else 2 * _FLOAT + self.value_bytes
        backward = {
            "weights in the products' format": _HALF * self.parameters if self.value_bytes == _HALF else 0,
            "activations": (2 * _FLOAT + 15 * self.value_bytes) * self.n_layer * self.d_model * n,
            "logits": of_logits * self.vocab_size * n,
        }
        update = {"gradients, and weights before and after": 3 * _FLOAT * self.parameters}
        scores = self.n_layer * self._observed * self.n_head * self.context**2
        observation = {"scores of the probes": 2 * _FLOAT * scores}
        moments = (always | moment for moment in (backward, update, observation))
        return max(moments, key=total)

    def host_memory(self) -> Sizes:
        """Return what is in the memory of the machine while another device computes."""
        kept = self._trained_bytes if self.interval else _FLOAT * self.parameters
        return {
            "PyTorch itself": _LOADED["cpu"],
            "weights, or a checkpoint on its way to the disk": kept,
            "the batch": _INT64 * self.batch_size // self.world * (self.context + 1),
        }

    def disk(self) -> Sizes:
        """Return what the run's files take when it has done all its steps."""
        found = {
            "the tape": self.steps * (_FLOAT * self.batch_size + _TAPE_DIGEST),
            "the digest chain": _CHAIN_RECORD * self.steps,
            "metrics": _METRICS_LINE * (self.steps - self.first_step),
            "snapshots of the weights": self._times(self.weights_interval) * _FLOAT * self.parameters,
        }
        if self.interval:
            states = self._times(self.interval) * self.checkpoint_bytes
            found["checkpoints"] = min(states, math.floor(self.budget_gib * 2**30))
        return found

    def _times(self, interval: int) -> int:
        """How often what is written every so many steps is written; 0 is never."""
        return self.steps // interval - self.first_step // interval if interval else 0


def total(sizes: Sizes) -> int:
    """Return the bytes of all parts together."""
    return sum(sizes.values())


def capacity(config: CheckpointsConfig, state_bytes: int) -> int:
    """Return how many checkpoints the budget holds.

    Raises:
        UserError: fewer than three.
    """
    size = state_bytes + CHECKPOINT_OVERHEAD
    count = int(config.budget_gib * 2**30 // size)
    if count < LEAST_CHECKPOINTS:
        raise UserError(
            f"checkpoints.budget_gib={config.budget_gib:g}: a checkpoint takes {size / 2**30:.3g} GiB and three are "
            f"needed; give at least {LEAST_CHECKPOINTS * size / 2**30:.3g}, or checkpoints.interval=0 for none"
        )
    return count
