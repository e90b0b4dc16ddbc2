"""Where attention calls come from: captured files, a run of this package, a model of Transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashpoint.build_config import build_config
from flashpoint.capture import delta_file
from flashpoint.capture.interceptor import Interceptor
from flashpoint.config import Config
from flashpoint.data.batches import gather_windows
from flashpoint.data.tape import Tape
from flashpoint.deviation.engines import Called, engines_named
from flashpoint.diagnosis.call import AttentionCall, joined
from flashpoint.diagnosis.delta_sample import DeltaSample
from flashpoint.diagnosis.probe import Function
from flashpoint.errors import UserError, notify
from flashpoint.files import CONFIGS
from flashpoint.numerics.dispatch import flash_fwd
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.probes.instrumented import InstrumentedPass
from flashpoint.runs.folder import RunFolder, by_step
from flashpoint.training.checkpoints import verified
from flashpoint.training.parallel import Ranks
from flashpoint.training.parts import build
from flashpoint.training.plan import settle
from flashpoint.training.step import OptimizerStep

_TOKENS = 32_768
"""Tokens of a run that are held at once, and that it is diagnosed on without a word: the bias of δ is small."""
_LAYERS = "layer-*.safetensors"
"""Files of a capture."""
MODEL_BATCH = 16
"""Sequences of a text that are held at once."""


def read_calls(path: Path, step: int | None = None) -> list[AttentionCall]:
    """Read a captured file, a folder of them, or those that a watched run wrote last, or at ``step``.

    Raises:
        UserError: there are none, or one cannot be read.
    """
    if path.is_file():
        return [AttentionCall.read(path)]
    folder = _capture(path, step)
    files = sorted(folder.glob(_LAYERS))
    if not files and (run := RunFolder(path)).manifest.is_file():
        left_out = "; ".join(run.read_manifest().get("not_recorded", []))
        remedy = left_out and f"its attention was not recorded ({left_out})"
        raise UserError(f"{path}: no capture was made; {remedy or 'watched.capture() in the loop makes one'}")
    if not files:
        raise UserError(f"{folder}: holds no {_LAYERS}; give a capture, a run, a .safetensors file, or a model of "
                        "Transformers and --text FILE")  # fmt: skip
    _tell_others(path, step)
    return [AttentionCall.read(file) for file in files]


def _tell_others(path: Path, step: int | None) -> None:
    if step is None and len(steps := captured_steps(path)) > 1:
        told = ", ".join(map(str, steps))
        notify(f"{path}: the last capture is read, with tensors if any has them; --step takes each of steps {told}")


def read_delta(path: Path, step: int | None = None) -> dict[int, DeltaSample]:
    """Read the errors of δ, by layer, of a capture whose tensors have been deleted; empty where they are there.

    Args:
        path, step: as of :func:`read_calls`.

    Raises:
        UserError: they cannot be read.
    """
    file = delta_file.place(_capture(path, step))
    if not file.is_file() or any(file.parent.glob(_LAYERS)):
        return {}
    _tell_others(path, step)
    return delta_file.read(file)


def read_samples(path: Path, step: int | None, calls: Sequence[AttentionCall]) -> dict[int, DeltaSample]:
    """Read the errors of δ, by layer, that were measured after the capture of the calls; empty where none were.

    Args:
        path, step: of the calls, as of :func:`read_calls`.

    Raises:
        UserError: they cannot be read, or are of other heads than the calls.
    """
    file = delta_file.place(path.parent if path.is_file() else _capture(path, step))
    samples = delta_file.read(file) if file.is_file() else {}
    for call in calls:
        if call.layer in samples and (found := samples[call.layer].heads) != call.q.shape[1]:
            raise UserError(f"{file}: layer {call.layer} with {found} heads, its tensors have {call.q.shape[1]}; "
                            "delete the file that is of another model")  # fmt: skip
    return samples


def _capture(path: Path, step: int | None) -> Path:
    """Return the folder of a capture: the path, or of a watched run's captures that of a step.

    Without a step it is the last one that holds tensors, or where none does the last one.
    """
    steps = captured_steps(path)
    if not steps:
        return path
    if step is not None and step not in steps:
        raise UserError(f"--step {step}: {path} captured steps {', '.join(map(str, steps))}")
    whole = [at for at, folder in steps.items() if any(folder.glob(_LAYERS))]
    return steps[max(whole or steps) if step is None else step]


def captured_steps(path: Path) -> dict[int, Path]:
    """Return the captures of a watched run by their steps in order; empty of another folder.

    A capture holds tensors; the errors of δ that were measured after it stay when those are deleted.
    """
    captures = by_step(RunFolder(path).captures)
    return {step: folder for step, folder in captures.items() if is_capture(folder)}


def is_capture(folder: Path) -> bool:
    """Whether a folder holds the tensors of a capture, or the errors of δ that were measured after it."""
    errors = delta_file.place(folder)
    return any(folder.glob(_LAYERS)) or (errors.is_file() and errors.stat().st_size > 0)


def calls_of_run(
    folder: RunFolder, step: int | None, sequences: int | None, device: torch.device
) -> tuple[list[AttentionCall], AttentionVariant]:
    """Return the calls of :func:`batches_of_run` at once, one for each layer."""
    batches, attention = batches_of_run(folder, step, sequences, device)
    return [joined(layer) for layer in zip(*batches, strict=True)], attention


def batches_of_run(
    folder: RunFolder, step: int | None, sequences: int | None, device: torch.device
) -> tuple[Iterator[list[AttentionCall]], AttentionVariant]:
    """Run forward and backward with the weights of a run of this package.

    The weights are those of its newest checkpoint up to a step, or else the initial ones. Calls tell which, as their
    ``step``.

    Args:
        step: None is the last one, or the onset of an explosion.
        sequences: of the step's batch and of those that follow; None is as many as have 32,768 tokens.

    Returns:
        For each 32,768 tokens a call of each layer, and the run's attention.

    Raises:
        UserError: the tape or the data are missing, or the run has no such step.
    """
    tape = Tape.read(folder.tape, until_broken=True)
    outcome = folder.read_outcome() if folder.outcome.is_file() else {}
    last = tape.steps - 1 if outcome.get("onset_step") is None else min(tape.steps - 1, int(outcome["onset_step"]))
    if step is not None and not 0 <= step < tape.steps:
        raise UserError(f"--step {step}: {folder.path} has steps 0 to {tape.steps - 1:,}")
    wanted_step = last if step is None else step
    newest = next((one.step for one in verified(folder.checkpoints, notify) if one.step <= wanted_step), 0)
    if wanted_step and not newest:
        notify(f"{folder.path}: no checkpoint up to step {wanted_step:,}; its initial weights are diagnosed")
    config = _replaying(folder, newest)
    plan = settle(config, None, Ranks(), device)
    parts = build(plan)
    if parts.start.step:
        parts.step.load_state(parts.start.tensors)
    length, batch_size = config.model.context, config.train.batch_size
    at_once = -(-_TOKENS // length)
    wanted = sequences or at_once
    steps = range(parts.start.step, min(tape.steps, parts.start.step + -(-wanted // batch_size)))
    windows = np.concatenate([parts.order.windows(at)[:, 0].reshape(-1) for at in steps])[:wanted]

    def batches() -> Iterator[list[AttentionCall]]:
        for start in range(0, len(windows), at_once):
            batch = gather_windows(parts.tokens.train, windows[start : start + at_once], length).to(device)
            micro = batch.split(config.train.micro_batch_size or batch_size)
            found = [_calls(parts.step, config, some, parts.start.step) for some in micro]
            yield [joined(layer) for layer in zip(*found, strict=True)]

    return batches(), config.attn


def _calls(step: OptimizerStep, config: Config, sequences: torch.Tensor, number: int) -> list[AttentionCall]:
    """Return the call of each layer on sequences [N, T + 1], with dO as their part of a step's loss."""
    device, precision = sequences.device, config.train.precision
    observe = InstrumentedPass(step.model, sequences, config.train.batch_size, device, "data", precision)
    seen = observe(sequences, step.seed_and_step)
    return [
        AttentionCall(
            q=seen.q[at],
            k=seen.k[at],
            v=seen.v[at],
            grad_out=seen.grad_out[at].to(seen.out.dtype),
            out=seen.out[at],
            grad_q=seen.grad_q[at],
            grad_k=None,
            grad_v=None,
            is_causal=True,
            scale=seen.scale,
            layer=at + 1,
            step=number,
            attention=config.attn.name,
        )
        for at in range(config.model.n_layer)
    ]


