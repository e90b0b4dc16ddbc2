"""Where attention calls come from that no capture holds: a run of this package, a model of Transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from flashpoint.diagnosis.call import AttentionCall, joined
from flashpoint.diagnosis.probe import Function
from flashpoint.errors import UserError, notify
from flashpoint.files import CONFIGS
from flashpoint.lab.build_config import build_config
from flashpoint.lab.config import Config
from flashpoint.lab.data.batches import gather_windows
from flashpoint.lab.data.tape import Tape
from flashpoint.lab.deviation.engines import Called, engines_named
from flashpoint.lab.probes.instrumented import InstrumentedPass
from flashpoint.lab.training.checkpoints import verified
from flashpoint.lab.training.parallel import Ranks
from flashpoint.lab.training.parts import build
from flashpoint.lab.training.plan import settle
from flashpoint.lab.training.step import OptimizerStep
from flashpoint.numerics.dispatch import flash_fwd
from flashpoint.numerics.variant import AttentionVariant, kernel_in
from flashpoint.runs.folder import RunFolder
from flashpoint.watching.functions import NamedFunction
from flashpoint.watching.interception import intercept
from flashpoint.watching.interceptor import Interceptor

TOKENS_AT_ONCE = 32_768
"""Tokens of a run that are held at once, and that it is diagnosed on without a word: the bias of δ is small."""
MODEL_BATCH = 16
"""Sequences of a text that are held at once."""


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
    newest = next((one.step for one in verified(folder.checkpoints, notify, up_to=wanted_step)), 0)
    if wanted_step and not newest:
        notify(f"{folder.path}: no checkpoint up to step {wanted_step:,}; its initial weights are taken")
    config = _replaying(folder, newest)
    plan = settle(config, None, Ranks(), device)
    parts = build(plan)
    if parts.start.step:
        parts.optimizer_step.load_state(parts.start.take_tensors())
    length, batch_size = config.model.context, config.train.batch_size
    at_once = -(-TOKENS_AT_ONCE // length)
    wanted = sequences or at_once
    steps = range(parts.start.step, min(tape.steps, parts.start.step + -(-wanted // batch_size)))
    windows = np.concatenate([parts.order.windows(at)[:, 0].reshape(-1) for at in steps])[:wanted]

    def batches() -> Iterator[list[AttentionCall]]:
        for start in range(0, len(windows), at_once):
            batch = gather_windows(parts.tokens.train, windows[start : start + at_once], length).to(device)
            micro = batch.split(config.train.sequences)
            found = [_calls(parts.optimizer_step, config, some, parts.start.step) for some in micro]
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
        if kernel_in(variant, layer) == "sdpa":
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
        UserError: Transformers is not installed, there is no such model, it is not causal, or the text is too short.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise UserError(f"{name}: needs the package transformers; pip install transformers") from None
    named = [NamedFunction.of(word) for word in functions]
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
        interceptor = Interceptor(len(batch))
        end = intercept(interceptor, named)
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
        if not any(call.is_causal for call in calls):
            raise UserError(
                f"{name}: its attention is not causal, and --text takes the loss of the next token, which such a model "
                "sees; run it in your loop with flashpoint.watch (docs/own_run.md, A checkpoint alone)"
            )
        interceptor.calls.clear()
        yield calls
