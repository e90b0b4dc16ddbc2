"""What ``flashpoint diagnose`` is given: calls of each layer, further sequences, and the attention to call anew."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_bias import DeltaSample, delta_sample, joined_samples
from flashpoint.diagnosis.measure_table import SEQUENCES
from flashpoint.diagnosis.verdict import Diagnosis, diagnose
from flashpoint.errors import UserError
from flashpoint.files import content
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.migrations import UNSEEN
from flashpoint.watching.captures import is_capture, read_calls, read_delta, read_samples

if TYPE_CHECKING:
    from flashpoint.diagnosis.other_attention import OtherAttention
    from flashpoint.diagnosis.probe import Function
    from flashpoint.numerics.variant import AttentionVariant

T = TypeVar("T")
_MOST_MB = 1000
"""Of a text."""
_FEW = 16
"""Sequences of a text on a CPU."""
_MORE = "--sequences {}"
"""The option by which more sequences are read."""


@dataclass(frozen=True)
class Inputs:
    """What is diagnosed.

    Attributes:
        calls: one of each layer.
        later: the calls of further sequences, a few sequences at a time; the bias of δ is measured in them.
        samples: the errors of δ in further sequences, by layer, as the recorded attention made them, where they have
            been measured before.
        anew: the attention to call anew; None where the results are judged that were recorded.
        weights: which weights the calls are of.
        more: how a user gets more sequences, with ``{}`` for their number.
    """

    calls: list[AttentionCall]
    later: Iterator[list[AttentionCall]]
    samples: dict[int, DeltaSample]
    anew: OtherAttention | None
    weights: str
    more: str

    def of_layers(self, layers: Collection[int]) -> Inputs:
        """Return the inputs of some layers; none is all.

        Raises:
            UserError: one of them is not there.
        """
        _refuse_missing(layers, [call.layer for call in self.calls])
        return dataclasses.replace(self, calls=[call for call in self.calls if not layers or call.layer in layers])

    def diagnoses(self, device: torch.device) -> list[Diagnosis]:
        """Diagnose each layer.

        Raises:
            ValueError: no attention is named, and the calls hold no O.
            Exception: of the attention that is called anew.
        """
        (found,) = self.diagnoses_of([self.anew], device)
        if isinstance(found, Exception):
            raise found
        return found

    def diagnoses_of(
        self, attentions: Sequence[OtherAttention | None], device: torch.device
    ) -> list[list[Diagnosis] | Exception]:
        """Diagnose each layer with each attention; None is the one whose results were recorded. The error stands in the
        place of one that does not run."""
        judged = [_Judged(one, {} if one else self.samples) for one in attentions]
        layers = [call.layer for call in self.calls]
        unit = "layers" if len(judged) == 1 else "layers × attentions"
        with _progress_bar(unit, len(layers) * len(judged)) as advance:
            for batch in self.later:
                for call in (call.to(device) for call in batch if call.layer in layers):
                    for one in judged:
                        one.measure(call)
                if all(one.error for one in judged):
                    break
            for call in (call.to(device) for call in self.calls):
                for one in judged:
                    one.diagnose(call)
                    advance()
        return [one.error or one.diagnoses for one in judged]


@contextlib.contextmanager
def _progress_bar(unit: str, total: int) -> Iterator[Callable[[], None]]:
    """Show on a terminal, while the block runs, how many of these are done: the block calls what it is given after
    each. A log gets nothing."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (unit, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, refresh_per_second=2, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


class _Judged:
    """An attention, and what was found of it until it failed."""

    def __init__(self, anew: OtherAttention | None, samples: Mapping[int, DeltaSample]) -> None:
        self.error: Exception | None = None
        self.diagnoses: list[Diagnosis] = []
        self._anew = anew
        self._samples = {layer: [sample] for layer, sample in samples.items()}

    def measure(self, call: AttentionCall) -> None:
        """Measure the error of δ in a call."""
        found = self._found(call, lambda function, _: delta_sample(call, function))
        if found is not None:
            self._samples.setdefault(call.layer, []).append(found)

    def diagnose(self, call: AttentionCall) -> None:
        """Diagnose a layer by its call and by what was measured before."""
        samples = self._samples.get(call.layer)
        sample = joined_samples(samples) if samples else None
        found = self._found(call, lambda function, declared: diagnose(call, function, declared, sample))
        if found is not None:
            self.diagnoses.append(found)

    def _found(self, call: AttentionCall, find: Callable[[Function | None, AttentionVariant | None], T]) -> T | None:
        if self.error is None:
            try:
                if self._anew is None:
                    return find(None, None)
                with self._anew.mode():
                    return find(*self._anew.of(call))
            except Exception as error:  # an attention that does not run must not cost the others
                self.error = error
        return None


