"""One optimiser step on the device, captured as a CUDA graph where there is a GPU, and its learning rate."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from flashpoint.lab.config import Config, TrainConfig
from flashpoint.lab.cuda_graph import Graphed
from flashpoint.lab.model import GPT, Block, ShiftingProjection, by_head
from flashpoint.lab.precision import autocast, linear_dtype, loss_scale
from flashpoint.lab.probes.observation import analysed, launch_kernels
from flashpoint.lab.training.optimizers import MOMENTS, Optimizers
from flashpoint.lab.training.parallel import Ranks, flattened, take_from
from flashpoint.lab.training.tensor_files import Form, Forms
from flashpoint.numerics.passes import kernels_for
from flashpoint.numerics.production import make_ready
from flashpoint.numerics.shared_graphs import compiled
from flashpoint.numerics.variant import AttentionVariant, in_front, kernel_in

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_EAGER_STEPS = 3
"""Steps before the capture: they compile, allocate the optimiser's state and choose algorithms."""


class OptimizerStep:
    """Forward and backward passes of all micro-batches, clipping, update of the weights.

    The host sets the inputs and the learning rate; what a step computes it finds in ``result``. With
    ``train.cuda_graph`` a step is captured as a CUDA graph once and replayed as one launch, which changes no bit:
    small models are otherwise bound by the host.

    Args:
        model: on ``device``.
        ranks: the processes that share each batch; their gradients are averaged.
    """

    def __init__(self, model: GPT, config: Config, device: torch.device, ranks: Ranks) -> None:
        train, self._ranks = config.train, ranks
        self.model, self._config, self._train, self._device = model, config, train, device
        on_gpu = device.type == "cuda"
        if not on_gpu:
            _keep_freed_memory()
        self._compiled = train.compiles(device.type)
        self._is_observed = bool(config.probes.attention) and 0 < config.probes.attention_interval <= train.steps
        self._optimizers = Optimizers(model, config, device)
        modules = model.named_modules()
        self._shifts = {name: module for name, module in modules if isinstance(module, ShiftingProjection)}
        shape = (train.micro_batches // ranks.world, train.sequences, config.model.context + 1)
        self._batch = torch.zeros(shape, dtype=torch.int64, device=device)
        noise_seed = (config.seed + ranks.rank * 0x9E3779B9) % 2**32  # other sequences, other noise
        self.seed_and_step = torch.tensor([noise_seed, 0], device=device)
        """[2] int64: the run's seed and the count of forward passes so far, the key of stochastic rounding."""
        self.result = torch.zeros(3, device=device)
        """Loss, nats, gradient norm before clipping, and norm of what the step added to the weights. On the device; the
        next step overwrites it."""
        self._total = torch.zeros((), device=device)
        self._flat = torch.empty(0, device=device)
        captures = on_gpu and train.cuda_graph is not False
        stream = torch.cuda.Stream(device) if captures else None

        def graphed(compute: Callable[[], None]) -> Callable[[], None]:
            return Graphed(compute, captures, after=_EAGER_STEPS, stream=stream)

        if ranks.world > 1:
            # What processes exchange is launched between two graphs: NCCL in a graph outlives its process group.
            self._launches = [graphed(self._gather), lambda: ranks.sum(self._flat), graphed(self._spread)]
        else:
            self._launches = [graphed(self._compute)]

    def warm_up(self) -> None:
        """Compile what a step compiles, on a batch of zeros; no state of the training changes."""
        if self._compiled:
            # PyTorch keeps a graph with a custom gradient, as the embedding's, out of its cache unless it is told.
            functorch_config.autograd_cache_allow_custom_autograd_functions = True
            attentions = []
            for attention in (cast(Block, block).attention for block in self.model.blocks):
                kernel = kernel_in(attention.core.variant, attention.core.layer)
                if kernel == "flash":
                    attentions.append(attention.core.forward)
                else:
                    make_ready(kernel, self._batch.shape[2] - 1, self._batch.device)
            observed = analysed(cast(Block, self.model.blocks[0]).attention.core.variant, self._train.precision)
            if self._device.type == "cuda":
                _import_what_compiles_kernels()
            with ThreadPoolExecutor(1) as beside:
                kernels = beside.submit(self._compile_kernels, attentions)
                if self._is_observed:  # else the steps would wait for the first observation, which compiles them
                    beside.submit(self._compile_observation, observed)
                self._loss(self._batch[0]).backward()
                kernels.result()
            self.model.zero_grad(set_to_none=True)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # steps are on a stream of their own, which cannot take what this one left

    def __call__(self, batch: Tensor, learning_rate: float) -> None:
        """Queue one step.

        Args:
            batch: [micro-batches, sequences, T + 1] int64 in host memory, pinned if the device is a GPU.
        """
        self._batch.copy_(batch, non_blocking=True)
        self._optimizers.set_learning_rate(learning_rate)
        for launch in self._launches:
            launch()

    def checksum(self) -> Tensor:
        """Return a checksum [] int64 of weights and optimiser state on the device (:func:`.state_checksum`)."""
        return state_checksum(summed(self.state(), self.forms()))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that the next step depends on, by name; they are not copied."""
        named = {"seed_and_step": self.seed_and_step}
        for name, parameter in self.model.named_parameters():
            named[f"model/{name}"] = parameter
            named |= {f"{key}/{name}": value for key, value in self._optimizers.state(name).items()}
        return named | self._key_means()

    def forms(self) -> Forms:
        """Return the forms of the tensors of :meth:`state`, also before the first step."""
        found = {"seed_and_step": Form.of(self.seed_and_step)}
        for name, parameter in self.model.named_parameters():
            found[f"model/{name}"] = Form.of(parameter)
            found |= {f"{key}/{name}": form for key, form in self._optimizers.forms(name).items()}
        return found | {name: Form.of(mean) for name, mean in self._key_means().items()}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        """Take over a state of these forms, in place if there have been steps: a captured one goes on from there."""
        self.seed_and_step[1] = named["seed_and_step"][1]  # the seed is this process's own
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(named[f"model/{name}"])
                kept = self._optimizers.state(name)
                for key in self._optimizers.forms(name):
                    value = named[f"{key}/{name}"]
                    kept[key] = kept[key].copy_(value) if key in kept else value.to(self._device)
            for name, mean in self._key_means().items():
                mean.copy_(named[name])

    def restart(self, seed: int) -> None:
        """Go back, in place, to the initial weights of a seed and to an optimiser that has done no step."""
        self.model.initialize(seed)
        self.seed_and_step[1] = 0
        for name, _ in self.model.named_parameters():
            for value in self._optimizers.state(name).values():
                value.zero_()
        for mean in self._key_means().values():
            mean.zero_()

    def _key_means(self) -> dict[str, Tensor]:
        return {f"model/{name}.key_mean": shift.key_mean for name, shift in self._shifts.items()}

    @cached_property
    def _loss_of(self) -> Callable[..., Any]:
        """The model, or what calls it compiled, for which PyTorch imports its compiler: beside the kernels."""
        return _compiled(self.model, self._config, self._device) if self._compiled else self.model

    def _loss(self, sequences: Tensor) -> Tensor:
        """Return the mean loss [], nats, of a micro-batch [sequences, T + 1]."""
        with autocast(self._device, self._train.precision):
            loss: Tensor = self._loss_of(sequences[:, :-1], sequences[:, 1:], self.seed_and_step)
        return loss

    def _compile_kernels(self, attentions: Iterable[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]) -> None:
        """Run the attention of each layer, whose kernels PyTorch's compiler only calls: neither waits for the other.

        No module may be called or looked up here: while the compiler traces, it takes what any thread does with modules
        for a part of what it traces.
        """
        of_model = self.model.config
        n_head, n_kv_head = of_model.n_head, of_model.kv_heads
        shape = (self._batch.shape[1], self._batch.shape[2] - 1, (n_head + 2 * n_kv_head) * of_model.head_size)
        dtype = linear_dtype(self._train.precision)
        qkv = torch.zeros(shape, dtype=dtype, device=self._device, requires_grad=True)
        with torch.cuda.device_of(qkv), autocast(self._device, self._train.precision):
            for attention in attentions:
                out = attention(*by_head(qkv, n_head, n_kv_head), self.seed_and_step)
                torch.autograd.grad(out, qkv, torch.zeros_like(out))

    @torch.no_grad()
    def _compile_observation(self, variant: AttentionVariant) -> None:
        """Launch what the probes launch beside the passes of training, on one sequence: kernels serve any number. What
        fails here fails once more in the first observation, which tells of it."""
        config, tokens = self.model.config, self._batch.shape[2] - 1
        shape = (config.n_layer, 1, config.n_head, tokens, config.head_size)
        like = torch.zeros(shape, dtype=linear_dtype(self._train.precision), device=self._device)
        if kernels_for(like[0], variant, layer=1):
            with torch.cuda.device_of(like):  # a thread begins on the first device
                launch_kernels(variant, like, self.seed_and_step)

    def _compute(self) -> None:
        self._backward()
        self._update()

    def _gather(self) -> None:
        """Compute this process's part of the loss and of the gradients, as one tensor."""
        self._backward()
        self._flat = flattened(self._exchanged())

    def _spread(self) -> None:
        """Take the mean of all processes in place of this one's part, and update the weights."""
        self._flat /= self._ranks.world
        take_from(self._flat, self._exchanged())
        self._update()

    def _exchanged(self) -> list[Tensor]:
        """Return what processes take the mean of."""
        return [self._total, *self._gradients(), *(shift.inputs for shift in self._shifts.values())]

    def _backward(self) -> None:
        self._total, scale = torch.zeros((), device=self._device), loss_scale(self._train.precision)
        self.model.zero_grad(set_to_none=True)
        for shift in self._shifts.values():
            shift.inputs.zero_()  # of validations and observations
        for sequences in self._batch:
            loss = self._loss(sequences)
            (loss * scale / len(self._batch) if scale != 1 else loss / len(self._batch)).backward()
            self._total += loss.detach() / len(self._batch)
            self.seed_and_step[1] += 1
        if scale != 1:
            torch._foreach_div_(self._gradients(), scale)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def _update(self) -> None:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._train.grad_clip or math.inf)
        weights = [parameter.detach() for parameter in self.model.parameters()]
        before = [torch.empty_like(weight) for weight in weights]
        torch._foreach_copy_(before, weights)  # one launch, where a small model's clones take as many as it has tensors
        for shift in self._shifts.values():
            shift.step(len(self._batch))
        self._optimizers.step()
        update = nn.utils.get_total_norm(torch._foreach_sub(weights, before))
        self.result.copy_(torch.stack([self._total, norm, update]))


