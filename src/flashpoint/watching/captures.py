"""Attention calls, and errors of δ, as captures hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_bias import DeltaSample
from flashpoint.errors import UserError, notify
from flashpoint.files import open_tensors
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.outcome import NO_LOSS
from flashpoint.runs.subfolders import LAYERS, CaptureFolder, by_step
from flashpoint.watching import delta_collection


class NoTensors(UserError):
    """There are no tensors of an attention."""


def read_calls(path: Path, step: int | None = None) -> list[AttentionCall]:
    """Read a captured file, a folder of them, or those that a watched run wrote last, or at ``step``.

    Raises:
        NoTensors: there are none.
        UserError: one cannot be read, or ``step`` is of no use.
    """
    if step is not None and (path.is_file() or CaptureFolder(path).layers):
        raise UserError(f"--step {step}: {path} is one capture, of one step; leave --step out")
    if path.is_file() and path != CaptureFolder(path.parent).batch:
        return [AttentionCall.read(path)]
    folder = path.parent if path.is_file() else capture_folder(path, step)
    files = CaptureFolder(folder).layers
    if not files:
        raise NoTensors(_why_none(path, folder))
    _tell_others(path, step)
    calls = [AttentionCall.read(file) for file in files]
    if missing := {layer for call in calls for layer in call.together} - {call.layer for call in calls}:
        told = ", ".join(map(str, sorted(missing)))
        notify(f"{folder}: layers {told} are missing: the disk was full, or their files have been deleted")
    return calls


def _why_none(path: Path, folder: Path) -> str:
    """Return why there are no tensors of an attention, and what to do.

    Args:
        path: as the user gave it.
        folder: in which they were looked for.
    """
    run = RunFolder.of_capture(folder.resolve()) or RunFolder(path)
    captures = by_step(run.captures)
    looked_in = captures.values() if folder == run.path else (folder,)
    if batches := [told for one in looked_in if (told := CaptureFolder(one).batch_alone)]:
        why = _why_not_recorded(run) or "no attention was recorded, or its tensors have been deleted"
        return f"{path}: no tensors of an attention: {why}; {batches[-1]}"
    if not run.manifest.is_file() or folder != run.path:
        told = f"{folder}: holds no {LAYERS}; give a capture, a run, a .safetensors file, or a model of Transformers"
        return f"{told} and --text FILE"
    if empty := [str(step) for step, one in captures.items() if not any(one.iterdir())]:
        told = f"{path}: the captures of steps {', '.join(empty)} hold nothing"
        return f"{told}: the disk was full, or their files have been deleted; watch the loop again"
    if run.outcome.is_file() and (outcome := run.read_outcome()).step == run.first_step:
        by = "" if outcome.interrupted in (None, NO_LOSS) else f", {outcome.interrupted} came first"
        return f"{path}: no capture was made: watched.step was never called{by}; call it once an optimiser step"
    quiet = run.outcome.is_file() and run.read_outcome().outcome == "stable"
    calm = "the loss did not explode, and no early warning came; " if quiet else ""
    remedy = _why_not_recorded(run) or f"{calm}watched.capture() in the loop makes one"
    return f"{path}: no capture was made; {remedy}"


def _why_not_recorded(run: RunFolder) -> str:
    """Return why a watch recorded no attention at all; empty where it recorded some, or did not say."""
    if not run.manifest.is_file() or run.read_config().model is not None:
        return ""
    left_out = "; ".join(run.read_manifest().not_recorded)
    return left_out and f"its attention was not recorded ({left_out})"


def _tell_others(path: Path, step: int | None) -> None:
    if step is None and len(steps := captured_steps(path)) > 1:
        told = ", ".join(map(str, steps))
        which = "the last capture is read, with tensors if any has them"
        if capture_folder(path, None) != _last(steps):
            which = "the first capture of those that hold NaN or infinity up to the last one is read"
        notify(f"{path}: {which}; --step takes each of steps {told}")


def read_delta(path: Path, step: int | None) -> dict[int, DeltaSample]:
    """Read the errors of δ, by layer, of a capture whose tensors have been deleted; empty where they are there.

    Args:
        path, step: as of :func:`read_calls`.

    Raises:
        UserError: they cannot be read.
    """
    capture = CaptureFolder(capture_folder(path, step))
    if not capture.delta.is_file() or capture.layers:
        return {}
    _tell_others(path, step)
    return delta_collection.read(capture.delta)


def read_samples(path: Path, step: int | None, calls: Sequence[AttentionCall]) -> dict[int, DeltaSample]:
    """Read the errors of δ, by layer, that were measured after the capture of the calls; empty where none were.

    Args:
        path, step: of the calls, as of :func:`read_calls`.

    Raises:
        UserError: they cannot be read, or are of other heads than the calls.
    """
    file = CaptureFolder(path.parent if path.is_file() else capture_folder(path, step)).delta
    samples = delta_collection.read(file) if file.is_file() else {}
    for call in calls:
        if call.layer in samples and (found := samples[call.layer].heads) != call.q.shape[1]:
            raise UserError(f"{file}: layer {call.layer} with {found} heads, its tensors have {call.q.shape[1]}; "
                            "delete the file that is of another model")  # fmt: skip
    return samples


def capture_folder(path: Path, step: int | None) -> Path:
    """Return the folder of a capture: the path, or of a watched run's captures that of a step.

    Without a step it is the last one that holds tensors, or where none does the last one. Where that one holds NaN or
    infinity, it is the first of those in a row that do: what came later tells nothing of where they began.

    Raises:
        UserError: no capture of a watched run is of the step.
    """
    steps = captured_steps(path)
    if not steps:
        return path
    if step is not None and step not in steps:
        other = RunFolder(path).capture(step).batch_alone or f"{path} captured steps {', '.join(map(str, steps))}"
        raise UserError(f"--step {step}: {other}")
    if step is not None:
        return steps[step]
    found = _last(steps)
    for at in sorted((at for at, folder in steps.items() if CaptureFolder(folder).layers), reverse=True):
        if not _holds_nonfinite(steps[at]):
            break
        found = steps[at]
    return found


def _last(steps: Mapping[int, Path]) -> Path:
    """Return the last capture that holds tensors, or where none does the last one."""
    return steps[max([at for at, folder in steps.items() if CaptureFolder(folder).layers] or steps)]


def _holds_nonfinite(folder: Path) -> bool:
    """Whether some tensor of a capture holds NaN or infinity. A file that cannot be read holds none."""
    from safetensors import SafetensorError

    for file in CaptureFolder(folder).layers:
        try:
            with open_tensors(file) as opened:
                if not all(bool(opened.get_tensor(name).isfinite().all()) for name in opened.keys()):  # noqa: SIM118
                    return True
        except (SafetensorError, OSError):
            continue
    return False


def captured_steps(path: Path) -> dict[int, Path]:
    """Return the captures of a watched run by their steps in order; empty of another folder.

    A capture holds tensors; the errors of δ that were measured after it stay when those are deleted.
    """
    captures = by_step(RunFolder(path).captures)
    return {step: folder for step, folder in captures.items() if is_capture(folder)}


def is_capture(folder: Path) -> bool:
    """Whether a folder holds the tensors of a capture, or the errors of δ that were measured after it."""
    capture = CaptureFolder(folder)
    errors = capture.delta
    return bool(capture.layers) or (errors.is_file() and errors.stat().st_size > 0)
