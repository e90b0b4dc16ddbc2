"""Tells where NaN or infinity came from in a watched loop, from what was not finite in two steps in a row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from flashpoint.errors import counted, listed
from flashpoint.runs.outcome import NonfiniteOrigin, Where
from flashpoint.watching.nonfinite_numbers import Asked, SeenCall, StepNumbers

_FORWARD, _BACKWARD = ("q", "k", "v", "O"), ("dO", "dQ", "dK", "dV")
_TOLD, _KEPT = 3, 8
"""Names of parameters that a sentence has, and that are written down."""
_OTHERS = "; of several micro-batches the first is looked at"
_GONE = "were missing or all 0"
_GROUPS = (("q", "k", "v"), ("O",), ("dO",), ("dQ", "dK", "dV"))
"""Tensors of a call that come together, in the order of time."""


def find_origin(before: StepNumbers | None, now: StepNumbers, usual: Collection[tuple[int, str]]) -> NonfiniteOrigin:
    """Return where NaN or infinity came from.

    Args:
        before: a step whose loss is not finite, or after which weights are not; None where the loop's first step had
            such weights.
        now: the step after it.
        usual: forward tensors by number of the call and name that are not finite in steps without any harm, as rows
            are in which a mask leaves no key.
    """
    if before is None:
        text = (
            f"{_some(now.weights)} held {_what(now.weights)} before the first step that was watched. Look at the "
            "checkpoint that was loaded, or at the initialisation."
        )
        return _origin(now.step, "start", ("weights",), text, parameters=now.weights, lasting=True)
    lasting = bool(now.weights)
    found = _in_forward(before, usual, lasting) or _in_backward(before, lasting)
    if found is None:
        text = (
            f"the optimizer step made {_some(now.weights)} {_what(now.weights)}. Its loss, weights and gradients were "
            "finite. Look at the learning rate, the optimizer's state, and what else the loop does there to gradients "
            "or weights, as clipping."
        )
        if before.lacks_gradients:
            text = (
                f"{_some(now.weights)} held {_what(now.weights)} after it, and its loss was finite. The backward pass "
                f"or the optimizer step made them so: at watched.step gradients {_GONE}. Call it after the backward "
                "pass, and before optimizer.step and zero_grad."
            )
        return _origin(before.step, "optimizer", ("weights",), text, parameters=now.weights, lasting=True)
    return found.model_copy(update={"text": f"{found.text} {_after(before, now)}", "lasting": lasting})


def with_numbers(
    now: StepNumbers, asked: Asked, numbers: Sequence[Tensor], usual_weights: Collection[str]
) -> StepNumbers:
    """Return a step with what is not finite in it, by its numbers that have arrived.

    Args:
        usual_weights: parameters that count as finite.
    """
    rest = iter(numbers)
    began = _named(asked.names, asked.began, rest)
    weights = _named(asked.names, asked.weights, rest)
    gradients = _named(asked.names, asked.gradients, rest)
    projected = {name: next(rest) for name in asked.projected}
    known = [asked.names[place] for places in asked.gradients for place in places]
    return dataclasses.replace(
        now,
        weights={name: value for name, value in weights.items() if name not in usual_weights},
        gradients=gradients,
        began=began if asked.began else None,
        finite_gradients=[name for name in known if name not in gradients],
        by_head={name: _by_layer(largest) for name, largest in projected.items()},
        heads=max((one.shape[-1] for name, one in projected.items() if name != "other"), default=0),
        tensors=[(call, name, heads) for call, name in asked.seen if (heads := _wrong_heads(next(rest))) is not None],
    )


def _after(before: StepNumbers, now: StepNumbers) -> str:
    """Return what became of the weights."""
    if not now.weights:
        return "The weights were finite after it."
    gradients = "were not finite" if before.gradients else _GONE if before.lacks_gradients else "were finite"
    return (
        f"Before step {now.step:,}'s forward pass {_some(now.weights)} held {_what(now.weights)}: the optimizer step "
        f"of step {before.step:,} made them so, and its gradients {gradients}."
    )


def _in_forward(step: StepNumbers, usual: Collection[tuple[int, str]], lasting: bool) -> NonfiniteOrigin | None:
    failed = step.loss is not None and not math.isfinite(step.loss)
    if failed and step.batch:
        text = f"the batch holds NaN or infinity, and the loss is {step.loss}."
        return _origin(step.step, "batch", ("batch",), text)
    seen = [one for one in step.tensors if one[1] in _FORWARD and (one[0].number, one[1]) not in usual]
    if seen and (failed or step.gradients or (lasting and step.lacks_gradients)):
        return _of_call(step, seen)
    if not failed:
        return None
    text = f"the loss is {step.loss}, and the weights were finite before the forward pass."
    if step.calls:
        text += (
            f" So were q, k, v and O of {counted('attention', len(step.calls))} in it. It came behind the last one, or "
            f"in the loss{_OTHERS}."
        )
    else:
        text += f" {_unobserved(step, lasting)}"
    return _origin(step.step, "forward", ("loss",), text)


def _in_backward(step: StepNumbers, lasting: bool) -> NonfiniteOrigin | None:
    seen = [one for one in step.tensors if one[1] in _BACKWARD]
    if seen and (step.gradients or step.lacks_gradients):
        return _of_call(step, seen)
    if not step.gradients:
        return None
    loss = "unknown" if step.loss is None else f"{step.loss:.4g}"
    text = (
        f"gradients of {_some(step.gradients, len(step.gradients) + len(step.finite_gradients))} held "
        f"{_what(step.gradients)}, and the loss was {loss}: the backward pass made it."
    )
    if step.calls:
        calls = counted("attention", len(step.calls))
        text += f" All tensors of {calls} were finite: it came outside of them{_OTHERS}."
        return _origin(step.step, "backward", ("gradients",), text, parameters=step.gradients)
    if (found := _of_projections(step)) is not None:
        return found
    *_, last = step.gradients
    finite = f", and gradients of {_some(step.finite_gradients)} were finite" if step.finite_gradients else ""
    text += f" The last of them in the model's order is {last}{finite}. {_unobserved(step, lasting)}"
    return _origin(step.step, "backward", ("gradients",), text, parameters=step.gradients)


def _unobserved(step: StepNumbers, lasting: bool) -> str:
    """Return how the layer is found of a step whose attention was not observed; a loop whose weights stayed finite has
    nothing to repeat."""
    text = "No layer is known, as the attention was not observed in this step."
    if lasting:
        text += (
            f" Go on from a checkpoint before it, and call watched.capture() before step {step.step:,}'s forward pass."
        )
    return text


def _of_projections(step: StepNumbers) -> NonfiniteOrigin | None:
    """Return the attention in whose backward pass it came, by the gradients of W_Q and W_K; None where they do not
    tell. A dO that is not finite spoils all heads of dQ, dK and dV: the output projection mixes heads. So where some
    are finite, dO was."""
    layers = {layer for of_layer in step.by_head.values() for layer in of_layer}
    if not layers:
        return None
    layer = max(layers)
    wrong = {name: of_layer.get(layer, ()) for name, of_layer in step.by_head.items()}
    of_q_and_k = [name for name in ("dQ", "dK") if wrong.get(name)]
    whole = all(len(wrong.get(name, ())) == step.heads for name in ("dQ", "dK"))
    if whole and ("other" not in wrong or wrong["other"]):
        return None
    tensors = (*of_q_and_k, *(("dV",) if wrong.get("other") else ()))
    heads = tuple(sorted({head for name in of_q_and_k for head in wrong[name]}))
    matrices = {"dQ": "W_Q", "dK": "W_K", "dV": "the rest of its fused weight"}
    where = f"layer {layer}{f', {_heads(heads)}' if heads else ''}"
    text = (
        f"the gradient of {listed([matrices[name] for name in tensors])} of {where} held {_what(step.gradients)}, "
        f"and others of the layer did not. So the backward pass of its attention made it in {listed(tensors)}, or the "
        "product with the layer's input overflowed."
    )
    return _origin(step.step, "backward", tensors, text, layer=layer, heads=heads, parameters=step.gradients)


def _of_call(step: StepNumbers, seen: Sequence[tuple[SeenCall, str, tuple[int, ...]]]) -> NonfiniteOrigin:
    """Return what came first of tensors that are not finite, in the order of time."""
    call, first, _ = seen[0]
    group = next(group for group in _GROUPS if first in group)
    together = {name: heads for one, name, heads in seen if one is call and name in group}
    tensors = tuple(name for name in group if name in together)
    heads = tuple(sorted({head for some in together.values() for head in some}))
    place = f"layer {call.layer}" if call.layer is not None else f"attention {call.number} of the forward pass"
    told = f"{listed(tensors)} of {place}{f', {_heads(heads)}' if heads else ''} held NaN or infinity first"
    text = f"{told}. {_why(call, group, step)}"
    if call.left_out:
        text += f" This call is not recorded, and not judged ({call.left_out})."
    where: Where = "forward" if first in _FORWARD else "backward"
    return _origin(
        step.step, where, tensors, text, layer=call.layer, call=call.number, heads=heads, parameters=step.gradients
        if where == "backward" else (),
    )  # fmt: skip


def _why(call: SeenCall, group: Sequence[str], step: StepNumbers) -> str:
    """Return what lies between the tensors before, which were finite, and the first that are not."""
    last = max(one.number for one in step.calls)
    match group[0]:
        case "q":
            between = f"O of attention {call.number - 1}" if call.number > 1 else "the batch"
            part = "MLP, norm, or " if call.number > 1 else "embedding, norm, or "
            return f"It came between {between} and these, in {part}projection. The weights were finite."
        case "O":
            scores = ", whose scores overflow above 65,504 in FP16" if call.dtype == torch.float16 else ""
            mask = ", or its mask or bias holds NaN" if call.adds else ""
            return f"q, k and v were finite: the attention made it{scores}{mask}."
        case "dO":
            behind = "the loss" if call.number == last else f"dQ, dK and dV of attention {call.number + 1}"
            return f"What was seen of the forward pass was finite. It came in the backward pass, behind {behind}."
    others = [name for name in group if name not in {other for one, other, _ in step.tensors if one is call}]
    finite = ["q", "k", "v", "O", "dO", *others]
    return f"{listed(finite)} were finite: the backward pass of this attention made it."


def _origin(
    step: int,
    where: Where,
    tensors: tuple[str, ...],
    text: str,
    *,
    layer: int | None = None,
    call: int | None = None,
    heads: tuple[int, ...] = (),
    parameters: Collection[str] = (),
    lasting: bool = False,
) -> NonfiniteOrigin:
    return NonfiniteOrigin(
        step=step,
        where=where,
        tensors=tensors,
        layer=layer,
        call=call,
        heads=heads,
        parameters=tuple(parameters)[:_KEPT],
        lasting=lasting,
        text=text,
    )


def _what(values: Mapping[str, float]) -> str:
    return "NaN" if any(map(math.isnan, values.values())) else "infinity"


def _some(names: Collection[str], total: int = 0) -> str:
    """Return the first names, and how many there are."""
    first = list(names)[:_TOLD]
    more = len(names) - len(first)
    told = ", ".join(first) + (f" and {more:,} more" if more else "")
    return f"{told} ({len(names):,} of {total:,})" if total else told


def _heads(heads: Sequence[int]) -> str:
    return f"head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}"


def _named(names: Sequence[str], groups: Sequence[Sequence[int]], numbers: Iterator[Tensor]) -> dict[str, float]:
    """Return what is not finite by the name of its parameter, in the model's order."""
    found = {place: value for places in groups for place, value in zip(places, next(numbers).tolist(), strict=True)}
    return {names[place]: value for place, value in sorted(found.items()) if not math.isfinite(value)}


def _wrong_heads(numbers: Tensor) -> tuple[int, ...] | None:
    """Return the heads from 1 whose number is not finite, none where there is one number for all; None without any."""
    wrong = (~numbers.isfinite()).nonzero().flatten().tolist()
    return None if not wrong else () if len(numbers) == 1 else tuple(head + 1 for head in wrong)


def _by_layer(largest: Tensor) -> dict[int, tuple[int, ...]]:
    """Return heads from 1, by layer from 1, in which numbers [layers, H] are not finite."""
    heads: dict[int, list[int]] = {}
    for layer, head in (~largest.isfinite()).nonzero().tolist():
        heads.setdefault(layer + 1, []).append(head + 1)
    return {layer: tuple(some) for layer, some in heads.items()}
