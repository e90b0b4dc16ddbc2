"""Every variant has a colour of its own. Colour-blind readers tell the README's apart, and the layers of a model."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from flashpoint.lab.report.colours import HOTTEST_LAYER, colour, layer_look
from tests.conftest import REPOSITORY

README_VARIANTS = ("flash_bf16", "flash_fp32", "sdpa", "flash_unrounded_out", "flash_exact_rowsum", "flash_fixed")
SIGHT = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What linear RGB becomes for the eye: Machado, Oliveira & Fernandes (2009), severity 1."""
_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]  # of linear sRGB
_WHITE = [0.9505, 1.0, 1.089]


def lab(tone: str, sight: str) -> np.ndarray:
    """CIELAB of a colour as an eye sees it."""
    srgb = np.array(to_rgb(tone))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.array(_XYZ) @ np.clip(np.array(SIGHT[sight]) @ linear, 0.01, 1) / _WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colours_differ_and_a_users_own_variant_is_black() -> None:
    names = [path.stem for path in (REPOSITORY / "configs/attn").glob("*.yaml")]
    assert len({colour(name) for name in [*names, "mine"]}) == len(names) + 1
    assert colour("mine") == "#000000"


@pytest.mark.parametrize("sight", SIGHT)
def test_the_readmes_variants_are_told_apart(sight: str) -> None:
    """2.3 is a just noticeable difference of two areas side by side; thin lines need several of them."""
    apart = {
        (a, b): np.linalg.norm(lab(colour(a), sight) - lab(colour(b), sight))
        for a, b in combinations([*README_VARIANTS, "mine"], 2)
    }
    assert min(apart.values()) > 10, min(apart, key=apart.__getitem__)


@pytest.mark.parametrize("sight", SIGHT)
def test_the_layers_of_gpt2_124m_are_told_apart_and_the_hottest_from_all(sight: str) -> None:
    looks = [layer_look(layer, 12, hottest=False) for layer in range(1, 13)]
    seen = [lab(look["color"], sight) for look in looks]
    for (a, one), (b, other) in combinations(enumerate(looks), 2):
        if one["linestyle"] == other["linestyle"]:
            assert np.linalg.norm(seen[a] - seen[b]) > 10, (a + 1, b + 1)
    assert (np.diff([lightness for lightness, _, _ in seen]) > 0).all()  # their order can be read, in print, too
    assert min(np.linalg.norm(lab(HOTTEST_LAYER, sight) - one) for one in seen) > 40
    assert min(np.linalg.norm(lab("#ffffff", sight) - one) for one in seen) > 20


@pytest.mark.parametrize("sight", SIGHT)
def test_baseline_attention_is_told_from_what_stands_beside_it(sight: str) -> None:
    baseline = lab(colour("baseline"), sight)
    apart = {name: np.linalg.norm(baseline - lab(colour(name), sight)) for name in [*README_VARIANTS, "flash", "mine"]}
    assert min(apart.values()) > 20, min(apart, key=apart.__getitem__)
