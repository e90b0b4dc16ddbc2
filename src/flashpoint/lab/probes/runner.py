"""Runs the probes beside the training: those of the attention, and norms of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashpoint.early_warning import LOOKBACK, Sentinel, largest_eigenvalue
from flashpoint.errors import UserCodeError, UserError, one_line
from flashpoint.hardware import is_of_full_memory
from flashpoint.lab.config import ProbesConfig, TrainConfig
from flashpoint.lab.cuda_graph import Graphed
from flashpoint.lab.model import GPT, Block
from flashpoint.lab.precision import exact_fp32_products
from flashpoint.lab.probes import user_probes
from flashpoint.lab.probes.attention import DeltaError, Deviation, NullDirection, Probe, Rows, Scores, Similarity
from flashpoint.lab.probes.instrumented import InstrumentedPass
from flashpoint.lab.probes.observation import Observation
from flashpoint.lab.probes.out_error import OutBias, Ties
from flashpoint.lab.probes.user_probes import ProbesState
from flashpoint.numerics.production import repeat_kv
from flashpoint.runs.metric_table import W_Q_NORM, WEIGHT_NORMS

BUILT_IN: dict[str, type[Probe]] = {
    "delta_error": DeltaError,
    "ties": Ties,
    "scores": Scores,
    "rows": Rows,
    "deviation": Deviation,
    "out_bias": OutBias,
    "null_direction": NullDirection,
    "similarity": Similarity,
}
"""The probes that a configuration can name. The names stand in :mod:`flashpoint.lab.config`, too."""


@dataclass(frozen=True)
class Failed:
    """A probe of the user's own that failed, and is off from then on."""

    probe: str
    """As the configuration names it."""
    error: str
    """One line, which begins with the user's file and line."""


class ProbeRunner:
    """The probes of one run. They read weights and batches and change nothing: digests are the same without them.

    Attributes:
        failed: probes of the user's own that have failed; whoever has noted one takes it out.

    Args:
        train: for the sequences of a whole step, and the steps of the warm-up.
        device: where the model is while it trains.
        notify: takes the sentinel's warning.

    Raises:
        UserError: a probe that is named is not there.
    """

    def __init__(
        self,
        config: ProbesConfig,
        model: GPT,
        train: TrainConfig,
        device: torch.device,
        notify: Callable[[str], None],
    ) -> None:
        self._config, self._notify = config, notify
        self._model, self._train, self._device = model, train, device
        self._built_in = {name: BUILT_IN[name]() for name in config.attention if name in BUILT_IN}
        self._own = {name: user_probes.load(name) for name in config.attention if name not in BUILT_IN}
        self._weight_norms = Graphed(lambda: weight_norms(model), device.type == "cuda")
        self._pass: InstrumentedPass | None = None
        self._seen: Observation | None = None
        self.sentinel = Sentinel(train.warmup_steps)
        self.failed: list[Failed] = []

    def before_step(self, step: int, batch: Tensor, seed_and_step: Tensor) -> None:
        """Observe the attention, if it is due, on the first sequences of the batch [..., sequences, T + 1].

        Raises:
            UserError: memory is full.
        """
        if (self._built_in or self._own) and _is_due(step, self._config.attention_interval):
            sequences = batch.flatten(0, -2)[: self._config.sequences]
            with self._told_if_memory_is_full():
                self._pass = self._pass or InstrumentedPass(
                    self._model,
                    sequences,
                    self._train.batch_size,
                    self._device,
                    self._config.targets,
                    self._train.precision,
                )
                self._seen = self._pass(sequences, seed_and_step)

    def after_step(self, step: int, *, last: bool) -> dict[str, NDArray[np.float64]]:
        """Return the metrics due at this step by name, each [L, H].

        Raises:
            UserError: memory is full.
        """
        weights = self._config.weights_interval > 0 and (last or _is_due(step, self._config.weights_interval))
        if not (weights or self._seen) or not (measured := self._measured(weights)):
            return {}
        stacked = torch.stack([by_head.double() for by_head in measured.values()])
        values = dict(zip(measured, stacked.cpu().numpy(), strict=True))  # one copy from the device
        if W_Q_NORM.name in values and (warning := self.sentinel.update(step, values[W_Q_NORM.name])):
            self._notify(
                f"step {step:,}: W_Q of layer {warning.layer}, head {warning.head} has grown ×{warning.growth:.1f} "
                f"in {LOOKBACK} steps, to {warning.norm:.1f}: an explosion may follow"
            )
        return values

    def state(self) -> tuple[dict[str, Tensor], ProbesState]:
        """Return what a resumed run needs to go on: tensors by name, not copied, and plain values."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, dict[str, Any]] = {}
        for name, probe in self._built_in.items():
            state = probe.state()
            held = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            tensors |= {_prefix(name) + key: value for key, value in held.items()}
            plain[name] = {key: value for key, value in state.items() if key not in held}
        for name, probe in tuple(self._own.items()):
            with self._off_if_it_fails(name):
                plain[name] = user_probes.state_of(name, probe)
        kept = {name: state for name, state in plain.items() if state}
        return tensors, ProbesState(attention=kept, sentinel=self.sentinel.state())

    def load_state(self, tensors: Mapping[str, Tensor], state: ProbesState, where: str) -> None:
        """Inverse of :meth:`state`. States of probes that this run does not have are ignored, and a probe without one,
        as of an earlier version, begins anew.

        Args:
            where: what errors begin with.

        Raises:
            UserError: a state is of another model, or none at all.
        """
        if state.sentinel is not None:
            if any(_shape(norms) != self._heads for _, norms in state.sentinel.history):
                raise _of_another(where, "sentinel")
            self.sentinel.load_state(state.sentinel)
        for name, probe in (self._built_in | self._own).items():
            prefix = _prefix(name)
            held = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            kept = {**state.attention.get(name, {}), **held}
            if not kept:
                continue
            if name in self._built_in:
                if not self._fits(name, kept):
                    raise _of_another(where, name)
                probe.load_state(kept)
            else:
                with self._off_if_it_fails(name):
                    user_probes.take_state(name, probe, kept)

    @property
    def _heads(self) -> tuple[int, ...]:
        return self._model.config.n_layer, self._model.config.n_head

    def _fits(self, name: str, kept: Mapping[str, Any]) -> bool:
        """Whether a state is one that a built-in probe of this model can have had."""
        match name, kept:
            case "delta_error", {"cumulative": sums, **others}:
                return not others and _shape(sums) in ((), self._heads)  # () before the first observation
            case "similarity", {"attended_keys": Tensor() as keys, "inputs": Tensor() as inputs, **others}:
                (layers, heads), width = self._heads, self._model.config.d_model
                tokens = keys.shape[2] if keys.ndim == 4 else 0
                wanted = (layers, heads, tokens, width // heads), (layers, 1, tokens, width)
                fit = (keys.shape, inputs.shape) == wanted
                return fit and not others and keys.dtype == inputs.dtype == torch.float32
        return False

    @torch.no_grad()
    @exact_fp32_products()  # of what the training computed in its own precision
    def _measured(self, weights: bool) -> dict[str, Tensor]:
        """Return the metrics by name, each [L, H]: of the weights if they are due, and of what was observed."""
        measured: dict[str, Tensor] = {**self._weight_norms()} if weights else {}
        if self._pass and self._seen:
            seen, self._seen = self._pass.with_update(self._seen), None
            with self._told_if_memory_is_full():
                for probe in self._built_in.values():
                    measured |= probe.measure(seen)
            for name, probe in tuple(self._own.items()):
                with self._off_if_it_fails(name):
                    measured |= user_probes.measured(name, probe, seen, measured)
        return measured

    @contextmanager
    def _told_if_memory_is_full(self) -> Iterator[None]:
        """Without probes the training may fit, so its own keys are not the ones to lower."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_of_full_memory(error):
                raise
            count = self._config.sequences
            raise UserError(
                f"the memory of device {self._device.type} is full where attention is observed; "
                + (f"lower probes.sequences={count}, or " if count > 1 else "")
                + "give probes.attention_interval=0, which observes none"
            ) from error

    @contextmanager
    def _off_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except UserCodeError as error:
            del self._own[name]
            self.failed.append(Failed(name, one_line(error)))


