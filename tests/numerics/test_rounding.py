"""Rounding against ml_dtypes, against FP64, against enumeration, and against published random numbers."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from flashpoint.numerics.choices import NEAREST, STOCHASTIC, UNROUNDED, Mode, Rounding
from flashpoint.numerics.rounding import NoiseKey, philox4x32, round_mantissa
from flashpoint_kernels.codes import Stream
from flashpoint_kernels.rounding import round_nearest, round_stochastic
from tests.numerics.oracle import with_mantissa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERY_OFFSET = torch.arange(1 << 16) << 16


def floats(patterns: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(patterns.astype(np.uint32).view(np.float32).copy())


def bits_of(x: torch.Tensor) -> np.ndarray:
    return x.numpy().view(np.uint32)


@pytest.mark.parametrize("lower", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_nearest_even_equals_ml_dtypes_on_every_upper_half(lower: int) -> None:
    x = floats((np.arange(1 << 16, dtype=np.uint32) << 16) | lower)
    rounded = round_mantissa(x, NEAREST)
    with np.errstate(invalid="ignore"):
        expected = x.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
    number = ~np.isnan(x.numpy())
    np.testing.assert_array_equal(bits_of(rounded)[number], expected.view(np.uint32)[number])
    assert rounded[torch.from_numpy(~number)].isnan().all()


def test_no_rounding_is_the_identity() -> None:
    x = torch.randn(100)
    assert torch.equal(round_mantissa(x, UNROUNDED), x)


@pytest.mark.parametrize(
    "pattern", [0x3F804000, 0x3FFFFFFF, 0x40490FDB, 0x00012345, 0xBF812345, 0xC07F8001, 0x7F7E1234]
)
def test_stochastic_rounding_goes_up_for_exactly_the_discarded_share_of_offsets(pattern: int) -> None:
    x = floats(np.full(1 << 16, pattern))
    rounded = bits_of(round_mantissa(x, STOCHASTIC, noise=EVERY_OFFSET))
    down, up = pattern & 0xFFFF0000, (pattern & 0xFFFF0000) + 0x10000
    assert set(np.unique(rounded)) == {down, up}
    assert (rounded == up).sum() == pattern & 0xFFFF


@pytest.mark.parametrize("pattern", [0x00000000, 0x80000000, 0x3F800000, 0xC0490000, 0x7F7F0000, 0x00010000])
def test_stochastic_rounding_keeps_every_bf16_value(pattern: int) -> None:
    x = floats(np.full(1 << 16, pattern))
    assert (bits_of(round_mantissa(x, STOCHASTIC, noise=EVERY_OFFSET)) == pattern).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_stochastic_rounding_keeps_what_is_no_number(value: float) -> None:
    x = torch.full((1 << 16,), value)
    assert torch.equal(round_mantissa(x, STOCHASTIC, noise=EVERY_OFFSET).nan_to_num(7.0), x.nan_to_num(7.0))


FORMATS = range(1, 11)


def normal_numbers() -> torch.Tensor:
    """Every exponent of a normal float, both signs, mantissas that include every tie of up to 10 bits."""
    mantissas = np.r_[np.arange(1 << 12) << 11, (np.arange(1 << 12) << 11) + 1, (np.arange(1, 1 << 12) << 11) - 1]
    exponents = np.array([1, 2, 90, 126, 127, 128, 200, 253])
    patterns = (exponents[:, None] << 23 | mantissas[None, :]).ravel()
    return floats(np.r_[patterns, patterns | 1 << 31])


@pytest.mark.parametrize("bits", FORMATS)
def test_nearest_even_equals_rint_in_fp64_in_every_format(bits: int) -> None:
    x = normal_numbers()
    expected = with_mantissa(x.numpy(), bits)
    np.testing.assert_array_equal(bits_of(round_mantissa(x, Rounding("nearest", bits))), expected.view(np.uint32))


@pytest.mark.parametrize(
    ("dtype", "bits", "low", "high"),
    [
        (ml_dtypes.float4_e2m1fn, 1, 1.0, 6.0),
        (ml_dtypes.float8_e5m2, 2, 2.0**-14, 57344.0),
        (ml_dtypes.float8_e4m3fn, 3, 2.0**-6, 448.0),
        (ml_dtypes.float8_e3m4, 4, 0.25, 15.5),
        (ml_dtypes.bfloat16, 7, 2.0**-126, 3e38),
        (np.float16, 10, 2.0**-14, 65504.0),
    ],
)
def test_nearest_even_equals_the_small_formats_of_ml_dtypes_and_numpy(
    dtype: type, bits: int, low: float, high: float
) -> None:
    """Within the range of a format with as many bits of mantissa and fewer of exponent."""
    x = np.concatenate([np.linspace(low, min(high, 64 * low), 40_000), np.geomspace(low, high, 40_000)])
    x = x.clip(low, high).astype(np.float32)
    x = np.concatenate([x, -x])
    rounded = round_mantissa(torch.from_numpy(x), Rounding("nearest", bits))
    np.testing.assert_array_equal(rounded.numpy(), x.astype(dtype).astype(np.float32))


def test_ties_and_overflow_by_hand() -> None:
    patterns = {1: (0x3FA00000, 0x3F800000), 2: (0x3FB00000, 0x3FC00000), 10: (0x3F803000, 0x3F804000)}
    for bits, (tie, even) in patterns.items():  # 1.25, 1.375 and 1 + 3·2⁻¹¹
        for sign in (0, 1 << 31):
            assert bits_of(round_mantissa(floats(np.array([tie | sign])), Rounding("nearest", bits))) == even | sign
    largest = floats(np.array([0x7F7FFFFF, 0xFF7FFFFF]))
    assert round_mantissa(largest, Rounding("nearest", 3)).tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 0.0, -0.0])
def test_every_format_keeps_infinities_nan_and_zeros(bits: int, value: float) -> None:
    x = torch.full((64,), value)
    words = torch.randint(0, 1 << 32, (64,), generator=torch.Generator().manual_seed(bits))
    for rounded in (
        round_mantissa(x, Rounding("nearest", bits)),
        round_mantissa(x, Rounding("stochastic", bits), words),
    ):
        np.testing.assert_array_equal(rounded.numpy(), x.numpy())
        assert torch.equal(rounded.signbit(), x.signbit()) or np.isnan(value)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 3, 6, 8, 10])
@pytest.mark.parametrize("pattern", [0x3F804321, 0xC0490FDB, 0x007FFFFF])
def test_stochastic_rounding_goes_up_for_exactly_the_discarded_share_in_every_format(bits: int, pattern: int) -> None:
    discarded = 23 - bits
    every_offset = torch.arange(1 << discarded) << 9 + bits
    noise = every_offset | 0x1FF  # what lies below is not looked at
    rounded = bits_of(round_mantissa(floats(np.full(1 << discarded, pattern)), Rounding("stochastic", bits), noise))
    share = pattern & ((1 << discarded) - 1)
    down = pattern - share
    assert set(np.unique(rounded)) == {down, down + (1 << discarded)}
    assert (rounded == down + (1 << discarded)).sum() == share


@triton.jit
def round_kernel(x_ptr, noise_ptr, out_ptr, STOCHASTIC: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    if STOCHASTIC:
        noise = tl.load(noise_ptr + offsets).to(tl.uint32)
        x = round_stochastic(x, noise, BITS)
    else:
        x = round_nearest(x, BITS)
    tl.store(out_ptr + offsets, x)


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_the_kernels_round_as_pytorch_does_in_every_format(mode: Mode, bits: int) -> None:
    specials = torch.tensor([np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-45, 3.4e38, -3.4e38])
    x = torch.cat([normal_numbers()[:: 3 * 64 + 1], specials])
    x = torch.cat([x, x.new_ones(-len(x) % 1024)])
    noise = torch.randint(0, 1 << 32, x.shape, generator=torch.Generator().manual_seed(bits))
    expected = round_mantissa(x, Rounding(mode, bits), noise)
    out = torch.empty_like(x, device=DEVICE)
    grid = (len(x) // 1024,)
    round_kernel[grid](x.to(DEVICE), noise.to(DEVICE), out, mode == "stochastic", bits, 1024)
    np.testing.assert_array_equal(bits_of(out.cpu()), bits_of(expected))


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


def test_every_part_of_the_key_makes_other_words() -> None:
    streams = [
        key().words(Stream.OUT, ROWS, COLUMNS),
        key(seed=4).words(Stream.OUT, ROWS, COLUMNS),
        key(step=4).words(Stream.OUT, ROWS, COLUMNS),
        key(layer=4).words(Stream.OUT, ROWS, COLUMNS),
        key(first_head=2).words(Stream.OUT, ROWS, COLUMNS),
        key().words(Stream.PROBS, ROWS, COLUMNS),
        key().words(Stream.OUT, ROWS, COLUMNS, block=1),
        key().words(Stream.OUT, ROWS + 40, COLUMNS),
        key().words(Stream.OUT, ROWS, COLUMNS + 16),
    ]
    for one, other in itertools.combinations(streams, 2):
        assert (one == other).float().mean() < 0.01
    assert min(words.min() for words in streams) >= 0
    assert max(words.max() for words in streams) < 1 << 32


def test_words_belong_to_positions_not_to_tiles() -> None:
    whole = key().words(Stream.SCORES, ROWS, COLUMNS)
    part = key().words(Stream.SCORES, ROWS[10:25], COLUMNS[:, 4:9])
    assert torch.equal(whole[..., 10:25, 4:9], part)


def test_words_are_uniform() -> None:
    words = key().words(Stream.OUT, torch.arange(500)[:, None], torch.arange(64)[None]).flatten()
    for bits in (words >> 16, words & 0xFFFF):
        assert_uniform(bits.double())


def assert_uniform(bits: torch.Tensor) -> None:
    assert bits.mean().item() == pytest.approx(32767.5, abs=5 * 18918 / len(bits) ** 0.5)
    counts = torch.histc(bits, 256, 0, 65536)
    chi_squared = ((counts - len(bits) / 256) ** 2 / (len(bits) / 256)).sum().item()
    assert 160 < chi_squared < 370  # 255 degrees of freedom: mean 255, standard deviation 22.6
