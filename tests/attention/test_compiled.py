"""The kernels compile for compute capability 9.0, with their products on the matrix units; no GPU needed."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.parametrize(
    ("kernel", "variant", "instructions"),
    [
        # A product of 64 features or keys takes four instructions, 16 deep each; tiles below the diagonal and on it
        # are two loops. QKᵀ and P̄V:
        ("forward", "flash_bf16", 2 * 2 * 4),
        # One loop: QKᵀ for the maximum, for ℓ and for P, and PV.
        ("forward", "standard", 4 * 4),
        # QKᵀ and dO·Vᵀ for δ, both again for dS, and dS·K.
        ("grad_q", "flash_exact_rowsum", 2 * 5 * 4),
        # By 32 queries: KQᵀ and V·dOᵀ, four instructions each, dV and dK, two each.
        ("grad_kv", "flash_bf16", 2 * (2 * 4 + 2 * 2)),
    ],
)
def test_kernels_compile_with_products_on_the_matrix_units(kernel: str, variant: str, instructions: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.attention.compiled", kernel, variant]
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("wgmma.mma_async") == instructions
