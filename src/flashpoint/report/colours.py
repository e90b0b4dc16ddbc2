"""One colour for each attention, the same in every figure."""

from __future__ import annotations

from functools import cache

from flashpoint.files import CONFIGS
from flashpoint.numerics.named import variant_names

_BASELINE = 3
"""Place of red among Matplotlib's ten: the first variant by name is the failing baseline."""

_ENGINES = {
    "flash": "#393b79",
    "baseline": "#e7ba52",
    "sdpa:math": "#843c39",
    "sdpa:flash": "#8ca252",
    "sdpa:efficient": "#a55194",
    "sdpa:cudnn": "#6b6ecf",
}
"""Engines of ``flashpoint deviation`` that are no variants, by tones that no variant has."""


def colour(name: str) -> str:
    """A variant's or engine's as ``#rrggbb``; black for one that is neither PyTorch's nor in ``configs/attn/``."""
    return _ENGINES.get(name) or _colours().get(name, "#000000")


@cache
def _colours() -> dict[str, str]:
    """Ten full colours, their ten light ones, then twenty more tones, over the variants in the order of their names."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    pairs, more = (colormaps[name](range(20)) for name in ("tab20", "tab20c"))
    tones = [pairs[2 * ((place + _BASELINE) % 10) + light] for light in (0, 1) for place in range(10)]
    return {name: to_hex(tone) for name, tone in zip(variant_names(CONFIGS / "attn"), [*tones, *more], strict=False)}
