"""How far the kernels are from the PyTorch attention with the same variant, and both from FP64.

    python scripts/kernels/compare_kernels.py

Needs a GPU. Both round at the same points, and differ by the order of their FP32
sums: now and then that flips a rounding. Printed per variant and kind of input, for O and dQ: the share of elements
that differ, the largest difference in BF16 ulps of the head's largest element, and error norms relative to FP64
(kernel / PyTorch). Rows whose dQ is zero but for rounding (a single key, a probability of 1) differ in noise alone;
the error norms say how much it is.
"""

from __future__ import annotations

import datetime
import sys
from typing import Any

import torch
import triton
from torch import Tensor

from flashpoint.files import CONFIGS
from flashpoint.numerics import launch, reference
from flashpoint.numerics.named import variant_named, variant_names
from flashpoint.numerics.rounding import NoiseKey
from flashpoint.numerics.variant import AttentionVariant

LENGTHS = (1, 63, 65, 512)
SIZE, HEADS, LAYER = 64, 4, 2


def kinds(length: int) -> dict[str, list[Tensor]]:
    """Return q, k, v, dO [2, H, T, d] by kind of stress."""

    def normal(seed: int) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        return [torch.randn(2, HEADS, length, SIZE, device="cuda", generator=generator) for _ in range(4)]

    tied = normal(1)
    tied[1] = tied[1][:, :, torch.arange(length, device="cuda") // 4]
    sink = normal(2)
    sink[1][:, :, 0] = 4 * sink[0].mean((0, 1, 2)) + 2
    sink[0] += 0.5
    one_signed = normal(3)
    one_signed[2] = -one_signed[2].abs() - 1
    large = normal(4)
    large[0], large[1] = large[0] * 11, large[1] * 11  # |S| to some 500
    return {
        name: [x.bfloat16() for x in tensors]
        for name, tensors in (
            ("normal", normal(0)),
            ("tied", tied),
            ("sink", sink),
            ("one-signed V", one_signed),
            ("large S", large),
        )
    }


def exact(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return O and dQ in FP64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    masked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    out = scores.masked_fill(masked, -torch.inf).softmax(-1) @ v
    return out.detach(), torch.autograd.grad(out, q, grad_out.double())[0]


def both(tensors: list[Tensor], variant: AttentionVariant) -> list[tuple[Tensor, Tensor]]:
    """Return O and dQ of the kernels and of the PyTorch attention."""
    q, k, v, grad_out = tensors
    seed_and_step = torch.tensor([1, 2], device="cuda")
    context: dict[str, Any] = {"layer": LAYER, "seed_and_step": seed_and_step}
    noise = NoiseKey(seed_and_step, LAYER, torch.arange(HEADS, device="cuda"), HEADS, q.shape[0])
    saved = launch.flash_fwd(q, k, v, variant, **context)
    by_kernels = saved[0], launch.flash_bwd(grad_out, q, k, v, *saved, variant, **context)[0]
    saved = reference.flash_fwd(q, k, v, variant, noise)
    return [by_kernels, (saved[0], reference.flash_bwd(grad_out, q, k, v, *saved, variant, noise)[0])]


def ulps(x: Tensor, y: Tensor) -> float:
    """Return the largest difference in units of the last BF16 place of the head's largest element."""
    unit = 2.0 ** (y.double().abs().amax((-2, -1), keepdim=True).log2().floor() - 7)
    return float(((x.double() - y.double()).abs() / unit).max())


def main() -> None:
    if not torch.cuda.is_available():
        print("error: no CUDA device is visible; the comparison needs one", file=sys.stderr)
        sys.exit(2)
    torch.set_float32_matmul_precision("highest")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
          f"{datetime.date.today()}; worst of T in {LENGTHS}, d {SIZE}")  # fmt: skip
    print(f"{'variant':19} {'input':13} {'O differs':>9} {'ulps':>5} {'error to FP64':>17}   "
          f"{'dQ differs':>10} {'ulps':>5} {'error to FP64':>17}")  # fmt: skip
    for variant in (variant_named(name, CONFIGS / "attn") for name in variant_names(CONFIGS / "attn")):
        if variant.kernel == "sdpa":
            continue
        worst: dict[str, list[list[float]]] = {}
        for length in LENGTHS:
            for kind, tensors in kinds(length).items():
                kernels, by_pytorch = both(tensors, variant)
                cells = []
                for x, y, truth in zip(kernels, by_pytorch, exact(*tensors), strict=True):
                    if truth.any():
                        errors = [float((value.double() - truth).norm() / truth.norm()) for value in (x, y)]
                        cells += [float((x != y).float().mean()), ulps(x, y), *errors]
                    else:  # dQ of a single token
                        cells += [0.0, 0.0, 0.0, 0.0]
                worst.setdefault(kind, []).append(cells)
        for kind, rows in worst.items():
            o_differs, o_ulps, o_kernel, o_pytorch, q_differs, q_ulps, q_kernel, q_pytorch = map(
                max, zip(*rows, strict=True)
            )
            print(f"{variant.name:19} {kind:13} {o_differs:9.3%} {o_ulps:5.1f} {o_kernel:8.1e}/{o_pytorch:8.1e}   "
                  f"{q_differs:10.3%} {q_ulps:5.1f} {q_kernel:8.1e}/{q_pytorch:8.1e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
