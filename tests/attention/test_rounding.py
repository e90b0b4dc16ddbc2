"""Rounding to BF16 against ml_dtypes, against enumeration, and against published random numbers."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from flashpoint.attention.rounding import NoiseKey, philox4x32, round_bf16

EVERY_OFFSET = torch.arange(1 << 16)


def floats(patterns: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(patterns.astype(np.uint32).view(np.float32).copy())


def bits_of(x: torch.Tensor) -> np.ndarray:
    return x.numpy().view(np.uint32)


@pytest.mark.parametrize("lower", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_nearest_even_equals_ml_dtypes_on_every_upper_half(lower: int) -> None:
    x = floats((np.arange(1 << 16, dtype=np.uint32) << 16) | lower)
    rounded = round_bf16(x, "nearest")
    with np.errstate(invalid="ignore"):
        expected = x.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
    number = ~np.isnan(x.numpy())
    np.testing.assert_array_equal(bits_of(rounded)[number], expected.view(np.uint32)[number])
    assert rounded[torch.from_numpy(~number)].isnan().all()


def test_no_rounding_is_the_identity() -> None:
    x = torch.randn(100)
    assert torch.equal(round_bf16(x, "none"), x)


@pytest.mark.parametrize(
    "pattern", [0x3F804000, 0x3FFFFFFF, 0x40490FDB, 0x00012345, 0xBF812345, 0xC07F8001, 0x7F7E1234]
)
def test_stochastic_rounding_goes_up_for_exactly_the_discarded_share_of_offsets(pattern: int) -> None:
    x = floats(np.full(1 << 16, pattern))
    rounded = bits_of(round_bf16(x, "stochastic", EVERY_OFFSET))
    down, up = pattern & 0xFFFF0000, (pattern & 0xFFFF0000) + 0x10000
    assert set(np.unique(rounded)) == {down, up}
    assert (rounded == up).sum() == pattern & 0xFFFF


@pytest.mark.parametrize("pattern", [0x00000000, 0x80000000, 0x3F800000, 0xC0490000, 0x7F7F0000, 0x00010000])
def test_stochastic_rounding_keeps_every_bf16_value(pattern: int) -> None:
    x = floats(np.full(1 << 16, pattern))
    assert (bits_of(round_bf16(x, "stochastic", EVERY_OFFSET)) == pattern).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_stochastic_rounding_keeps_what_is_no_number(value: float) -> None:
    x = torch.full((1 << 16,), value)
    assert torch.equal(round_bf16(x, "stochastic", EVERY_OFFSET).nan_to_num(7.0), x.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers of Random123, kat_vectors, philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter: tuple, key: tuple, expected: tuple) -> None:
    words = philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))  # type: ignore[arg-type]
    assert tuple(word.item() for word in words) == expected


def key(seed: int = 1, step: int = 2, layer: int = 3, first_head: int = 0) -> NoiseKey:
    return NoiseKey(torch.tensor([seed, step]), layer, torch.arange(first_head, first_head + 2), 8, 1)


ROWS, COLUMNS = torch.arange(40)[:, None], torch.arange(16)[None]


def test_every_part_of_the_key_makes_other_bits() -> None:
    streams = [
        key().bits("out", ROWS, COLUMNS),
        key(seed=4).bits("out", ROWS, COLUMNS),
        key(step=4).bits("out", ROWS, COLUMNS),
        key(layer=4).bits("out", ROWS, COLUMNS),
        key(first_head=2).bits("out", ROWS, COLUMNS),
        key().bits("probs", ROWS, COLUMNS),
        key().bits("out", ROWS, COLUMNS, block=1),
        key().bits("out", ROWS + 40, COLUMNS),
        key().bits("out", ROWS, COLUMNS + 16),
    ]
    for one, other in itertools.combinations(streams, 2):
        assert (one == other).float().mean() < 0.01
    assert min(bits.min() for bits in streams) >= 0
    assert max(bits.max() for bits in streams) < 1 << 16


def test_bits_belong_to_positions_not_to_tiles() -> None:
    whole = key().bits("scores", ROWS, COLUMNS)
    part = key().bits("scores", ROWS[10:25], COLUMNS[:, 4:9])
    assert torch.equal(whole[..., 10:25, 4:9], part)


def test_bits_are_uniform() -> None:
    bits = key().bits("out", torch.arange(500)[:, None], torch.arange(64)[None]).flatten().double()
    assert bits.mean().item() == pytest.approx(32767.5, abs=5 * 18918 / len(bits) ** 0.5)
    counts = torch.histc(bits, 256, 0, 65536)
    chi_squared = ((counts - len(bits) / 256) ** 2 / (len(bits) / 256)).sum().item()
    assert 160 < chi_squared < 370  # 255 degrees of freedom: mean 255, standard deviation 22.6
