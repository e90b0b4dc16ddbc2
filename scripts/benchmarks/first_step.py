"""``python -m benchmarks.first_step STARTED DEVICE KEY=VALUE …``: train the first steps, and print their seconds.

A process of its own, because imports are timed, too. STARTED is what ``time.monotonic()`` was when it was started.
Prints JSON: seconds by phase, in the order of :data:`benchmarks.compilation.PHASES`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

_OURS = "flashpoint_kernels"
_MICROSECONDS = 1e6
BESIDE = "kernels, meanwhile"
"""This package's kernels, which Triton compiles in a thread of its own, while PyTorch compiles the model."""
CAPTURED = 4
"""The step that is captured as a CUDA graph."""


def main() -> None:
    started, name, overrides = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    import torch
    import triton

    phases = {"PyTorch": time.monotonic() - started}
    begun = time.monotonic()

    import flashpoint.lab.cli.train
    import flashpoint.lab.training.execution  # noqa: F401 - the imports of a training
    from benchmarks.loops import LEARNING_RATE, random_batches, threads
    from benchmarks.rounds import block, synchronize
    from benchmarks.shapes import composed
    from flashpoint.lab.model import GPT
    from flashpoint.lab.training.determinism import fix_numerics
    from flashpoint.lab.training.parallel import Ranks
    from flashpoint.lab.training.step import OptimizerStep

    device, config = torch.device(name), composed(overrides)
    phases["other imports"] = time.monotonic() - begun
    kernels: list[float] = []

    def told(src: Any, times: Any, **_: Any) -> None:
        """Triton's hook after a compilation, or a look into its cache."""
        if str(getattr(getattr(src, "fn", None), "module", "")).startswith(_OURS):
            kernels.append(times.total / _MICROSECONDS)

    triton.knobs.compilation.listener = told
    fix_numerics(threads(device), config.train.deterministic, config.train.precision)
    begun = time.monotonic()
    torch.zeros(1, device=device)
    synchronize(device)
    phases["device"] = time.monotonic() - begun
    built = time.monotonic()
    model = GPT(config.model, config.attn, config.seed).to(device)
    step, batches = OptimizerStep(model, config, device, Ranks()), random_batches(config, device)
    phases["model"] = time.monotonic() - built
    whole = block(step.warm_up, 1, device)
    parts = _parts_of_compilation()
    phases |= {**parts, "rest of the first pass": whole - sum(parts.values()), BESIDE: sum(kernels)}
    phases["first step"] = block(lambda: step(next(batches), LEARNING_RATE), 1, device)
    phases["steps to the graph"] = block(lambda: step(next(batches), LEARNING_RATE), CAPTURED - 1, device)
    print(json.dumps(phases))


def _parts_of_compilation() -> dict[str, float]:
    """Return the seconds of Dynamo, AOTAutograd and Inductor, each without what it calls of the next.

    They are PyTorch's own times, by names that are not part of its interface. A name that it no longer has counts
    as 0 here, and its seconds are in the rest of the first pass.
    """
    from torch._dynamo.utils import compilation_time_metrics as measured

    def seconds(*names: str) -> float:
        return sum(sum(measured.get(name, [])) for name in names)

    whole, backend = seconds("_compile.compile_inner"), seconds("OutputGraph.call_user_compiler")
    inductor = seconds("compile_fx_inner", "AOTAutogradCache.inductor_load")
    backward = seconds("backward._backward_impl")  # compiled where it is first run
    return {"Dynamo": whole - backend, "AOTAutograd": backend + backward - inductor, "Inductor": inductor}


if __name__ == "__main__":
    main()