def _replaying(folder: RunFolder, step: int) -> Config:
    values = folder.read_config()
    values["probes"] = {**values["probes"], "attention": [], "weights_against": None}
    values["checkpoints"] = {**values["checkpoints"], "interval": 0}
    values["train"] = {**values["train"], "compile": False, "device": "auto", "threads": None}
    config = build_config(values, CONFIGS / "attn")
    return dataclasses.replace(config, replay=str(folder.path), from_step=step, resume=None)


def function_of_layer(variant: AttentionVariant, layer: int) -> Function:
    """Return what a variant computes in a layer, as a function."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
        if variant.groups(layer, q.shape[1])[0][0].kernel == "sdpa":
            groups = q.shape[1] != k.shape[1]
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, scale=scale, enable_gqa=groups
            )
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        key = torch.zeros(2, dtype=torch.int64, device=q.device)
        return flash_fwd(q, k, v, variant, layer=layer, seed_and_step=key, causal=is_causal, scale=scale)[0]

    return function


def function_named(word: str) -> Function:
    """Return an attention that is no variant, for any number of heads of keys: ``sdpa:BACKEND``, ``FILE.py:FUNCTION``.

    Raises:
        UserError: the word names none.
    """
    engine = engines_named([word], [], torch.device("cpu"))[0]
    if not isinstance(engine, Called):
        raise UserError(f"--attention {word}: an emulation; give a variant, sdpa:BACKEND, or FILE.py:FUNCTION")

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return engine.call(q, k, v, is_causal, scale)[0]

    return function


def batches_of_model(
    name: str, text: str, sequences: int, tokens: int, device: torch.device, functions: Sequence[str] = ()
) -> Iterator[list[AttentionCall]]:
    """Run a causal language model of Transformers forward and backward on a text, under BF16 autocast.

    Args:
        name: folder or name, as ``from_pretrained`` takes it.
        text: cut into sequences of so many tokens.

    Yields:
        For each 16 sequences a call of each layer. dO is their part of the mean loss of all.

    Raises:
        UserError: Transformers is not installed, there is no such model, or the text is too short.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise UserError(f"{name}: needs the package transformers; pip install transformers") from None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        model.to(device).eval()  # without dropout
    except Exception as error:  # whatever is wrong with somebody's folder
        first, _, rest = str(error).strip().partition("\n")
        reason = f"{first} {rest}" if first.rstrip().endswith(":") else first
        raise UserError(f"{name}: no run, no capture and no model of Transformers: {reason}") from error
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise UserError(f"--tokens {tokens}: {name} takes sequences of at most {longest}; give fewer")
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    if len(ids) < tokens:
        raise UserError(f"--text: {len(ids):,} tokens, fewer than one sequence of {tokens:,}; give more, or --tokens")
    count = min(sequences, len(ids) // tokens)
    for batch in ids[: count * tokens].reshape(count, tokens).to(device).split(MODEL_BATCH):
        interceptor = Interceptor(len(batch), functions)
        end = interceptor.start()
        try:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(batch, labels=batch).loss * (len(batch) / count)
            interceptor.stop()
            loss.backward()
        finally:
            end()
        calls = [one for layer, call in enumerate(interceptor.calls, 1) if (one := call.with_gradients(layer, 0))]
        if not calls:
            why = "; ".join(sorted(interceptor.missed)) or "it calls none that is known"
            raise UserError(f"{name}: no attention was recorded ({why}); name it with --function MODULE:NAME")
        interceptor.calls.clear()
        yield calls
