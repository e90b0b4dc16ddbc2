#!/usr/bin/env bash
# optuna 5.0.0: PatientPruner never prunes a trial that becomes NaN, where it prunes one that becomes infinite.
#
# MedianPruner prunes a trial that reports nothing but NaN at once, and ThresholdPruner at the first NaN. PatientPruner
# waits for some steps without an improvement, and then asks the pruner that it wraps, or prunes at once if it wraps
# none. So one may expect it to prune a trial some steps behind its first NaN, as it does with a loss of 1e9 or an
# infinite one. It compares the best value before with the best of the last steps, which is NaN: that is not worse than
# any number, and the trial runs to its end, whatever pruner is wrapped. NumPy's warning of an empty slice is the only
# sign. Issue 5202 asks to document what pruners make of NaN. Raise TrialPruned where the loss is NaN.
#
# Seen with optuna 5.0.0, numpy 2.4.6 and Python 3.11, 2026-11-30. Nine trials of 12 steps with losses that fall. The
# last one is best up to its third step, and then has the loss named. How many steps it makes:
#
#   threshold: 1e9 4, inf 4, nan 4
#   patience: 1e9 6, inf 6, nan 12
#   patience and median: 1e9 6, inf 6, nan 12
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet optuna==5.0.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import math
import warnings

import optuna
from optuna import pruners

warnings.simplefilter("ignore")
optuna.logging.set_verbosity(optuna.logging.ERROR)
PRUNERS = {
    "threshold": pruners.ThresholdPruner(upper=100.0),
    "patience": pruners.PatientPruner(None, patience=2),
    "patience and median": pruners.PatientPruner(pruners.MedianPruner(), patience=2),
}


def steps_of_last(pruner, bad):
    steps = []

    def outcome(trial):
        last = trial.number == 8
        for step in range(12):
            loss = bad if last and step >= 3 else 1 / (1 + step) - 0.01 * last
            trial.report(loss, step)
            if trial.should_prune():
                break
        steps.append(step + 1)
        return 0.0

    optuna.create_study(pruner=pruner).optimize(outcome, n_trials=9)
    return steps[-1]


seen = {}
for name, pruner in PRUNERS.items():
    seen[name] = [steps_of_last(pruner, bad) for bad in (1e9, math.inf, math.nan)]
    print("{}: 1e9 {}, inf {}, nan {}".format(name, *seen[name]))
patient = [6, 6, 12]
raise SystemExit(0 if list(seen.values()) == [[4, 4, 4], patient, patient] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
