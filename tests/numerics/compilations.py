"""``python -m tests.numerics.compilations``: how often one run compiles each kernel, as JSON; no GPU needed.

The launches are real but for the compiler and the kernel that it returns. A process of its own, since Triton's
interpreter, once chosen, holds for all kernels.
"""

import json
from collections import Counter
from typing import Any
from unittest.mock import MagicMock

import torch
import triton
from triton.backends.compiler import GPUTarget

from flashpoint.numerics import launch
from flashpoint.numerics.choices import NEAREST
from flashpoint.numerics.variant import AttentionVariant

LAYERS = (1, 2, 16)
BATCH_SIZES = (8, 5, 1)
"""Of training, of validation's last batch, of a probe."""


def compilations(variant: AttentionVariant) -> Counter[str]:
    """By kernel, over forward and backward passes of all ``LAYERS`` and ``BATCH_SIZES``."""
    counts: Counter[str] = Counter()

    def compile_nothing(source: Any, **_: Any) -> MagicMock:
        counts[source.name] += 1
        return MagicMock()

    driver = MagicMock()
    driver.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    driver.get_current_device.return_value = 0
    triton.runtime.driver.set_active(driver)
    triton.compiler.compile = compile_nothing
    for layer in LAYERS:
        for n_sequences in BATCH_SIZES:
            # As the model cuts them out of one projection.
            packed = torch.zeros(n_sequences, 128, 3, 2, 64, dtype=torch.bfloat16)
            q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
            context: dict[str, Any] = {"layer": layer, "seed_and_step": torch.zeros(2, dtype=torch.int64)}
            saved = launch.flash_fwd(q, k, v, variant, **context)
            launch.flash_bwd(torch.zeros_like(q), q, k, v, *saved, variant, **context)
    return counts


if __name__ == "__main__":
    print(json.dumps(compilations(AttentionVariant(scores=NEAREST, center_keys=True))))
