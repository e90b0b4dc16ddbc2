"""Compile the kernels for chips that are not here, and print what they take of each: no GPU needed.

    python scripts/kernels/compile_kernels.py [--chips sm_80 …] [--sizes 64 …] [--variants flash_bf16 …]

Without options every chip, head size and variant, in about half an hour of one core. The launches are training's but
for the driver, which names another chip, and what is launched. Kernels that several variants share are compiled once.

The exit status is 1 if a kernel does not compile, or takes more than its chip has.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from flashpoint.cli.table import FORMATS, Cell, Table, show
from flashpoint.files import CONFIGS
from flashpoint.hardware import capability
from flashpoint.numerics import launch
from flashpoint.numerics.named import variant_named, variant_names
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels.rounding import INTERPRETED
from flashpoint_kernels.tile_sizes import FALLBACK

SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
"""Shared memory that a program may take: NVIDIA's CUDA Programming Guide, "Technical Specifications per Compute
Capability", and AMD's CDNA 3 Instruction Set Architecture."""
TENSOR_MEMORY_COLUMNS = 512
"""Of compute capability 10.0; Triton names no kernel's need elsewhere."""
LENGTH = 2048
KERNELS = {
    "flash_fwd_kernel": "forward",
    "hopper_fwd_kernel": "forward",
    "flash_bwd_dq_kernel": "dQ",
    "hopper_dq_kernel": "dQ",
    "row_deltas_kernel": "dQ",
    "flash_bwd_dkdv_kernel": "dK, dV",
    "hopper_dkdv_kernel": "dK, dV",
    "center_keys_kernel": "centring",
}
COLUMNS = list(dict.fromkeys(KERNELS.values()))


@dataclass(frozen=True)
class Compiled:
    """What one kernel takes of its chip."""

    kernel: str
    shared: int
    """Bytes of a program."""
    tensor_memory: int
    """Columns."""
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread's stack, which lies in global memory."""

    def excess(self, chip: str) -> str | None:
        """Return what it takes too much of, None if it fits."""
        if self.shared > SHARED_KIB[chip] * 1024:
            return f"{self.shared:,} bytes of shared memory, of {SHARED_KIB[chip] * 1024:,}"
        if self.tensor_memory > TENSOR_MEMORY_COLUMNS:
            return f"{self.tensor_memory} columns of tensor memory, of {TENSOR_MEMORY_COLUMNS}"
        return None


class SeenBefore(Exception):
    """Another variant has compiled the same program."""


class Compiler:
    """Takes the place of Triton's: compiles for one chip and keeps what a launch would have loaded.

    Args:
        assembly: folder for PTX or AMD's assembly, one file a kernel; None writes none.
    """

    def __init__(self, chip: str, assembly: Path | None) -> None:
        self.chip, self.found, self._assembly = chip, list[Compiled](), assembly
        self._compile, self._seen = triton.compiler.compile, set[str]()

    def __call__(self, source: Any, target: GPUTarget, options: dict[str, Any], **rest: Any) -> MagicMock:
        try:
            kernel = self._compile(source, target=target, options=options, **rest)
        except SeenBefore:
            return MagicMock()
        self.found.append(_taken(source.name, kernel))
        if self._assembly:
            text = kernel.asm["ptx" if target.backend == "cuda" else "amdgcn"]
            (self._assembly / f"{self.chip}_{len(self.found)}_{source.name}.txt").write_text(text)
        return MagicMock()

    def inspect(self, _backend: Any = None, stages: Any = None, options: Any = None, *_: Any) -> tuple[str, str] | None:
        """Triton's hook between the stages: stop before the second if the first has made this program before."""
        if stages is None:  # it asks for a key of the cache
            return "", ""
        following = stages["ttgir"]

        def once(module: Any, metadata: Any) -> Any:
            program = re.sub(r" loc\(.*?\)$|^#loc.*$", "", str(module), flags=re.MULTILINE)
            digest = hashlib.sha256(f"{options}\n{program}".encode()).hexdigest()
            if digest in self._seen:
                raise SeenBefore
            self._seen.add(digest)
            return following(module, metadata)

        stages["ttgir"] = once
        return None