def _import_what_compiles_kernels() -> None:
    """Import what Triton imports for its first kernel: the thread that compiles is to import nothing, as two threads
    that import what imports each other can leave a part of it half made."""
    with contextlib.suppress(ImportError):  # of another release: the first kernel imports it
        import triton.compiler.code_generator  # noqa: F401


def _keep_freed_memory() -> None:
    """Let the C library keep what a step frees. It would return it to the system, which then zeroes every page of the
    next step's tensors anew: a thousand page faults a step of the laptop preset."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the largest that it takes


def _compiled(model: GPT, config: Config, device: torch.device) -> Callable[..., Any]:
    """Return the compiled model, with the graph of the run before it in this process where that can serve both: most of
    a short branch would be its compilation."""
    train, attention = config.train, config.attn
    fronts = [in_front(attention, layer) for layer in range(1, config.model.n_layer + 1)]
    before = tuple((front.shift_keys, front.shift_values, front.fp16_inside) for front in fronts)
    traced_from = config.model, before, train.z_loss, train.precision, train.sequences, train.deterministic, device
    return compiled(model, attention, traced_from if all(front.kernel == "flash" for front in fronts) else None)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate: a linear warm-up, then a cosine from ``lr`` to ``min_lr_ratio · lr`` at
    ``decay_steps``, then constant."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = config.decay_steps or config.steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def summed(state: Mapping[str, Tensor], forms: Forms) -> Iterator[Tensor]:
    """Return the tensors of a state that its checksum is of, in their order: each parameter with its moments."""
    return (state[name] for name in forms if name.startswith(("model/", *(f"{moment}/" for moment in MOMENTS))))


@torch.no_grad()
def state_checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum [] int64 on the tensors' device: a sum over all bits, the same in any order of summation.

    Each tensor (float32) adds Σ x + Σ x² over its values as int32, times an odd number of its own, modulo 2⁶⁴. A
    changed bit changes it, and so does a swap of two tensors.
    """
    total: Tensor | None = None
    for number, tensor in enumerate(tensors):
        bits = tensor.detach().contiguous().view(torch.int32).to(torch.int64)
        part = (bits.sum() + (bits * bits).sum()) * (2 * number + 1)
        total = part if total is None else total + part
    assert total is not None, "no tensors"
    return total
