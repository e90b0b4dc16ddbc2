"""What the kernels compile to for chips that are not here, and how often one run compiles them; no GPU needed."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import REPOSITORY

COMPILE = str(REPOSITORY / "scripts/kernels/compile_kernels.py")


VARIANTS = ("flash_bf16", "standard", "flash_exact_rowsum", "flash_exact_rowsum_one_pass", "flash_fixed")


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of an H100, by kernel: what ``VARIANTS`` compile to, in their order; what two of them share is there once."""
    folder = tmp_path_factory.mktemp("assembly")
    compiled("sm_90", 64, *VARIANTS, "--assembly", str(folder))
    texts: dict[str, list[str]] = {}
    for file in sorted(folder.iterdir(), key=lambda file: int(file.stem.split("_")[2])):
        texts.setdefault(file.stem.split("_", 3)[-1], []).append(file.read_text())
    return texts


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kernels_compile_with_products_on_the_matrix_units(assembly: dict[str, list[str]]) -> None:
    """A product of 64 features or keys takes four instructions, 16 deep each; tiles below the diagonal and on it are
    two loops."""
    instructions = {kernel: [text.count("wgmma.mma_async") for text in texts] for kernel, texts in assembly.items()}
    # QKᵀ and P̄V; of standard attention in one loop QKᵀ for the maximum, for ℓ and for P, and PV.
    assert instructions["flash_fwd_kernel"] == [2 * 2 * 4, 4 * 4, 2 * 2 * 4]
    # QKᵀ, dO·Vᵀ and dS·K; with exact row sums the first two for δ before, or PK beside them in one pass.
    assert set(instructions["flash_bwd_dq_kernel"]) == {2 * 3 * 4, 2 * 5 * 4, 2 * 4 * 4}
    # By 32 queries: KQᵀ and V·dOᵀ, four instructions each, dV and dK, two each.
    assert set(instructions["flash_bwd_dkdv_kernel"]) == {2 * (2 * 4 + 2 * 2)}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_residual_is_a_byte_an_element_beside_two_of_o(assembly: dict[str, list[str]]) -> None:
    """64 × 64 elements of a program in words of 16 bytes, one for each of 128 threads at a time; L comes singly."""
    plain, *_, with_residual = (text.count("st.global.v4.b32") for text in assembly["flash_fwd_kernel"])
    assert plain == 64 * 64 * 2 / (16 * 128)
    assert with_residual == 64 * 64 * (2 + 1) / (16 * 128)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kernels_fit_chips_that_are_not_here() -> None:
    """The largest heads, on one chip of each kind: 8.0 and 8.9 have the code of 8.6, and no less memory."""
    for row in compiled("sm_86 sm_100 sm_120 gfx942", 128, "flash_bf16"):
        assert row["kernels"] == 3
        assert max(row[f"{kernel}, KiB"] for kernel in ("forward", "dQ", "dK, dV")) <= row["shared memory, KiB"] * 1024


def compiled(chips: str, size: int, *arguments: str) -> list[dict[str, Any]]:
    """The rows of the script's table."""
    printed = not_interpreted(
        COMPILE, "--chips", *chips.split(), "--sizes", str(size), "--format", "json", "--variants", *arguments
    )
    rows: list[dict[str, Any]] = json.loads(printed)["tables"][0]["rows"]
    return rows


@pytest.mark.slow
def test_all_layers_and_batch_sizes_share_one_compilation() -> None:
    counts = json.loads(not_interpreted("-m", "tests.numerics.compilations"))
    assert counts == dict.fromkeys(
        ("center_keys_kernel", "flash_fwd_kernel", "flash_bwd_dq_kernel", "flash_bwd_dkdv_kernel"), 1
    )


def not_interpreted(*arguments: str) -> str:
    """What Python prints where Triton compiles; without its optimisations NVIDIA's assembler takes longer."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout
