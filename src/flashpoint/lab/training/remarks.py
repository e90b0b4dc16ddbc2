"""Lines that a person should read before a run begins."""

from __future__ import annotations

import torch

from flashpoint.errors import notify
from flashpoint.lab.config import Config
from flashpoint.lab.training.run_size import RunSize
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metrics import steps_logged

MANY_PASSES = 20
"""experiment=ignite explodes with 18 passes as with 2, with 117 late or not at all: survival 'corpus-h200:*'."""

MOST_PARAMETERS = 1_000_000
"""Of a model that a CPU trains in minutes: experiment=demo_cpu has 0.1 million, experiment=demo_gpu 2 million."""


def tell_what_kind_of_run(config: Config, device: torch.device) -> None:
    """Say if there is no GPU, if formats are not BF16's, and if errors are injected."""
    if device.type == "cpu":
        parameters = RunSize.of_config(config, "cpu").parameters
        notify(
            "no GPU: so small a model explodes where its attention rounds to fewer bits than BF16 has; BF16's own "
            "explosion takes thousands of steps of experiment=demo_gpu on a GPU"
            if parameters < MOST_PARAMETERS
            else f"no GPU: a step of a model of {parameters:,} parameters takes long on a CPU; "
            "experiment=demo_cpu is the one for a CPU"
        )
    if config.attn.title != config.attn.name:
        notify(f"attention: {config.attn.title}")
    if config.attn.delta_error.kind != "none" and config.attn.delta_error.size == 0:
        notify("attn.delta_error.size=0: nothing is injected; give the size")
    if config.attn.injected:
        notify(f"{config.attn.name} injected: δ takes errors on purpose; the run shows what they do, not rounding")


def tell_of_missing_metrics(folder: RunFolder, begun_at: int, done: int) -> None:
    """Say if a run that goes on after ``done`` steps has lost metrics of the steps since its first."""
    missing = done - begun_at - steps_logged(folder.metrics, done)
    if missing > 0:
        notify(
            f"{folder.metrics}: has no loss of {missing:,} of the {done - begun_at:,} steps before; the run goes on "
            "without their metrics, and its digests do not depend on them"
        )


def tell_of_a_small_corpus(config: Config, tokens: int) -> None:
    """Say if the run goes over its text many times."""
    train = config.train
    passes = train.steps * train.batch_size * config.model.context / tokens
    if passes > MANY_PASSES:
        notify(
            f"the corpus has {tokens:,} tokens, and train.steps={train.steps} go over it {passes:.0f} times: a model "
            "that knows its text by heart may explode late or not at all; more installed packages make a larger "
            "corpus, or give your own text with data=text"
        )


def tell_of_a_long_compilation(seconds: float) -> None:
    """Say what a first run waited for; a second run finds it done."""
    if seconds >= 5:
        notify(f"compilation took {seconds:.0f} s")
