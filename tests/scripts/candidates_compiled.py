"""``python -m tests.scripts.candidates_compiled``: what kernels with groups of warps take of a
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

from benchmarks.candidates import CANDIDATES, inputs
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
    kernels: list[Any] = []

    def keep(name: str, kernel: Any) -> compile_kernels.Compiled:
        kernels.append(kernel)
        return _taken(name, kernel)

    told = {}
    with patch.object(compile_kernels, "_taken", keep), compile_kernels.compiling_for("sm_90"):
        for size in (128, 64):
            of = inputs((1, 2, 1024, size), "cpu")
            for name, candidate in CANDIDATES.items():
                # The others are the package's kernels; those with a program for each block are compiled already.
                if size in candidate.sizes and re.match(
                    r"(fwd-(turns|no-turns|3)|.*groups|bwd-one)(?!.*a-block)", name
                ):
                    candidate.run(of)
                    largest = max(kernels, key=lambda kernel: int(kernel.metadata.shared))
                    told[f"{name} {size}"] = taken(largest)
                    kernels.clear()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
