"""``python -m tests.numerics.warp_groups_compiled``: what the kernels of ``flash_fixed`` with 128 features take of a
Hopper GPU, as JSON; no GPU needed.

A process of its own, since Triton's interpreter, once chosen, holds for all kernels.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from kernels import compile_kernels

_taken = compile_kernels._taken


def taken(kernel: Any) -> dict[str, int]:
    """By what is counted; waits are those for products on the matrix units, in machine code and as written."""
    found = _taken("", kernel)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "shared": found.shared, "spilled": found.spilled, "waits": code.count("WARPGROUP.DEPBAR"),
        "waits written": len(re.findall(r"wgmma\.wait_group", kernel.asm["ptx"])),
    }  # fmt: skip


def main() -> None:
    told = {}

    def keep(name: str, kernel: Any) -> compile_kernels.Compiled:
        told[name] = taken(kernel)
        return _taken(name, kernel)

    with patch.object(compile_kernels, "_taken", keep), compile_kernels.compiling_for("sm_90"):
        compile_kernels.launch_both_passes(compile_kernels.variants()["flash_fixed"], 128)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
