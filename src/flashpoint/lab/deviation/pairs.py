"""Differences of engines from each other and from the golden value, on the same inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from flashpoint.errors import UserError
from flashpoint.lab.deviation.arithmetic import Arithmetic
from flashpoint.lab.deviation.emulated import Block, Inputs, Results, golden
from flashpoint.lab.deviation.engines import Engine, Setting

QUANTITIES = ("O", "L", "δ", "dQ", "dK", "dV")
GOLDEN = "golden"
_ELEMENTS = 1 << 22
"""Scores that are computed at a time: those of one input at least, and of the golden value one row's."""


@dataclass(frozen=True)
class Pair:
    """A quantity of one engine minus that of another, or minus the golden value."""

    engine: str
    other: str
    quantity: str
    emulated: bool
    """Whether one of the two computes in the arithmetic that was asked for."""
    block: Block | None
    """None where neither works by tiles."""
    difference: Tensor
    """[B, …] float64."""
    golden: Tensor
    rescalings: float | None
    """Mean over rows and inputs, of the tiled engine."""


def pairs(
    engines: Sequence[Engine],
    inputs: Inputs,
    compute: Arithmetic,
    blocks: Sequence[Block],
    *,
    causal: bool,
    quantities: Sequence[str],
) -> Iterator[Pair]:
    """Compare every engine with the last one, and every engine with the golden value.

    The inputs are rounded to the precision first. The golden value is baseline attention in FP64 on the rounded inputs,
    so that their rounding is no deviation.

    Args:
        inputs: float64 [B, H, T, d].
        quantities: of :data:`QUANTITIES`. One that an engine does not tell has no pair.

    Raises:
        UserError: an engine cannot compute this.
    """
    inputs = inputs.map(compute.round)
    backward = any(name not in ("O", "L") for name in quantities)
    with _memory_told(GOLDEN, inputs):
        exact = golden(inputs, _ELEMENTS, causal=causal, backward=backward).values
    whole: dict[str, Results] = {}  # of engines without tiles
    for number, block in enumerate(blocks):
        setting = Setting(compute, block, causal, backward)
        results: dict[str, Results] = {}
        for engine in engines:
            if engine.tiled or engine.name not in whole:
                results[engine.name] = _computed(engine, inputs, setting)
            else:
                results[engine.name] = whole[engine.name]
        whole = {engine.name: results[engine.name] for engine in engines if not engine.tiled}
        compared: list[tuple[Engine, Engine | None]] = [(engine, engines[-1]) for engine in engines[:-1]]
        compared += [(engine, None) for engine in engines]
        for engine, other in compared:
            if not number or any(one.tiled for one in (engine, other) if one):
                yield from _differences(engine, other, results, exact, block, quantities)


def _differences(
    engine: Engine,
    other: Engine | None,
    results: Mapping[str, Results],
    exact: Mapping[str, Tensor],
    block: Block,
    quantities: Sequence[str],
) -> Iterator[Pair]:
    """Yield what an engine differs by in each quantity from another one; None is the golden value."""
    tiled = [one for one in (engine, other) if one and one.tiled]
    found, against = results[engine.name].values, results[other.name].values if other else exact
    risen = results[tiled[0].name].rescalings if tiled else None
    for name in quantities:
        if name in found and name in against:
            yield Pair(
                engine=engine.name,
                other=other.name if other else GOLDEN,
                quantity=name,
                emulated=engine.emulated or (other is not None and other.emulated),
                block=block if tiled else None,
                difference=found[name] - against[name],
                golden=exact[name],
                rescalings=None if risen is None else float(risen.double().mean()),
            )


def _computed(engine: Engine, inputs: Inputs, setting: Setting) -> Results:
    """Compute a few inputs at a time, as many as memory is meant for."""
    count, heads, length, _ = inputs.q.shape
    step = max(1, _ELEMENTS // (heads * length**2))
    with _memory_told(engine.name, inputs):
        parts = [engine.compute(inputs.map(itemgetter(slice(at, at + step))), setting) for at in range(0, count, step)]
    rescalings = [part.rescalings for part in parts if part.rescalings is not None]
    return Results(
        {name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values},
        torch.cat(rescalings) if rescalings else None,
    )


@contextmanager
def _memory_told(name: str, inputs: Inputs) -> Iterator[None]:
    """What PyTorch raises where memory does not suffice, as a :class:`UserError`."""
    try:
        yield
    except RuntimeError as error:
        if "alloc" not in str(error):
            raise
        raise UserError(f"{name} at {inputs.q.shape[-2]:,} tokens: not enough memory; give fewer tokens") from error
