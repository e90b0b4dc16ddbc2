"""``python -m tests.numerics.compiled KERNEL VARIANT``: PTX of one kernel for compute capability 9.0, no GPU needed.

A process of its own, since Triton's interpreter, once chosen, holds for all kernels.
"""

import sys
from pathlib import Path
from typing import Any

import triton
import yaml
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashpoint.numerics.compile_time import compile_time_choices, launch_options
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels.flash_bwd import flash_bwd_dkdv_kernel, flash_bwd_dq_kernel
from flashpoint_kernels.flash_fwd import flash_fwd_kernel
from flashpoint_kernels.tile_sizes import FLASH_BWD_DKDV, FLASH_BWD_DQ, FLASH_FWD, TileSizes

KERNELS = {
    "flash_fwd": (flash_fwd_kernel, FLASH_FWD[64]),
    "flash_bwd_dq": (flash_bwd_dq_kernel, FLASH_BWD_DQ[64]),
    "flash_bwd_dkdv": (flash_bwd_dkdv_kernel, FLASH_BWD_DKDV[64]),
}
CONFIGS = Path(__file__).parents[2] / "configs/attn"
SIZES = ("B", "H", "T", "T_ROWS", "PLANE", "DRIFTS", "GROUP")
POINTERS = {"o_ptr": "*bf16", "dq_ptr": "*bf16", "dk_ptr": "*bf16", "dv_ptr": "*bf16", "noise_ptr": "*i64"}
POINTERS |= {"ones_ptr": "*i32", "selected_ptr": "*i32"}
QUERIES = ("q_desc", "do_desc")
LENGTH = 2048


def ptx(kernel: str, name: str) -> str:
    """As training launches it on ``ignite``, heads of 64 features."""
    function, sizes = KERNELS[kernel]
    variant = AttentionVariant.from_dict(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))
    block = (variant.block_k or LENGTH) // sizes.bk if kernel == "flash_fwd" else 1
    choices = compile_time_choices(variant, 2, 64**-0.5, tiles_per_block=block)
    constants: dict[str, Any] = {"D": 64, "BQ": sizes.bq, "BK": sizes.bk, "C": choices, "ELSEWHERE": None}
    constants |= {"PAIRS": True, "STATISTICS": False} if kernel == "flash_fwd" else {}
    types = {name: _type(name, sizes) for name in function.arg_names}
    if variant.out_residual and "o_delta_ptr" in types:
        types["o_delta_ptr"] = f"*i{8 * variant.out_residual.n_bytes}"
    # A launch finds these out of the values: they decide how many bytes a store writes.
    aligned = [name for name in types if name.endswith("_ptr") or name in ("H", "T", "T_ROWS", "PLANE")]
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(function, types, constants, attributes)
    options = {
        name: value
        for name, value in launch_options(sizes, kernel == "flash_bwd_dq" and variant.corrects_in_one_pass).items()
        if value is not None
    }
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return text


def _type(name: str, sizes: TileSizes) -> str:
    if name.endswith("_desc"):
        return f"tensordesc<bf16[1, 1, {sizes.bq if name in QUERIES else sizes.bk}, 64]>"
    if name.endswith("_ptr"):
        return POINTERS.get(name, "*fp32")
    return "constexpr" if name.isupper() and name not in SIZES else "i32"


if __name__ == "__main__":
    print(ptx(*sys.argv[1:]))