@contextmanager
def compiling_for(chip: str, assembly: Path | None = None) -> Iterator[Compiler]:
    """Launches on tensors of the CPU compile for ``chip`` and run nothing."""
    number = capability(chip)
    driver = MagicMock()
    driver.get_current_target.return_value = GPUTarget("cuda", number, 32) if number else GPUTarget("hip", chip, 64)
    compiler = Compiler(chip, assembly)
    driver.get_current_device.return_value = compiler  # a kernel keeps the compiler of each device
    triton.runtime.driver.set_active(driver)
    triton.knobs.runtime.add_stages_inspection_hook = compiler.inspect
    with (
        # An empty cache: what is found there does not pass between the stages.
        tempfile.TemporaryDirectory() as triton.knobs.cache.dir,
        patch.object(triton.compiler, "compile", compiler),
        patch.object(launch, "chip_of", return_value=chip),
    ):
        yield compiler


def launch_both_passes(variant: AttentionVariant, head_size: int) -> None:
    """As training launches them in layer 2."""
    # As the model cuts them out of one projection.
    q, k, v = torch.zeros(1, LENGTH, 3, 2, head_size, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4).unbind(0)
    context: dict[str, Any] = {"layer": 2, "seed_and_step": torch.zeros(2, dtype=torch.int64)}
    saved = launch.flash_fwd(q, k, v, variant, **context)
    launch.flash_bwd(torch.zeros_like(q), q, k, v, *saved, variant, **context)


def variants() -> dict[str, AttentionVariant]:
    """Return the variants of ``configs/attn/`` that have kernels."""
    folder = CONFIGS / "attn"
    found = {name: variant_named(name, folder) for name in variant_names(folder)}
    return {name: variant for name, variant in found.items() if variant.kernel != "sdpa"}


def _taken(name: str, kernel: Any) -> Compiled:
    if "cubin" in kernel.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, spilled = re.findall(r"REG:(\d+) STACK:(\d+)", told)[0]
    else:
        told = kernel.asm["amdgcn"]
        (registers,) = re.findall(r"\.vgpr_count: +(\d+)", told)
        (spilled,) = re.findall(r"\.private_segment_fixed_size: +(\d+)", told)
    tensor_memory = getattr(kernel.metadata, "tmem_size", None) or 0
    return Compiled(name, kernel.metadata.shared, tensor_memory, int(registers), int(spilled))


def row(chip: str, head_size: int, found: list[Compiled]) -> list[Any]:
    """Return the most that any variant takes."""
    shared = [max((one.shared for one in found if KERNELS[one.kernel] == kernel), default=None) for kernel in COLUMNS]
    cells = [Cell(size, f"{size / 1024:.0f}") if size is not None else None for size in shared]
    most = (max(one.registers for one in found), max(one.spilled for one in found))
    return [chip, SHARED_KIB[chip], head_size, *cells, *most, len(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=SHARED_KIB, default=list(SHARED_KIB), metavar="CHIP")
    parser.add_argument("--sizes", nargs="+", type=int, choices=FALLBACK, default=list(FALLBACK), metavar="SIZE")
    known = variants()
    parser.add_argument("--variants", nargs="+", choices=known, default=list(known), metavar="NAME")
    parser.add_argument("--assembly", type=Path, metavar="FOLDER", help="write each kernel's assembly here")
    parser.add_argument("--format", choices=FORMATS, default="markdown")
    arguments = parser.parse_args()
    if INTERPRETED:
        parser.error("TRITON_INTERPRET=1: the interpreter compiles nothing; unset it")
    rows, failures = [], []
    for chip, size in itertools.product(arguments.chips, arguments.sizes):
        with compiling_for(chip, arguments.assembly) as compiler:
            for name in arguments.variants:
                before = len(compiler.found)
                launch_both_passes(known[name], size)
                failures += [
                    f"{chip}, heads of {size}, {name}: {KERNELS[one.kernel]} takes {excess}"
                    for one in compiler.found[before:]
                    if (excess := one.excess(chip))
                ]
        rows.append(row(chip, size, compiler.found))
        print(f"{chip} {size}: {len(compiler.found)} kernels", file=sys.stderr)
    memory = [f"{kernel}, KiB" for kernel in COLUMNS]
    columns = ["chip", "shared memory, KiB", "d", *memory, "registers", "spilled bytes", "kernels"]
    heading = f"triton {triton.__version__}, {datetime.date.today()}; {len(arguments.variants)} variants"
    show(Table(columns, rows), arguments.format, heading)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
