"""Inputs of ``flashpoint deviation`` that were captured: from a run, or in files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.errors import UserError
from flashpoint.lab.deviation.defaults import SEEDS
from flashpoint.lab.deviation.drawn_inputs import DRAWN
from flashpoint.lab.deviation.emulated import Inputs
from flashpoint.lab.deviation.sweep import Given
from flashpoint.lab.trained_calls import calls_of_run
from flashpoint.runs.folder import RunFolder
from flashpoint.watching.captures import read_calls


def captured_path(word: str) -> Path:
    """Return the path of a run or capture, which may be a run's name under runs/.

    Raises:
        UserError: there is none.
    """
    path = next((path for path in (Path(word), Path("runs") / word) if word and path.exists()), None)
    if path is None:
        raise UserError(f"--inputs {word}: no run, no capture and no such file; give one, or {', '.join(DRAWN)}")
    return path


def captured_inputs(
    path: Path,
    steps: Sequence[int],
    layers: Sequence[int],
    sequences: int | None,
    causal: bool | None,
    device: torch.device,
) -> list[Given]:
    """Return Q, K, V and dO of each step and layer that are asked for.

    Args:
        path: a run, a folder of captures, or a .safetensors file.
        steps: none is the last that there is.
        layers: none is all.
        sequences: the first so many; None is :data:`SEEDS` of a run, all of captures.
        causal: None is as it was when they were captured.

    Raises:
        UserError: there are none, a layer is not there, or a value is not finite.
    """
    found: dict[str, Given] = {}
    known: dict[int, None] = {}
    for step in steps or (None,):
        for call in _calls(path, step, sequences, device):
            known[call.layer] = None
            if not layers or call.layer in layers:
                given = _given(path, call, sequences, causal)
                found[given.name] = given
    if missing := [layer for layer in layers if layer not in known]:
        raise UserError(f"--layer {missing[0]}: {path} has layers {', '.join(map(str, known))}; give some of these")
    return list(found.values())


def _calls(path: Path, step: int | None, sequences: int | None, device: torch.device) -> Iterator[AttentionCall]:
    if not RunFolder(path).tape.is_file():
        yield from read_calls(path, step)
        return
    yield from calls_of_run(RunFolder(path), step, sequences or SEEDS, device)[0]


def _given(path: Path, call: AttentionCall, sequences: int | None, causal: bool | None) -> Given:
    name = f"L{call.layer} step {call.step}"
    if not call.form.is_plain or call.form.sink is not None or call.v.shape[2:] != call.q.shape[2:]:
        raise UserError(f"{path}: {name} is no softmax(QKᵀ·scale)V of one length and width; give other inputs")
    groups = call.groups
    tensors = {
        "q": call.q,
        "k": call.k.repeat_interleave(groups, 1),
        "v": call.v.repeat_interleave(groups, 1),
        "grad_out": call.grad_out,
    }
    inputs = Inputs(**tensors, scale=call.form.scale).map(lambda x: x[:sequences].double())
    for tensor in tensors:
        if not getattr(inputs, tensor).isfinite().all():
            raise UserError(f"{path}: {tensor} of {name} holds values that are not finite; give finite ones")
    return Given(name, inputs, call.form.is_causal if causal is None else causal)
