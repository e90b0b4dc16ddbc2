"""Settings under which the same run gives the same bits, and the environment they hold for."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flashpoint
import flashpoint_kernels
from flashpoint.hardware import chip_of, hardware_name
from flashpoint.lab.config import Config
from flashpoint.lab.precision import Precision, linear_dtype
from flashpoint.numerics.compile_time import runs_warp_groups
from flashpoint.numerics.dispatch import sdpa_operation
from flashpoint.numerics.production import PRODUCTION
from flashpoint.runs.manifest import Environment, Production, command_line
from flashpoint_kernels.tile_sizes import tile_sizes_of

_WITH_THE_SAME_BITS = ("torch", "cuda", "triton", "hardware", "tiles")
"""What two runs of equal bits have the same of."""
_PACKAGES = [Path(str(package.__file__)).parent for package in (flashpoint, flashpoint_kernels)]


def fix_numerics(threads: int, deterministic: bool, precision: Precision) -> None:
    """Fix what changes bits between two runs on one machine. Call before the first CUDA operation.

    Args:
        threads: of CPU operations; sums depend on their number.
        deterministic: False lets PyTorch choose faster operations whose bits differ from run to run.
        precision: ``tf32`` cuts the FP32 operands of matrix products to 10 mantissa bits.
    """
    torch.set_num_threads(threads)
    if deterministic:
        # Read when cuBLAS starts; PyTorch 2.11 also reads it at each product, which costs the host more than the launch
        # does. A CUDA graph pays that once.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # For the whole process: whoever takes FP32 products beside a training in TF32 turns it off for them.
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def describe_environment(device: torch.device, config: Config) -> Environment:
    """Return the versions, hardware and what computes the attention, for the manifest; after ``fix_numerics``."""
    on_gpu = device.type == "cuda"
    return Environment(
        flashpoint=flashpoint.__version__,
        commit=_commit(_PACKAGES[0]),
        source=source_digest(*_PACKAGES),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda if on_gpu else None,
        triton=version("triton") if on_gpu else None,
        tiles=_tiles(device, config) if on_gpu else None,
        sdpa=_sdpa(device, config) if config.attn.kernel == "sdpa" else None,
        production=_production(config.attn.kernel),
        numpy=np.__version__,
        platform=platform.platform(),
        hardware=hardware_name(device),
        command=tuple(command_line()),
    )


def environment_difference(recorded: Environment, here: Environment) -> str | None:
    """Return one line naming what makes bitwise equality unlikely, or None."""
    pairs = [(name, getattr(recorded, name), getattr(here, name)) for name in _WITH_THE_SAME_BITS]
    differing = [(name, then, now) for name, then, now in pairs if then != now]
    if recorded.sdpa and here.sdpa not in {None, recorded.sdpa}:  # one that has none has another attention
        differing.append(("sdpa", recorded.sdpa, here.sdpa))
    if not differing:
        return None
    changes = ", ".join(f"{name} {then} → {now}" for name, then, now in differing)
    return f"not the tape's environment ({changes}): same batches and initial weights, other bits"


def source_difference(recorded: Environment, here: Environment) -> str | None:
    """Return one line where a run goes on with other code than it began with, or None; older runs do not tell it."""
    if recorded.source in (None, here.source):
        return None
    begun, now = ((one.commit or str(one.source))[:12] for one in (recorded, here))
    return (
        f"begun with other source code ({begun}, here {now}): its digest may not be that of an undisturbed run; "
        "the manifest's resumed has both"
    )


@functools.cache
def source_digest(*packages: Path) -> str:
    """Return SHA-256 of the Python files of packages, and of their places: which code made a run whose tree has no
    Git. It is that of the first call: a process goes on with the code that it has imported."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            content = path.read_bytes()
            place = path.relative_to(package.parent).as_posix()
            digest.update(f"{place}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _tiles(device: torch.device, config: Config) -> dict[str, Any]:
    model, chip = config.model, chip_of(device)
    by_warp_groups = any(
        runs_warp_groups(config.attn.groups(layer, model.n_head), layer, model.head_size, chip)
        for layer in range(1, model.n_layer + 1)
    )
    return tile_sizes_of(chip, model.head_size, by_warp_groups)


def _production(kernel: str) -> Production | None:
    if kernel == "flash":
        return None
    attention = PRODUCTION[kernel]
    return Production(
        kernel=kernel,
        package=attention.package,
        version=version(attention.package),
        deterministic=attention.deterministic,
        cudnn=torch.backends.cudnn.version(),
    )


def _sdpa(device: torch.device, config: Config) -> str:
    shape = (1, config.model.n_head, config.model.context, config.model.head_size)
    return sdpa_operation(torch.empty(shape, dtype=linear_dtype(config.train.precision), device=device))


@functools.cache
def _commit(package: Path) -> str | None:
    """Return the Git commit of a package at the first call, with ``+changes`` if files differ from it; None unless Git
    tracks the source.

    What is installed may lie in the folder of somebody's own repository, whose commit says nothing of it.
    """
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(package, "rev-parse", "HEAD")
        changed = _git(package, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
