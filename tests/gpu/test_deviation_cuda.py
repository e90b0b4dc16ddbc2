"""``flashpoint deviation`` on a GPU: every engine against FP64, long sequences in little memory, the whole preset."""

from pathlib import Path

import pytest
import torch

from flashpoint.lab.deviation.arithmetic import arithmetic
from flashpoint.lab.deviation.drawn_inputs import drawn
from flashpoint.lab.deviation.emulated import Block, flash, golden
from flashpoint.lab.deviation.formats import BF16
from tests.records import call, values

pytestmark = pytest.mark.gpu
LONG = 16_384
OWN = """
import torch
def attention(q, k, v, is_causal):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
"""
KERNELS = ("flash_bf16", "flash_fp32", "flash_exact_rowsum", "standard", "released", "released_fixed")
BACKENDS = ("sdpa:math", "sdpa:flash", "sdpa:efficient", "sdpa:cudnn")


@pytest.mark.parametrize("engine", [*KERNELS, *BACKENDS, "sdpa", "own"])
@pytest.mark.parametrize("mask", ["--causal", "--no-causal"])
def test_every_engine_is_within_twice_the_deviation_that_the_emulation_foretells(
    engine: str, mask: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    word = f"{tmp_path / 'own.py'}:attention" if engine == "own" else engine
    small = ("--length", "512", "--seeds", "4", "--of", "O,dQ,dK,dV", mask, "--device", "cuda")
    found = {(row["difference"], row["of"]): row["RMS"] for row in values("deviation", word, "baseline", *small)}
    for quantity in ("O", "dQ", "dK", "dV"):
        assert found[f"{word} − golden", quantity] < 2 * found["baseline − golden", quantity]


def test_the_emulation_is_that_of_a_cpu() -> None:
    """Up to exp, whose last bit in FP64 may differ and seldom decides a rounding."""
    compute = arithmetic(BF16, "within")
    on_cpu = drawn("normal", 2, 256, 64).map(compute.round)
    on_cuda = on_cpu.map(lambda x: x.cuda())
    results = [
        (
            flash(inputs, compute, Block(64, 32), causal=True, backward=True).values,
            golden(inputs, 1 << 14, causal=True, backward=True).values,
        )
        for inputs in (on_cpu, on_cuda)
    ]
    for expected, found in zip(*results, strict=True):
        for name, value in expected.items():
            error = (found[name].cpu() - value).square().mean().sqrt()
            assert error < 1e-3 * value.square().mean().sqrt(), name


def test_the_golden_value_of_a_long_sequence_holds_no_matrix_of_all_scores() -> None:
    inputs = drawn("normal", 1, LONG, 64).map(lambda x: x.cuda())
    torch.cuda.reset_peak_memory_stats()
    golden(inputs, 1 << 22, causal=True, backward=True)
    assert torch.cuda.max_memory_allocated() < 8 * LONG**2 / 4


@pytest.mark.parametrize("engine", ["flash_bf16", "flash_fp32", "sdpa:flash", "flash"])
def test_flash_engines_of_a_long_sequence_hold_no_matrix_of_all_scores(engine: str) -> None:
    torch.cuda.reset_peak_memory_stats()
    arguments = ("--length", str(LONG), "--seeds", "1", "--of", "O,dQ", "--unit", "relative", "--device", "cuda")
    found = values("deviation", engine, *arguments)
    assert all(row["not finite"] == 0 and row["RMS"] < 0.05 for row in found)
    assert torch.cuda.max_memory_allocated() < 2 * LONG**2  # a matrix in BF16


@pytest.mark.slow
def test_the_preset_of_a_gpu_draws_every_figure(tmp_path: Path) -> None:
    result = call("deviation", "--preset", "gpu", "--figures", tmp_path)
    assert result.returncode == 0, result.stderr
    names = ("precision", "precision_golden", "length", "block", "kernels", "kernels_length")
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == sorted(names)
