"""The weights alone at regular steps, and how far another run's weights are from them (arXiv 2405.02803).

A run with ``checkpoints.weights_interval`` keeps its weights every so many steps. A run with
``probes.weights_against=RUN`` measures its distance from RUN at each of those steps and keeps no weights of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashpoint.errors import UserError
from flashpoint.files import atomic_write
from flashpoint.lab.build_config import keys
from flashpoint.lab.config import Config
from flashpoint.lab.data.batches import Order
from flashpoint.lab.data.tape import Tape, TapeHeader
from flashpoint.lab.stored_config import read_config
from flashpoint.lab.training.tensor_files import Form, Forms, check_finite, read_tensors
from flashpoint.numerics.effective import effective_choices
from flashpoint.runs.chain import Chain
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metric_table import ALL_TENSORS, WEIGHTS_LARGEST, WEIGHTS_SPREAD, WEIGHTS_WASSERSTEIN
from flashpoint.runs.subfolders import TENSORS, by_step, of_step
from flashpoint.schema import EXPERIMENT

_OF_ONE_THING = {
    "model.init_seed": "initial weights",
    "model.init_ulps": "one weight",
    "train.order_seed": "batch order",
    "train.precision": "precision",
}
"""Settings that two compared runs may differ in, besides the attention."""


def write_snapshot(folder: Path, step: int, weights: Mapping[str, Tensor]) -> None:
    """Write the weights after ``step`` steps as safetensors, FP32.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    with atomic_write(of_step(folder, step, TENSORS)) as partial:
        save_file({name: tensor.detach().cpu() for name, tensor in weights.items()}, partial)


def snapshot_steps(folder: Path) -> list[int]:
    """Return the steps after which the folder has weights, in order."""
    return list(by_step(folder, TENSORS))


def read_snapshot(folder: Path, step: int, forms: Forms, chain: Chain | None = None) -> dict[str, Tensor]:
    """Return the weights after ``step`` steps, FP32 in host memory.

    Args:
        chain: the digest chain of the run. As long as that is finite, so have the weights to be; None where there is
            none.

    Raises:
        UserError: the file is missing or damaged, or holds other tensors.
    """
    path, remedy = of_step(folder, step, TENSORS), "restore the file, or drop probes.weights_against"
    weights = read_tensors(path, forms, remedy)
    if chain is not None and chain.is_finite(step):
        check_finite(path, weights, forms, remedy)
    return weights


def distances(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the distances between two sets of weights of the same shapes, by tensor and over all.

    Returns:
        ``weights_largest/NAME``: the largest |difference| of an element. ``weights_wasserstein/NAME``: the
        1-Wasserstein distance of the two distributions of values, that is the mean |difference| of the sorted values.
        ``weights_spread/NAME``: the standard deviation of the other's values, to which both may be put in relation.
    """
    pairs = {name: (weights[name].detach().flatten().double(), others[name].flatten()) for name in others}
    pairs = {name: (one, other.to(one.device, torch.float64)) for name, (one, other) in pairs.items()}
    one, other = (torch.cat(side) for side in zip(*pairs.values(), strict=True))
    pairs[ALL_TENSORS] = one, other
    found: dict[str, float] = {}
    for name, (one, other) in pairs.items():
        found[WEIGHTS_LARGEST.of_tensor(name)] = (one - other).abs().max().item()
        found[WEIGHTS_WASSERSTEIN.of_tensor(name)] = (one.sort().values - other.sort().values).abs().mean().item()
        found[WEIGHTS_SPREAD.of_tensor(name)] = other.std(correction=0).item()
    return found


class Twin:
    """The run that another one is measured against, which differs from it in one thing.

    Attributes:
        differs_in: that thing, in words.
        steps: after which the twin has weights.

    Raises:
        UserError: no run or no weights are there, or the two differ in nothing, in several things or in their batches.
    """

    def __init__(self, config: Config, header: TapeHeader, order: Order) -> None:
        name = config.probes.weights_against
        assert name is not None
        self._folder = RunFolder.open(name, config.runs_dir)
        self.name = self._folder.path.name
        self.steps = frozenset(snapshot_steps(self._folder.weights))
        told = f"probes.weights_against={name}"
        if not self.steps:
            raise UserError(f"{told}: keeps no weights; record it with checkpoints.weights_interval=N")
        self.differs_in = _one_difference(told, config, read_config(self._folder.config))
        found = self._folder.chain.is_file()
        self._chain = Chain.read(self._folder.chain, until_broken=True) if found else None
        if self.differs_in != "batch order":
            _require_same_batches(told, self._folder, header, order)

    def measure(self, step: int, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the :func:`distances` of the weights after ``step`` steps from the twin's."""
        forms = {name: Form.of(weight) for name, weight in weights.items()}
        return distances(weights, read_snapshot(self._folder.weights, step, forms, self._chain))


def _one_difference(told: str, config: Config, there: Config) -> str:
    """Name the one thing that the two configurations differ in."""
    found = []
    if effective_choices(config.attn) != effective_choices(there.attn):
        found.append(f"attention {config.attn.title} for {there.attn.title}")
    if config.seed != there.seed:
        raise UserError(f"{told}: seed {there.seed} there, {config.seed} here; take the runs of one seed")
    for key in keys():
        section, _, name = key.name.partition(".")
        if not name or EXPERIMENT not in key.marks or section == "detector":
            continue
        own, others = map(attrgetter(key.name), (config, there))
        if own == others:
            continue
        if key.name not in _OF_ONE_THING:
            things = ", ".join(("attention", *_OF_ONE_THING))
            raise UserError(
                f"{told}: {key.name} is {others} there, {own} here; take runs that differ in one of {things}"
            )
        what = _OF_ONE_THING[key.name]
        if key.name == "model.init_ulps":
            what = f"{abs(own - others):,} FP32 ulps in {what}"
        found.append(f"precision {own} for {others}" if what == "precision" else what)
    if len(found) != 1:
        differ = " and ".join(found) or "nothing"
        raise UserError(f"{told}: the two differ in {differ}; take runs that differ in one thing")
    return found[0]


def _require_same_batches(told: str, folder: RunFolder, header: TapeHeader, order: Order) -> None:
    tape = Tape.read(folder.tape, until_broken=True)
    same = {name for name in header.__dict__ if name != "initial_weights"}
    differ = sorted(name for name in same if getattr(tape.header, name) != getattr(header, name))
    if differ:
        raise UserError(f"{told}: its tape differs in {differ[0]}; take a run with the same batches")
    for step in range(min(tape.steps, 3)):
        if not np.array_equal(tape.records[step], order.windows(step)):
            raise UserError(f"{told}: its tape has other batches from step {step} on; take a run with the same batches")
