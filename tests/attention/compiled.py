"""``python -m tests.attention.compiled KERNEL VARIANT``: PTX of one kernel for compute capability 9.0, no GPU needed.

A process of its own, since Triton's interpreter, once chosen, holds for all kernels.
"""

import sys
from pathlib import Path
from typing import Any

import triton
import yaml
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashpoint.attention import launch
from flashpoint.attention.variant import AttentionVariant
from flashpoint.kernels import backward, forward, table

KERNELS = {
    "forward": (forward.flash_fwd_kernel, table.FORWARD[64]),
    "grad_q": (backward.flash_bwd_dq_kernel, table.GRAD_Q[64]),
    "grad_kv": (backward.flash_bwd_dkdv_kernel, table.GRAD_KV[64]),
}
CONFIGS = Path(__file__).parents[2] / "configs/attn"
SIZES = ("B", "H", "T", "T_ROWS", "PLANE", "DRIFTS", "GROUP")
POINTERS = {"o_ptr": "*bf16", "dq_ptr": "*bf16", "dk_ptr": "*bf16", "dv_ptr": "*bf16", "noise_ptr": "*i64"}
POINTERS |= {"ones_ptr": "*i32", "selected_ptr": "*i32"}
QUERIES = ("q_tiles", "do_tiles")
LENGTH = 2048


def ptx(kernel: str, name: str) -> str:
    """As training launches it on ``ignite``, heads of 64 features."""
    function, tiles = KERNELS[kernel]
    variant = AttentionVariant.from_dict(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))
    block = (variant.block_k or LENGTH) // tiles.bk if kernel == "forward" else 1
    choices = launch._choices(variant, 2, 64, block)
    constants: dict[str, Any] = {"D": 64, "BQ": tiles.bq, "BK": tiles.bk, "C": choices, "ELSEWHERE": None}
    constants |= {"PAIRS": True, "STATISTICS": False} if kernel == "forward" else {}
    source = ASTSource(function, {name: _type(name, tiles) for name in function.arg_names}, constants)
    options = {name: value for name, value in launch._options(tiles).items() if value is not None}
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return text


def _type(name: str, tiles: table.Tiles) -> str:
    if name.endswith("_tiles"):
        return f"tensordesc<bf16[1, 1, {tiles.bq if name in QUERIES else tiles.bk}, 64]>"
    if name.endswith("_ptr"):
        return POINTERS.get(name, "*fp32")
    return "constexpr" if name.isupper() and name not in SIZES else "i32"


if __name__ == "__main__":
    print(ptx(*sys.argv[1:]))
