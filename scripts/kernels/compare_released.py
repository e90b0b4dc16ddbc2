"""How far ``released`` and ``released_fixed`` are from the authors' own file, compiled, on one CUDA GPU.

    STABLE=0 python scripts/kernels/compare_released.py PATH/attention.py
    STABLE=1 python scripts/kernels/compare_released.py PATH/attention.py

The file is ``attention.py`` of github.com/ucker/why-low-precision-training-fails (arXiv 2510.04212); it needs einops.
It runs as its authors run it: under autocast to BF16, through torch.compile, T = 1,024, d = 64. ``STABLE`` is its own
switch. For each input it prints the share of elements that differ from the Triton kernels' and from the PyTorch
attention's, and the largest and median distance in BF16 ulps among those that do.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from flashpoint.files import CONFIGS
from flashpoint.numerics import launch, reference
from flashpoint.numerics.named import variant_named
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant

BATCH, HEADS, LENGTH, SIZE = 2, 4, 1024, 64
KINDS = ("normal", "large", "sink", "tied")
NAMES = ("O", "dQ", "dK", "dV")


def inputs(kind: str, device: torch.device) -> list[Tensor]:
    """Return Q, K, V and dO [B, H, T, d] bfloat16, as the authors' model makes them: views of [B, T, H, d]."""
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    q, k, v, grad_out = (torch.randn(BATCH, LENGTH, HEADS, SIZE, generator=generator) for _ in range(4))
    if kind == "large":
        q, k = 4 * q, 4 * k
    elif kind == "sink":
        q, k = q + 1, 0.3 * k
        k[:, ::64] += 3
    elif kind == "tied":
        q, k = 2 * q, 2 * k
        k[:, 1::2] = k[:, ::2]
    return [x.bfloat16().to(device).transpose(1, 2) for x in (q, k, v, grad_out)]


def authors(path: Path, tensors: list[Tensor]) -> list[Tensor]:
    """Return O and the gradients of the file."""
    spec = importlib.util.spec_from_file_location("authors_attention", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # torch.compile imports the file by its name
    spec.loader.exec_module(module)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = module.FlashAttentionFunction.apply(q, k, v, None, True, 512, 512)
        return out

    *leaves, grad_out = [x.detach() for x in tensors]
    leaves = [x.requires_grad_() for x in leaves]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = torch.compile(attention)(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def ours(engine: str, tensors: list[Tensor], variant: AttentionVariant) -> list[Tensor]:
    """Return O and the gradients of the kernels or of the PyTorch attention."""
    q, k, v, grad_out = tensors
    device = q.device
    seed_and_step = torch.zeros(2, dtype=torch.int64, device=device)
    if engine == "kernels":
        context: dict[str, Any] = {"layer": 1, "seed_and_step": seed_and_step}
        saved = launch.flash_fwd(q, k, v, variant, **context)
        return [saved[0], *launch.flash_bwd(grad_out, q, k, v, *saved, variant, **context)]
    noise = NoiseKey(seed_and_step, 1, torch.arange(HEADS, device=device), HEADS, BATCH)
    saved = reference.flash_fwd(q, k, v, variant, noise)
    return [saved[0], *reference.flash_bwd(grad_out, q, k, v, *saved, variant, noise)]


def ulps(x: Tensor) -> Tensor:
    """Return BF16 numbers as integers whose difference counts ulps."""
    pattern = x.contiguous().view(torch.int16).int()
    return torch.where(pattern < 0, -(pattern & 0x7FFF), pattern)


def row(kind: str, name: str, engine: str, one: Tensor, other: Tensor) -> list[Any]:
    apart = (ulps(one) - ulps(other)).abs()
    first, rest = (apart[..., part, :] for part in (slice(0, 512), slice(512, None)))
    differ = apart[apart > 0].float()
    shares = [f"{(part > 0).float().mean().item():.2%}" for part in (first, rest)]
    return [kind, name, engine, *shares, int(differ.median()) if len(differ) else 0, int(apart.max())]


def main() -> None:
    if len(sys.argv) != 2 or not torch.cuda.is_available():
        sys.exit("compare_released.py: give the path of the authors' attention.py, on a machine with a CUDA GPU")
    fixed = os.environ.get("STABLE", "0") == "1"
    name = "released_fixed" if fixed else "released"
    variant = variant_named(name, CONFIGS / "attn")
    device, rows = torch.device("cuda"), []
    for kind in KINDS:
        tensors = inputs(kind, device)
        expected = authors(Path(sys.argv[1]), tensors)
        for engine in ("kernels", "reference"):
            found = ours(engine, tensors, variant)
            rows += [row(kind, what, engine, *pair) for what, *pair in zip(NAMES, found, expected, strict=True)]
    print(
        f"{name} against the authors' file, STABLE={int(fixed)}: {torch.cuda.get_device_name()}, "
        f"torch {torch.__version__}, B {BATCH}, H {HEADS}, T {LENGTH}, d {SIZE}, seeds 0 to 3, {time.strftime('%F')}\n"
    )
    headers = ("input", "of", "engine", "rows 1 to 512 differ", "rows 513 to 1,024 differ", "median ulps", "largest")
    print(tabulate(rows, headers, tablefmt="github"))


if __name__ == "__main__":
    main()
