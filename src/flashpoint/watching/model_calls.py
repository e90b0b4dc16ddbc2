"""Attention calls of a causal language model of Transformers that reads a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.errors import UserError
from flashpoint.watching.functions import NamedFunction
from flashpoint.watching.interception import intercept
from flashpoint.watching.interceptor import Interceptor

MODEL_BATCH = 16
"""Sequences of a text that are held at once."""


def batches_of_model(
    name: str, text: str, sequences: int, tokens: int, device: torch.device, functions: Sequence[str]
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
    named = [NamedFunction.of(word) for word in functions]
    tokenizer, model = _loaded(name, device)
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise UserError(f"--tokens {tokens}: {name} takes sequences of at most {longest}; give fewer")
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    if len(ids) < tokens:
        raise UserError(f"--text: {len(ids):,} tokens, fewer than one sequence of {tokens:,}; give more, or --tokens")
    count = min(sequences, len(ids) // tokens)
    for batch in ids[: count * tokens].reshape(count, tokens).to(device).split(MODEL_BATCH):
        yield _calls(name, model, batch, len(batch) / count, named)


def _loaded(name: str, device: torch.device) -> tuple[Any, Any]:
    """Return the tokenizer and the model, in FP32 and without dropout."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise UserError(f"{name}: needs the package transformers; pip install transformers") from None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False, dtype=torch.float32)
        return tokenizer, model.to(device).eval()
    except Exception as error:  # whatever is wrong with somebody's folder
        if "trust_remote_code" in str(error):
            told = "has code of its own, which is not run; load it in a loop of your own, and watch that"
            raise UserError(f"{name}: {told} (docs/watching.md, A checkpoint alone)") from error
        first, _, rest = str(error).strip().partition("\n")
        reason = f"{first} {rest}" if first.rstrip().endswith(":") else first
        raise UserError(f"{name}: no run, no capture and no model of Transformers: {reason}") from error


def _calls(
    name: str, model: Any, batch: Tensor, share: float, functions: Sequence[NamedFunction]
) -> list[AttentionCall]:
    """Return the call of each layer on sequences [N, T], whose loss counts as a share of the mean loss."""
    interceptor = Interceptor(len(batch))
    end_of_modules, end = interceptor.only_inside(model), intercept(interceptor, functions)
    try:
        with torch.autocast(batch.device.type, torch.bfloat16):
            loss = model(batch, labels=batch).loss * share
        interceptor.stop()
        loss.backward()
    finally:
        end()
        end_of_modules()
    calls = [one for layer, call in enumerate(interceptor.calls, 1) if (one := call.with_gradients(layer, 0))]
    if not calls:
        why = "; ".join(sorted(interceptor.calls.missed)) or "it calls none that is known"
        raise UserError(f"{name}: no attention was recorded ({why}); name it with --function MODULE:NAME")
    if not any(call.form.is_causal for call in calls):
        raise UserError(
            f"{name}: its attention is not causal, and --text takes the loss of the next token, which such a model "
            "sees; run it in your loop with flashpoint.watch (docs/watching.md, A checkpoint alone)"
        )
    interceptor.calls.clear()
    return calls
