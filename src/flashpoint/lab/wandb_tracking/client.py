"""The process that speaks to W&B: ``python -m flashpoint.lab.wandb_tracking.client``, fed with messages on stdin.

A message is a pickled pair: ``("begin", settings)``, then ``("log", (step, metrics))`` any number of times. Then comes
``("end", (summary, figures, files, records))`` of a run that did not fail, and ``("stop", None)``: a process that the
run forked may hold stdin open. Where stdin ends without a stop, the run was killed, and the client ends what it has.
Each line on stdout is for the person at the terminal.
"""

from __future__ import annotations

import json
import pickle
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flashpoint.files import atomic_write, regular
from flashpoint.lab.wandb_tracking.media import HeadMedia

FINISH_SECONDS = 120.0
"""Longest time for the upload at the end of a run. After it ``wandb sync`` can upload the rest."""
_INIT_SECONDS = 30


def main(messages: Iterator[tuple[str, Any]]) -> None:
    """Serve one run; ends at the first thing that fails, with one line."""
    run: Any = None
    media = HeadMedia()
    try:
        for kind, content in messages:
            if kind == "begin":
                run = _begin(content)
            elif kind == "log":
                step, metrics = content
                run.log({"step": step, **_by_head(metrics), **media.of(step, metrics)})
            elif kind == "end":
                _upload(run, *content)
            elif kind == "stop":
                break
        if run is not None:
            run.finish()
    except Exception as error:
        print(f"W&B is off for this run ({_reason(error)}); the run's files have everything", flush=True)


def _reason(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200)


def on_disk(folder: Path) -> str:
    """Return where a run is that is not uploaded, and what uploads it."""
    where = shlex.quote(str(folder / "wandb"))
    return f"on disk in {where}; wandb sync {where}/offline-run-* uploads it"


def without_login() -> str:
    """Return why there is no login of W&B's server; empty where W&B finds one, in the environment, in its settings or
    in a netrc file."""
    import wandb

    try:
        wandb.setup(wandb.Settings(mode="online", silent=True))  # offline, as by WANDB_MODE, it would not look
        return "" if wandb.login(prompt=False, verify=False) else "no login is stored (wandb login stores one)"
    except Exception as error:  # whatever is wrong with the login, or with W&B
        return f"the login cannot be read ({_reason(error)})"


def _begin(settings: dict[str, Any]) -> Any:
    """Start W&B's run, or go on with the one that this run is there.

    The mode is what the settings say, whatever WANDB_MODE says. Without a login ``online`` is ``offline``, since W&B
    would prompt, or raise.
    """
    if settings["mode"] == "online" and (reason := without_login()):
        print(f"W&B: {reason}: {on_disk(Path(settings['dir']))}", flush=True)
        settings["mode"] = "offline"
    import wandb

    machine: dict[str, Any] = {}
    if not settings.pop("describes_machine"):
        machine = {"x_disable_meta": True, "host": "withheld"}
    seconds, id_file = settings.pop("finish_seconds"), Path(settings.pop("id_file"))
    run = wandb.init(
        id=regular(id_file).read_text(encoding="utf-8").strip() if id_file.exists() else None,
        resume="allow",  # of a new run, too: wandb sync would put the part on the disk in place of what is there
        **settings,
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=_INIT_SECONDS,
            finish_timeout=seconds,
            finish_timeout_raises=True,
            **machine,
        ),
    )
    with atomic_write(id_file) as partial:
        partial.write_text(run.id, encoding="utf-8")
    run.define_metric("step")  # a resumed run repeats steps since its checkpoint; W&B's own steps may only rise
    run.define_metric("*", step_metric="step")
    return run


def _by_head(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the arrays [n_layer, n_head] as ``layer/2/head/3/NAME``."""
    named: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, np.ndarray):
            named |= {f"layer/{i + 1}/head/{j + 1}/{name}": float(x) for (i, j), x in np.ndenumerate(value)}
        else:
            named[name] = value
    return named


def _upload(
    run: Any, summary: dict[str, Any], figures: list[str], files: list[str], records: dict[str, dict[str, Any]]
) -> None:
    """Hand over the end of a run.

    Args:
        figures: paths.
        files: paths, of which W&B gets the names.
        records: what files of JSON are to hold, by their names.
    """
    import wandb

    run.summary.update(summary)
    if figures:
        run.log({f"figures/{Path(path).stem}": wandb.Image(path) for path in figures})
    if files or records:
        artifact = wandb.Artifact(f"records-{run.id}", type="records")
        for path in files:
            artifact.add_file(path)
        for name, values in records.items():
            with artifact.new_file(name, encoding="utf-8") as file:
                json.dump(values, file, indent=2, ensure_ascii=False)
        run.log_artifact(artifact)


def _received(stdin: BinaryIO) -> Iterator[tuple[str, Any]]:
    while True:
        try:
            yield pickle.load(stdin)
        except (EOFError, pickle.UnpicklingError):  # the run has ended, or was killed in the middle of a message
            return


if __name__ == "__main__":
    main(_received(sys.stdin.buffer))