def _shape(numbers: object) -> tuple[int, ...] | None:
    """Return the shape of a number, or of lists of lists of them; None of what is neither."""
    try:
        array = np.array(numbers)
    except ValueError:  # of other lengths
        return None
    return array.shape if array.dtype.kind in "fi" else None


def _of_another(where: str, name: str) -> UserError:
    return UserError(f"{where}: the state of {name} is none that it has in this model; restore the file")


def _prefix(name: str) -> str:
    """Return what the names of a probe's tensors begin with."""
    return f"probes/{name}/"


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and (step + 1) % interval == 0


@torch.no_grad()
def weight_norms(model: GPT) -> dict[str, Tensor]:
    """Return the largest singular values of W_Q, W_K, W_V and of the bilinear form W_Qᵀ W_K of each head.

    Returns:
        Of each of :data:`.WEIGHT_NORMS` [n_layer, n_head] float32, relative error below 1e-3. Those of W_K and W_V
        that several heads share stand in each of them.
    """
    of_layers = zip(*(cast(Block, block).attention.weights for block in model.blocks), strict=True)
    q, *shared = (torch.stack(weights).double() for weights in of_layers)  # [L, H, d, C], and with H_kv heads
    weights = torch.stack([q, *(repeat_kv(q, one) for one in shared)])  # [3, L, H, d, C]
    grams = weights @ weights.mT  # W Wᵀ
    unit = torch.eye(q.shape[2], dtype=grams.dtype, device=grams.device).expand_as(grams[0])
    # W_Qᵀ W_K has the squared norm of W_Q W_Qᵀ · W_K W_Kᵀ.
    eigenvalues = largest_eigenvalue(torch.stack([*grams, grams[0]]), torch.stack([unit, unit, unit, grams[1]]))
    return {metric.name: norms for metric, norms in zip(WEIGHT_NORMS, eigenvalues.sqrt().float(), strict=True)}
