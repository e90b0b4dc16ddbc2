"""One colour for each attention variant, the same in every figure."""

from __future__ import annotations

from functools import cache

from flashpoint.files import CONFIGS

_BASELINE = 3
"""Place of red among Matplotlib's ten: the first variant by name is the failing baseline."""


def colour(variant: str) -> str:
    """The variant's as ``#rrggbb``; black for one without a file of its own in ``configs/attn/``."""
    return _colours().get(variant, "#000000")


@cache
def _colours() -> dict[str, str]:
    """Ten full colours, their ten light ones, then twenty more tones, over the variants in the order of their names."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    pairs, more = (colormaps[name](range(20)) for name in ("tab20", "tab20b"))
    tones = [pairs[2 * ((place + _BASELINE) % 10) + light] for light in (0, 1) for place in range(10)]
    names = sorted(path.stem for path in (CONFIGS / "attn").glob("*.yaml"))
    return {name: to_hex(tone) for name, tone in zip(names, [*tones, *more], strict=False)}
