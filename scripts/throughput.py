"""Tokens per second of recorded runs: ``python scripts/throughput.py RUN [RUN …]``."""

from __future__ import annotations

import argparse

import numpy as np

from flashpoint.attention.variant import AttentionVariant
from flashpoint.errors import UserError, script_errors
from flashpoint.run_folder import RunFolder, read_json
from flashpoint.tracking import read_metrics

WARM_UP_SHARE = 0.2
"""First share of the readings left out: compilation, and caches filling."""


def throughput(run: RunFolder) -> str:
    """One line: the run, median tokens/s with quartiles, and what it ran on."""
    config, manifest = read_json(run.config), read_json(run.manifest)
    columns = read_metrics(run.metrics)
    if "tokens_per_second" not in columns:
        raise UserError(f"{run.metrics}: no reading of tokens_per_second; give a run of more steps")
    _, rates = columns["tokens_per_second"]
    low, median, high = np.percentile(rates[int(len(rates) * WARM_UP_SHARE) :], [25, 50, 75])
    model, environment = config["model"], manifest["environment"]
    shape = f"{model['n_layer']} × {model['d_model']}, T {model['context']}"
    return (
        f"{run.path.name:23} {AttentionVariant.from_dict(config['attn']).title:14} {shape}: "
        f"{median:,.0f} tokens/s (quartiles {low:,.0f} to {high:,.0f}, {len(rates)} readings) on "
        f"{manifest['hardware']}, torch {environment['torch']}, seed {config['seed']}, {manifest['started'][:10]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    arguments = parser.parse_args()
    with script_errors():
        for name in arguments.runs:
            print(throughput(RunFolder.open(name)))


if __name__ == "__main__":
    main()
