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

DEFAULT_BLOCK = Block(TILE, TILE)


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
    srams: tuple[int, ...] = ()
    """Bytes, which give the tiles in place of ``blocks``."""
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
        for precision in sweep.precisions:
            tiles = _tiles(sweep, precision, length, head_size)
            for number, sums in enumerate(sweep.sums):
                compared = pairs(
                    engines,
                    here,
                    arithmetic(precision, sums),
                    tiles,
                    causal=given.causal,
                    quantities=sweep.quantities,
                )
                for pair in compared:
                    if number and not pair.emulated:
                        continue  # has no sums to choose
                    yield from _measured(pair, given.name, precision, sums, (length, head_size), sweep.units)


def block_of_sram(size: int, precision: Format, head_size: int) -> Block:
    """Return the tile of FlashAttention (Dao et al., arXiv 2205.14135, Algorithm 1) for so many bytes of SRAM.

    With M numbers of the precision: B_c = ⌈M/4d⌉ keys and B_r = min(B_c, d) queries.

    Raises:
        UserError: M is 0.
    """
    elements = size // precision.bytes
    if not elements:
        raise UserError(f"--sram {size}: holds no number of {precision.name}, which takes {precision.bytes} bytes")
    keys = -(-elements // (4 * head_size))
    return Block(min(keys, head_size), keys)


def _tiles(sweep: Sweep, precision: Format, length: int, head_size: int) -> list[Block]:
    """Return the tiles, each once. One that was named has to fit the sequence, any other is cut to it."""
    for block in sweep.blocks:
        if max(block.rows, block.keys) > length:
            raise UserError(
                f"--block {block.rows}x{block.keys}: wider than {length:,} tokens; give at most {length}x{length}"
            )
    implied = [block_of_sram(size, precision, head_size) for size in sweep.srams] or [DEFAULT_BLOCK]
    cut = [Block(min(block.rows, length), min(block.keys, length)) for block in sweep.blocks or implied]
    return list(dict.fromkeys(cut))


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
