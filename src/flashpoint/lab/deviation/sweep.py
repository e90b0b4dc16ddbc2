"""Comparisons of engines over formats, sums, lengths, head sizes, tiles and inputs, each as sizes of differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.deviation.arithmetic import arithmetic
from flashpoint.lab.deviation.defaults import TILE
from flashpoint.lab.deviation.drawn_inputs import drawn
from flashpoint.lab.deviation.emulated import Block, Inputs
from flashpoint.lab.deviation.engines import engines_named
from flashpoint.lab.deviation.formats import Format
from flashpoint.lab.deviation.pairs import GOLDEN, Pair, pairs
from flashpoint.lab.deviation.statistics import Deviation, Unit, deviation, largest_and_rms


@dataclass(frozen=True)
class Given:
    """Inputs that engines are compared on."""

    name: str
    inputs: Inputs
    """[B, H, T, d], of B independent inputs."""
    causal: bool


@dataclass(frozen=True)
class Sweep:
    """What is compared. Every value of one field goes with every value of the others."""

    engines: tuple[str, ...] = ("flash", "baseline")
    """Words of :func:`flashpoint.lab.deviation.engines.engines_named`; the last one is the reference."""
    precisions: tuple[Format, ...] = ()
    sums: tuple[str, ...] = ("fp32",)
    """Words of :func:`flashpoint.lab.deviation.arithmetic.arithmetic`."""
    blocks: tuple[Block, ...] = ()
    quantities: tuple[str, ...] = ("O",)
    units: tuple[Unit, ...] = ("absolute",)


@dataclass(frozen=True)
class Measured:
    """The size of one quantity's difference between two engines, or of one from the golden value."""

    inputs: str
    engine: str
    other: str
    quantity: str
    precision: Format
    sums: str | None
    """None where neither engine is emulated."""
    length: int
    head_size: int
    block: Block | None
    unit: Unit
    size: Deviation
    distances: tuple[NDArray[np.float64], NDArray[np.float64]] | None
    """Largest difference and root mean square of each input, absolute; None between two engines."""
    rescalings: float | None

    @property
    def difference(self) -> str:
        """What is subtracted from what."""
        return f"{self.engine} − {self.other}"

    @property
    def format_of_sums(self) -> str | None:
        """The format that sums had: the precision where that is finer than what was asked for."""
        if self.sums in (None, "same", "within"):
            return self.sums
        return arithmetic(self.precision, self.sums).sums.name


def drawn_inputs(
    kind: str, lengths: Sequence[int], head_sizes: Sequence[int], seeds: int, *, causal: bool
) -> Iterator[Given]:
    """Draw inputs of each length and head size in their turn (:func:`flashpoint.lab.deviation.drawn_inputs.drawn`)."""
    for head_size, length in product(head_sizes, lengths):
        yield Given(kind, drawn(kind, seeds, length, head_size), causal)


def measure(sweep: Sweep, all_given: Iterable[Given], device: torch.device) -> Iterator[Measured]:
    """Compare the engines on each of the inputs.

    Raises:
        UserError: an engine is none or cannot compute this, or a tile is wider than the sequence.
    """
    engines = engines_named(sweep.engines, sweep.precisions, device)
    for given in all_given:
        here = given.inputs.map(lambda x: x.to(device))
        length, head_size = here.q.shape[-2:]
        tiles = _tiles(sweep, length)
        for precision, (number, sums) in product(sweep.precisions, enumerate(sweep.sums)):
            compute, shown = arithmetic(precision, sums), sweep.quantities
            for pair in pairs(engines, here, compute, tiles, causal=given.causal, quantities=shown):
                if pair.emulated or not number:  # others have no sums to choose
                    yield from _measured(pair, given.name, precision, sums, (length, head_size), sweep.units)


def _tiles(sweep: Sweep, length: int) -> list[Block]:
    """Return the tiles, each once. One that was named has to fit the sequence, the default is cut to it."""
    for block in sweep.blocks:
        if max(block.rows, block.keys) > length:
            raise UserError(
                f"--block {block.rows}x{block.keys}: wider than {length:,} tokens; give at most {length}x{length}"
            )
    return list(dict.fromkeys(sweep.blocks)) or [Block(min(TILE, length), min(TILE, length))]


def _measured(
    pair: Pair, inputs: str, precision: Format, sums: str, shape: tuple[int, int], units: Sequence[Unit]
) -> Iterator[Measured]:
    length, head_size = shape
    for unit in units:
        yield Measured(
            inputs=inputs,
            engine=pair.engine,
            other=pair.other,
            quantity=pair.quantity,
            precision=precision,
            sums=sums if pair.emulated else None,
            length=length,
            head_size=head_size,
            block=pair.block,
            unit=unit,
            size=deviation(pair.difference, pair.golden, precision, unit),
            distances=largest_and_rms(pair.difference) if pair.other == GOLDEN else None,
            rescalings=pair.rescalings,
        )
