"""What computes an attention: the emulated ones, this package's variants, PyTorch's, and a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flashpoint.diagnosis.other_attention import BACKENDS, function_of_layer, of_production, users_function
from flashpoint.diagnosis.probe import Function
from flashpoint.errors import UserCodeError, UserError, nearest
from flashpoint.files import CONFIGS
from flashpoint.hardware import is_of_full_memory
from flashpoint.lab.deviation.arithmetic import Arithmetic
from flashpoint.lab.deviation.emulated import Block, Inputs, Results, baseline, flash
from flashpoint.lab.deviation.formats import Format
from flashpoint.numerics import dispatch
from flashpoint.numerics.named import variant_named, variant_names
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.user_code import errors_in_one_line

Call = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor | None]]
"""q, k, v [B, H, T, d], whether it is causal and α, to O [B, H, T, d] and L [B, H, T] or None."""
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""PyTorch's types of the formats that engines outside the emulation can compute in."""


@dataclass(frozen=True)
class Setting:
    """How an attention is computed."""

    compute: Arithmetic
    block: Block
    causal: bool
    backward: bool
    """Whether gradients are asked for."""


class Engine(Protocol):
    """Computes an attention."""

    @property
    def name(self) -> str:
        """What the user calls it."""

    @property
    def emulated(self) -> bool:
        """Whether it computes in the arithmetic of the setting."""

    @property
    def tiled(self) -> bool:
        """Whether the block of the setting matters."""

    def compute(self, inputs: Inputs, setting: Setting) -> Results:
        """Compute on float64 inputs with numbers of the precision. Raises UserError if it cannot."""


@dataclass(frozen=True)
class Emulated:
    """Baseline or flash attention in an emulated precision."""

    name: str
    tiled: bool
    emulated: bool = True

    def compute(self, inputs: Inputs, setting: Setting) -> Results:
        """See :class:`Engine`."""
        how = {"causal": setting.causal, "backward": setting.backward}
        if self.tiled:
            return flash(inputs, setting.compute, setting.block, **how)
        return baseline(inputs, setting.compute, **how)


@dataclass(frozen=True)
class Called:
    """An attention that takes tensors of a PyTorch type and has gradients by autograd. It tells no δ."""

    name: str
    call: Call
    formats: Sequence[str] = tuple(DTYPES)
    """Names of the formats it takes."""
    emulated: bool = False
    tiled: bool = False

    def compute(self, inputs: Inputs, setting: Setting) -> Results:
        """See :class:`Engine`."""
        precision = setting.compute.precision.name
        if precision not in self.formats:
            raise UserError(f"{self.name}: computes in {', '.join(self.formats)}, not {precision}; change --precision")
        given = (x.to(DTYPES[precision], copy=True) for x in (inputs.q, inputs.k, inputs.v))  # it may write to them
        q, k, v = (x.requires_grad_(setting.backward) for x in given)
        out, logsumexp = self.call(q, k, v, setting.causal, inputs.alpha)
        values = {"O": out.detach().double()}
        if logsumexp is not None:
            values["L"] = logsumexp.detach().double()
        if setting.backward and out.requires_grad:
            gradients = self._gradients(out, (q, k, v), inputs.grad_out)
            values |= dict(zip(("dQ", "dK", "dV"), (x.double() for x in gradients), strict=True))
        return Results(values)

    def _gradients(self, out: Tensor, inputs: tuple[Tensor, Tensor, Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
        try:
            with errors_in_one_line(self.name, f"{self.name}: its backward pass fails", "ask for --of O alone"):
                return torch.autograd.grad(out, inputs, grad_out.to(out.dtype))
        except UserCodeError as error:
            if isinstance(error.__cause__, Exception) and is_of_full_memory(error.__cause__):
                raise error.__cause__ from None  # which has a line of its own
            raise


def engines_named(words: Sequence[str], precisions: Sequence[Format], device: torch.device) -> list[Engine]:
    """Return the engines that the words name, each once.

    Args:
        words: ``baseline`` or ``flash``; ``sdpa:BACKEND``, or ``sdpa:all`` for each that is available; a variant's
            name; ``FILE.py:FUNCTION``, which takes q, k, v and is_causal and returns O.
        precisions: those that a backend of ``sdpa:all`` has to take on the device.

    Raises:
        UserError: a word names none.
    """
    found: list[Engine] = []
    for word in dict.fromkeys(words):
        if word == "sdpa:all":
            dtypes = [DTYPES[one.name] for one in precisions if one.name in DTYPES]
            found += [_sdpa(name) for name in BACKENDS if all(_available(name, dtype, device) for dtype in dtypes)]
        else:
            found.append(_named(word))
    return list({engine.name: engine for engine in found}.values())


def engine_of(variant: AttentionVariant, name: str) -> Engine:
    """Return the engine that computes a variant: its kernels on a GPU, the PyTorch attention elsewhere."""
    if variant.kernel != "flash":
        formats = ("bf16",) if variant.runs_kernels_of_ours else ("bf16", "fp16", "fp32")
        return Called(name, _out_alone(function_of_layer(variant, 1)), formats)
    return Called(name, _of_variant(variant), ("bf16", "fp32"))


def _named(word: str) -> Engine:
    if word in ("baseline", "flash"):
        return Emulated(word, tiled=word == "flash")
    if word.startswith("sdpa:") and word.removeprefix("sdpa:") in BACKENDS:
        return _sdpa(word.removeprefix("sdpa:"))
    if ".py:" in word:
        return Called(word, _out_alone(users_function(word)))
    variants = CONFIGS / "attn"
    if (variants / f"{word}.yaml").is_file():
        return engine_of(variant_named(word, variants), word)
    names = ["flash", "baseline", *(f"sdpa:{name}" for name in (*BACKENDS, "all")), *variant_names(variants)]
    given = nearest(word, names).rstrip() or f"give FILE.py:FUNCTION, or one of {', '.join(names)}"
    raise UserError(f"{word}: no such engine; {given}")


def _of_variant(variant: AttentionVariant) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor | None]:
        key = torch.zeros(2, dtype=torch.int64, device=q.device)
        out, logsumexp, *_ = dispatch.flash_fwd(
            q, k, v, variant, layer=1, seed_and_step=key, causal=causal, scale=scale
        )
        return out, None if variant.center_keys else logsumexp  # that of centred scores is another number

    return call


def _sdpa(backend: str) -> Called:
    word = f"sdpa:{backend}"
    return Called(word, _out_alone(of_production(word, f"sdpa_{backend}")))


def _out_alone(function: Function) -> Call:
    """Return an attention that tells no L."""
    return lambda q, k, v, causal, scale: (function(q, k, v, causal, scale), None)


def _available(backend: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a backend takes a type on a device."""
    x = torch.zeros(1, 1, 16, 64, dtype=dtype, device=device)
    try:
        of_production(backend, f"sdpa_{backend}")(x, x, x, True, 1.0)
    except (UserError, RuntimeError):
        return False
    return True
