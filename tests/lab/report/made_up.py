"""A made-up run, with every metric by head that the report draws."""

import json
import math
from pathlib import Path

from flashpoint.runs.folder import RunFolder
from flashpoint.runs.run import Run
from tests.records import write_run

BY_HEAD = (
    "w_q_spectral_norm",
    "token_similarity",
    "step_similarity",
    "delta_error_cumulative",
    "grad_out_error_sign_agreement",
    "out_error_bias_max",
    "v_sign_max",
    "tied_rows",
    "tie_multiplicity",
    "ties_on_first_keys",
    "w_q_mean_key_share",
    "w_q_update_mean_key_share",
    "row_sum_abs_mean",
    "row_sum_relative_bias",
    "score_mean",
    "max_attention_logit",
)


def record(folder: Path, name: str, *, onset: int | None = None, probes: bool = True, attention: str = "") -> Run:
    run = RunFolder(folder / name)
    model = {"n_layer": 3, "n_head": 2, "d_model": 64, "context": 32}
    manifest = {"hardware": "a <GPU>"}
    write_run(
        run.path, {"name": attention or name}, seed=4, steps=400, onset=onset, config={"model": model},
        manifest=manifest, digest=f"d-{name}",
    )  # fmt: skip
    with run.metrics.open("w") as file:
        for step in range(400):
            file.write(json.dumps({"step": step, "loss": 3 + math.sin(step / 20), "grad_norm": 1.0 + step % 3}) + "\n")
            if probes and step % 20 == 19:
                values = {
                    f"layer/{layer}/head/{head}/{metric}": step / 100 * (5 if layer == 2 else 1) + head
                    for layer in (1, 2, 3)
                    for head in (1, 2)
                    for metric in BY_HEAD
                }
                file.write(json.dumps({"step": step, **values}) + "\n")
    return Run.of_folder(run)
