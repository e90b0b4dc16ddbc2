"""What the kernels compile to for compute capability 9.0, and how often one run compiles them; no GPU needed."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "variant", "instructions"),
    [
        # A product of 64 features or keys takes four instructions, 16 deep each; tiles below the diagonal and on it
        # are two loops. QKᵀ and P̄V:
        ("flash_fwd", "flash_bf16", 2 * 2 * 4),
        # One loop: QKᵀ for the maximum, for ℓ and for P, and PV.
        ("flash_fwd", "standard", 4 * 4),
        # QKᵀ and dO·Vᵀ for δ, both again for dS, and dS·K.
        ("flash_bwd_dq", "flash_exact_rowsum", 2 * 5 * 4),
        # QKᵀ and dO·Vᵀ once, dS·K, and PK.
        ("flash_bwd_dq", "flash_exact_rowsum_one_pass", 2 * 4 * 4),
        # By 32 queries: KQᵀ and V·dOᵀ, four instructions each, dV and dK, two each.
        ("flash_bwd_dkdv", "flash_bf16", 2 * (2 * 4 + 2 * 2)),
    ],
)
def test_kernels_compile_with_products_on_the_matrix_units(kernel: str, variant: str, instructions: int) -> None:
    assert not_interpreted("tests.numerics.compiled", kernel, variant).count("wgmma.mma_async") == instructions


@pytest.mark.slow
def test_a_residual_is_a_byte_an_element_beside_two_of_o() -> None:
    """64 × 64 elements of a program in words of 16 bytes, one for each of 128 threads at a time; L comes singly."""
    text = not_interpreted("tests.numerics.compiled", "flash_fwd", "flash_fp32_delta_split")
    assert text.count("st.global.v4.b32") == 64 * 64 * (2 + 1) / (16 * 128)


def test_all_layers_and_batch_sizes_share_one_compilation() -> None:
    counts = json.loads(not_interpreted("tests.numerics.compilations"))
    assert counts == dict.fromkeys(
        ("center_keys_kernel", "flash_fwd_kernel", "flash_bwd_dq_kernel", "flash_bwd_dkdv_kernel"), 1
    )


def not_interpreted(module: str, *arguments: str) -> str:
    """What a module prints where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
