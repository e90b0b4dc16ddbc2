"""How likely is a run to explode, from 500 steps of W_Q: ``python scripts/evidence/risk_score.py``.

The runs of the evidence whose attention makes δ of a rounded O, with no other change. At a landmark, a step at which a
run has not exploded, three numbers of the norms of W_Q's heads are taken: the largest growth of a head in 500 steps,
the largest norm over the median norm, and the median norm, all as logarithms. A logistic regression (scikit-learn, L2
of strength 1, standardised) learns from the settings of one half whether the run explodes within a horizon; the other
half is foretold. Halves are drawn by a hash of the setting, so that all seeds of a setting are in one.

landmark      step, and steps from there within which an explosion counts
settings      that learn, and that are foretold; runs behind them. Left out are runs that ended before the horizon
              without an explosion, and those that lack a norm of either end of the 500 steps
explode       share of the runs foretold
AUC           how often an exploding run has the higher risk of two
skill         1 − Brier score of the risk / Brier score of the share that exploded in the learning half
slope         of what came on the log-odds foretold; 1 is calibrated, 0 is noise
… 95 %        intervals: settings foretold are drawn 1,000 times with replacement
holds         whether the interval of the skill lies above 0 and that of the slope holds 1
"""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashpoint.cli.run_words import select_runs
from flashpoint.cli.selection import provenance
from flashpoint.cli.table import Table, show
from flashpoint.errors import UserError, command_errors
from flashpoint.lab.analysis.lifetimes import SETTINGS
from flashpoint.lab.config import Config
from flashpoint.lab.stored_config import trained_config
from flashpoint.runs.metric_table import W_Q_NORM
from flashpoint.runs.run import Run

INDEX = Path("runs/reference/index.csv")
ROUNDED = {"flash_bf16", "flash_fp32", "flash_fp32_out", "released", "sdpa", "sdpa_cudnn", "sdpa_flash", "flex"}
"""Attentions whose δ is of a rounded O, as their titles say."""
LANDMARKS = (2_000, 4_000, 6_000)
HORIZONS = (8_000, 19_000)
"""Steps after a landmark. Most runs have 13,000 steps, some 25,000."""
WINDOW = 500
SPLIT = {
    "model": ["n_layer", "n_head", "d_model", "context", "vocab_size"],
    "train": [
        "decay_steps", "lr", "min_lr_ratio", "warmup_steps", "batch_size", "micro_batch_size", "beta1",
        "beta2", "eps", "weight_decay", "grad_clip", "z_loss", "log_interval",
        "checksum_interval", "precision", "eval_sequences", "device", "compile", "deterministic", "cuda_graph",
    ],
}  # fmt: skip
"""Keys by which halves are drawn. They stay as they are: one more would draw other halves of the same runs."""
LATER = [
    key
    for key in SETTINGS
    if not key.startswith(("detector.", "model.init")) and key != "train.order_seed"
    if (names := key.partition("."))[2] not in SPLIT.get(names[0], ())
]
"""Keys of an experiment that came after them. One that has not its default makes another setting."""
COLUMNS = (
    *("landmark", "settings", "runs", "explode"),
    *("AUC", "AUC 95 %", "skill", "skill 95 %", "slope", "slope 95 %", "holds"),
)
DRAWS = 1_000
Float = NDArray[np.float64]


@dataclass(frozen=True)
class Example:
    """One run at one landmark."""

    setting: str
    features: tuple[float, float, float]
    onset: int | None
    ended: int

    @property
    def learns(self) -> bool:
        return hashlib.sha256(self.setting.encode()).digest()[0] % 2 == 0


def setting_of(run: Run) -> str:
    """Return all that two seeds of one setting share, but the attention."""
    config = trained_config(run)
    split = [{key: getattr(getattr(config, name), key) for key in keys} for name, keys in SPLIT.items()]
    split[1]["corpus"] = run.manifest.data.fingerprint
    later = {key: attrgetter(key)(config) for key in LATER if attrgetter(key)(config) != attrgetter(key)(Config())}
    return json.dumps([*split, *([later] if later else [])], sort_keys=True, default=str)