def delta_of(
    what: str,
    attention: str | None,
    text: Path | None,
    layers: Collection[int],
    *,
    step: int | None,
    sequences: int | None,
    functions: Sequence[str],
    **_reading: int,
) -> dict[int, DeltaSample]:
    """Return the errors of δ, by layer, of a capture whose tensors have been deleted; empty of anything else.

    Raises:
        UserError: an option needs the tensors, or a layer is not there.
    """
    path = place(what)
    if text is not None or not path.is_dir() or RunFolder(path).tape.is_file():
        return {}
    samples = read_delta(path, step)
    if not samples:
        return {}
    _refuse(what, path, text, step, functions)
    for option, value in (("--attention", attention), ("--sequences", sequences)):
        if value is not None:
            raise UserError(f"{option} {value}: the tensors of {what} have been deleted; drop it: δ alone is left")
    _refuse_missing(layers, samples)
    return {layer: sample for layer, sample in samples.items() if not layers or layer in layers}


def _refuse_missing(layers: Collection[int], known: Collection[int]) -> None:
    if missing := [layer for layer in layers if layer not in known]:
        raise UserError(f"--layer {missing[0]}: there are layers {', '.join(map(str, known))}")


def inputs_of(
    what: str,
    attention: str | None,
    text: Path | None,
    device: torch.device,
    *,
    tokens: int,
    sequences: int | None,
    step: int | None,
    functions: Sequence[str],
) -> Inputs:
    """Return what the command's arguments name.

    Raises:
        UserError: they name nothing that can be diagnosed.
    """
    anew = None
    if attention is not None:
        from flashpoint.diagnosis.other_attention import attention_named

        anew = attention_named(attention)
    path = place(what)
    _refuse(what, path, text, step, functions)
    reads = text is not None or RunFolder(path).tape.is_file()
    if sequences is not None and path.exists() and not reads:
        raise UserError(
            f"--sequences {sequences}: {what} has the sequences that were captured; "
            f"watched.capture(sequences={sequences}) in the loop measures δ on as many more"
        )
    if sequences is None and device.type == "cuda":  # whose FP64 reads them fast
        sequences = SEQUENCES
    if text is not None:
        from flashpoint.watching.model_calls import batches_of_model

        later = batches_of_model(what, _read(text), sequences or _FEW, tokens, device, functions)
        return Inputs(next(later), later, {}, anew, weights=what, more=_MORE)
    if not path.exists():
        raise UserError(
            f"{what}: no capture and no run there; give its folder, e.g. runs/NAME, or --text FILE with a model of "
            "Transformers"
        )
    return _of_own_run(what, path, anew, device, step, sequences) if reads else _of_captures(path, anew, step)


def _of_own_run(
    what: str, path: Path, anew: OtherAttention | None, device: torch.device, step: int | None, sequences: int | None
) -> Inputs:
    """Return what a checkpoint of a run of ``flashpoint train`` makes of the sequences that came next."""
    from flashpoint.extras import from_lab

    batches_of_run = from_lab("trained_calls:batches_of_run", f"{what}, a run of flashpoint train")
    later, own = batches_of_run(RunFolder(path), step, sequences, device)
    calls = next(later)
    if anew is None:
        from flashpoint.diagnosis.other_attention import of_variant

        anew = of_variant(own)
    after = calls[0].step
    return Inputs(calls, later, {}, anew, f"weights after {after:,} steps" if after else "initial weights", _MORE)


def _of_captures(path: Path, anew: OtherAttention | None, step: int | None) -> Inputs:
    calls = read_calls(path, step)
    if any(call.attention == UNSEEN for call in calls):  # of another program
        from flashpoint.watching.agreement import as_out_shows

        calls = [as_out_shows(call, str(path)) if call.attention == UNSEEN else call for call in calls]
    samples, more = {}, "watched.capture(sequences={}) in the loop measures δ on as many"
    if anew is None:
        samples = read_samples(path, step, calls)
    else:  # what was measured after the capture is of the attention that trained
        more += ", of the attention that trains"
    return Inputs(calls, iter(()), samples, anew, f"step {calls[0].step:,}", more)


def _refuse(what: str, path: Path, text: Path | None, step: int | None, functions: Sequence[str]) -> None:
    """Raise UserError for options that what is given has no use for."""
    folder, captured = RunFolder(path), path.is_file() or is_capture(path)
    if text is not None and (captured or folder.manifest.is_file()):
        raise UserError(f"--text: {what} is a run or a capture, which reads none; drop it, or give a model")
    if step is not None and (captured or text is not None):
        raise UserError(f"--step {step}: {what} is no run; drop it, or give the run's folder")
    if functions and text is None:
        raise UserError(
            f"--function {functions[0]}: of a model, which needs --text; --attention names one to call anew"
        )


def _read(text: Path) -> str:
    """Return a text that is in UTF-8.

    Raises:
        UserError: it is not.
    """
    try:
        return content(text, _MOST_MB).decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"--text {text}: no UTF-8, from byte {error.start:,} on ({byte:#04x}); give a text, "
            f"or convert it with iconv -f ITS_ENCODING -t UTF-8"
        ) from None


def place(what: str) -> Path:
    """Return the path of a run or capture; runs are in ``runs/``, too."""
    return Path(what) if Path(what).exists() else Path("runs", what)
