"""One colour for each attention, the same in every figure, and one look for each layer of a model."""

from __future__ import annotations

from typing import Any

_VARIANTS = {
    "flash_bf16": "#d55e00",
    "flash_fp32": "#e69f00",
    "sdpa": "#cc79a7",
    "flash_unrounded_out": "#56b4e9",
    "flash_exact_rowsum": "#009e73",
    "flash_fixed": "#0072b2",
    "flash_exact_rowsum_one_pass": "#66c2a5",
    "flash_fixed_paper": "#882255",
    "flash_fixed_paper_unguarded": "#999933",
    "flash_delta_fp32": "#1f4e79",
    "flash_delta_pdp": "#44aa99",
    "flash_delta_split": "#6a51a3",
    "flash_fp32_out": "#ddcc77",
    "flash_centered": "#117733",
    "flash_centered_grad": "#aa4499",
    "flash_stochastic": "#80b1d3",
    "flash_independent_delta": "#bbbbbb",
    "flash_untiled": "#994455",
    "flash_per_block": "#ee8866",
    "released": "#7b3f00",
    "released_fixed": "#332288",
    "standard": "#777777",
    "sdpa_math": "#843c39",
    "sdpa_flash": "#8ca252",
    "sdpa_efficient": "#a55194",
    "sdpa_cudnn": "#6b6ecf",
    "flex": "#17becf",
    "flash_attn": "#b5651d",
    "fa4": "#bcbd22",
    "flex_fixed": "#0b5d66",
    "fa4_fixed": "#6b6c12",
    "xformers": "#5254a3",
}
"""Those of ``configs/attn/``. The first six are the README's, and told apart by colour-blind readers, too: Okabe & Ito
(2008), warm where a loss explodes, cold where it holds."""

_ENGINES = {
    "flash": "#393b79",
    "baseline": "#b114ff",
}
"""Engines of ``flashpoint deviation`` that are no variants, by tones that no variant has."""


def colour(name: str) -> str:
    """A variant's or engine's as ``#rrggbb``; black for one that is neither PyTorch's nor in ``configs/attn/``. The
    engine ``sdpa:flash`` is the variant ``sdpa_flash``."""
    return (_VARIANTS | _ENGINES).get(name.replace("sdpa:", "sdpa_"), "#000000")


HOTTEST_LAYER = "#d62728"
"""Of the layer with the largest W_Q: red, which no other layer's blue or green is for colour-blind readers either."""
_LAYER_DASHES = ("-", (0, (4, 1.5)), (0, (1, 0.8)))
"""Neighbours have colours too much alike for thin lines, so they differ in these."""


def layer_look(layer: int, n_layer: int, *, hottest: bool) -> dict[str, Any]:
    """Return how the curve of a layer, from 1, is drawn: from dark blue, the first, to light green, the last of six or
    more."""
    if hottest:
        return {"color": HOTTEST_LAYER, "linewidth": 2.5, "zorder": 3}
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    tone = to_hex(colormaps["YlGnBu"](1 - 0.65 * (layer - 1) / max(5, n_layer - 1)))  # lighter ones are lost on white
    return {"color": tone, "linewidth": 1.2, "linestyle": _LAYER_DASHES[(layer - 1) % len(_LAYER_DASHES)]}