def example(run: Run, landmark: int) -> Example | None:
    """Return the run at the landmark; None where it does not tell, or has exploded before."""
    if run.onset is not None and run.onset <= landmark:
        return None
    try:
        steps, norms = run.measured_by_head(W_Q_NORM.name)
    except UserError:
        return None
    heads = norms.reshape(-1, norms.shape[-1])
    # A value of step 1,999 is that after 2,000 steps.
    before, now = (np.flatnonzero((steps == at) | (steps == at - 1)) for at in (landmark - WINDOW, landmark))
    if not len(before) or not len(now):
        return None
    last = heads[:, now[0]]
    growth = np.log(last / heads[:, before[0]]).max()
    features = (float(growth), float(np.log(last.max() / np.median(last))), float(np.log(np.median(last))))
    return Example(setting_of(run), features, run.onset, run.outcome.step)


def main() -> None:
    with INDEX.open() as lines:
        experiments = sorted({row["experiment"] for row in csv.DictReader(lines)})
    runs = [run for name in experiments for run in select_runs([f"{name}:*"])]
    runs = [run for run in runs if not run.watched and run.title in ROUNDED and run.origin is None]
    rows = []
    for landmark in LANDMARKS:
        examples = [one for run in runs if (one := example(run, landmark))]
        rows += [row(landmark, horizon, examples) for horizon in HORIZONS]
    show(Table(COLUMNS, rows), "markdown", f"scikit-learn {version('scikit-learn')}; " + provenance(runs))


def row(landmark: int, horizon: int, examples: list[Example]) -> tuple[str, ...]:
    from sklearn.linear_model import LogisticRegression  # scikit-learn takes a fifth of a second to import
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    until = landmark + horizon
    told = [one for one in examples if one.ended >= until or one.onset is not None]
    learn, foretold = ([one for one in told if one.learns is half] for half in (True, False))
    name = f"{landmark:,} + {horizon:,}"
    sizes = (f"{settings(learn)}, {settings(foretold)}", f"{len(learn)}, {len(foretold)}")
    came = [exploded(half, until) for half in (learn, foretold)]
    if any(len(set(half)) < 2 for half in came):
        return name, *sizes, "", "", "", "", "", "", "", "one outcome alone"
    model = make_pipeline(StandardScaler(), LogisticRegression(C=1.0)).fit([one.features for one in learn], came[0])
    risk = model.predict_proba([one.features for one in foretold])[:, 1]
    base = float(np.mean(came[0]))
    measures = scores(came[1], risk, base)
    names = sorted({one.setting for one in foretold})
    members = [np.flatnonzero([one.setting == name for one in foretold]) for name in names]
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        chosen = np.concatenate([members[i] for i in generator.integers(len(names), size=len(names))])
        if len(set(came[1][chosen])) == 2:
            drawn.append(scores(came[1][chosen], risk[chosen], base))
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
    holds = low[1] > 0 and low[2] <= 1 <= high[2]
    cells = [x for i in range(3) for x in (f"{measures[i]:.2f}", f"{low[i]:.2f} to {high[i]:.2f}")]
    return name, *sizes, f"{np.mean(came[1]):.0%}", *cells, "yes" if holds else "no"


def settings(examples: list[Example]) -> int:
    return len({one.setting for one in examples})


def exploded(examples: list[Example], until: int) -> NDArray[np.bool_]:
    return np.array([one.onset is not None and one.onset <= until for one in examples])


def scores(came: NDArray[np.bool_], risk: Float, base: float) -> tuple[float, float, float]:
    """Return AUC, skill and slope."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import brier_score_loss, roc_auc_score

    odds = np.log(risk / (1 - risk))
    slope = LogisticRegression(C=np.inf, solver="newton-cholesky").fit(odds[:, None], came).coef_[0, 0]
    skill = 1 - brier_score_loss(came, risk) / float(np.mean((base - came) ** 2))
    return float(roc_auc_score(came, risk)), float(skill), float(slope)


if __name__ == "__main__":
    with command_errors():
        main()
