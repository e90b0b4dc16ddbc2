"""How many planted faults a diagnosis names: a small GPT, one layer and head of which has a fault, is watched.

    python scripts/faults/planted_faults.py            # 76 trials: each kind 6 times, 16 without a fault
    python scripts/faults/planted_faults.py --seeds 1  # a quick look

A trial draws layer, head, block and inputs by its seed. The model (3 layers of 4 heads of 16 features, T 96) makes two
optimiser steps on random tokens; the second one is captured. Every layer is then diagnosed twice: by its captured
tensors alone, and with its attention called anew. Right is the kind of the fault in its layer and its head and nothing
elsewhere. By tensors alone a fault of weights, of L or of one row counts as named where rows or gradients of that layer
and head are said to be off. Chance intervals are 95 % (Wilson).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import flashpoint
from examples.nanogpt import GPT, CausalSelfAttention
from flashpoint.cli.table import Table, show
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.faults import BY_TENSORS, KINDS, Fault, faulty_attention
from flashpoint.diagnosis.verdict import diagnose
from flashpoint.watching.captures import read_calls

LAYERS, HEADS, CONTEXT = 3, 4, 96


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """The attention of the layer whose turn it is, by the name that the interceptor wraps."""
    return next(_turns)(q, k, v, is_causal=is_causal)


_turns: Iterator[Callable[..., Tensor]] = iter(())


def trial(kind: str, seed: int, folder: Path) -> tuple[bool, bool]:
    """Return whether the fault was named right by tensors alone, and with the attention called anew."""
    global _turns  # noqa: PLW0603 - what the wrapped function of this module calls
    draw = torch.Generator().manual_seed(1000 * seed + KINDS.index(kind))
    layer, head, block = (int(torch.randint(n, (), generator=draw)) for n in (LAYERS, HEADS, 3))
    fault = Fault(kind, head=head, block=max(1, block), seed=seed)
    clean = F.scaled_dot_product_attention if kind == "none" and seed % 2 else faulty_attention(Fault("none"))
    layers: list[Callable[..., Tensor]] = [clean] * LAYERS
    if kind != "none":
        layers[layer] = faulty_attention(fault)
    _turns = itertools.cycle(layers)
    torch.manual_seed(seed)
    model = GPT(64, LAYERS, HEADS, 64, CONTEXT, lambda q, k, v, is_causal: attend(q, k, v, is_causal))  # noqa: PLW0108 - by name, each time
    attentions = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    with torch.no_grad():
        for attention in attentions:  # scores of some nats, as trained models have
            attention.c_attn.weight.mul_(8.0)
        if kind == "fp16_overflow":
            attentions[layer].c_attn.weight[:128].mul_(200.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    named = ["__main__:attend" if __name__ == "__main__" else f"{__name__}:attend"]
    with flashpoint.watch(model, runs_dir=folder, name=f"{kind}-{seed}", functions=named, steps=2) as watched:
        for step in range(2):
            tokens = torch.randint(64, (8, CONTEXT + 1), generator=draw)
            if step == 1:
                watched.capture(sequences=0)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            watched.step(loss)
            if kind != "fp16_overflow":
                optimizer.step()
            optimizer.zero_grad()
    calls = read_calls(folder / f"{kind}-{seed}")
    alone = _found(calls, [None] * LAYERS)
    anew = _found(calls, layers)
    expected = set() if kind == "none" else {(layer + 1, head + 1)}
    kinds = (BY_TENSORS[kind], (kind,))
    # NaN of one layer spreads to the layers before it, by gradients, and after it.
    first = kind == "fp16_overflow"
    return tuple(  # type: ignore[return-value]
        _right(found, expected, wanted, layer + 1 if first else None)
        for found, wanted in zip((alone, anew), kinds, strict=True)
    )


def _found(calls: list[AttentionCall], layers: list[Callable[..., Tensor]] | list[None]) -> list[tuple[str, int, int]]:
    found = []
    for call in calls:
        function = layers[call.layer - 1]
        by_position = function and (lambda q, k, v, c, s, f=function: f(q, k, v, is_causal=c, scale=s))
        found += [(one.kind, one.layer, head) for one in diagnose(call, by_position).findings for head in one.heads]
    return found


def _right(
    found: list[tuple[str, int, int]], expected: set[tuple[int, int]], kinds: tuple[str, ...], only: int | None
) -> bool:
    if only is not None:
        found = [one for one in found if one[1] == only]
    if not expected:
        return not found
    return {(layer, head) for _, layer, head in found} == expected and {kind for kind, _, _ in found} <= set(kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="trials of each kind; without a fault twice as many and 4")
    parser.add_argument("--first", type=int, default=200, help="seed; the rules were made with 0 to 5 and 100 in sight")
    arguments = parser.parse_args()
    seeds, first = arguments.seeds, arguments.first
    rows: list[list[object]] = []
    total = [0, 0, 0]
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            count = 2 * seeds + 4 if kind == "none" else seeds
            right = [trial(kind, seed, Path(folder)) for seed in range(first, first + count)]
            named = [sum(one[at] for one in right) for at in (0, 1)]
            rows.append([kind, count, *(f"{n} of {count}" for n in named)])
            if kind != "none":
                total = [total[0] + count, *(t + n for t, n in zip(total[1:], named, strict=True))]
    intervals = [binomtest(n, total[0]).proportion_ci(method="wilson") for n in total[1:]]
    shares = [f"{100 * one.low:.0f} to {100 * one.high:.0f} %" for one in intervals]
    rows.append(
        ["all faults", total[0], *(f"{n} of {total[0]} ({share})" for n, share in zip(total[1:], shares, strict=True))]
    )
    kinds = f"{seeds} for each fault, {2 * seeds + 4} without one"
    note = f"CPU, torch {torch.__version__}; seeds from {first} on: {kinds}. {date.today()}."
    show(
        Table(("fault", "trials", "named by tensors alone", "named with the attention called anew"), rows, note),
        "markdown",
    )


if __name__ == "__main__":
    main()
