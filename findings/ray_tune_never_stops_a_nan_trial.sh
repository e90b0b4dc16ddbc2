#!/usr/bin/env bash
# ray 2.60.0: ASHA never stops a trial whose loss is NaN, where it stops sound trials that are worse than others.
#
# ASHA is there to spend no time on bad trials. So one may expect one that has diverged to be the first to go. At each
# rung a trial is stopped whose score is less than a quantile of the others', and NaN is less than nothing: the trial
# takes its worker to the end, while sound ones stop at the first rung. A trial with an infinite loss, or one of 1e9,
# is stopped. Nothing warns. Ray's issues 6659 and 11670 asked for schedulers that handle NaN: since then the quantile
# leaves NaN out, and the trial itself goes on. Stop such trials by
# tune.RunConfig(stop=lambda trial, result: math.isnan(result["loss"])).
#
# Seen with ray 2.60.0 and Python 3.11, 2026-11-30. Eight trials with losses of 0 to 7, one behind another, of which the
# fourth has another loss from its second step on. How many of 16 steps each makes, with rungs at 2, 4, 8 and 16 steps:
#
#   fourth loss 3: 16 2 2 2 2 2 2 2
#   fourth loss 1e+09: 16 2 2 2 2 2 2 2
#   fourth loss inf: 16 2 2 2 2 2 2 2
#   fourth loss nan: 16 2 2 16 2 2 2 2
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "ray[tune]==2.60.0"
cat > "$folder/program.py" <<'PY'
import math

from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, TrialScheduler


def steps_of(bad):
    scheduler = ASHAScheduler("training_iteration", "loss", "min", max_t=16, grace_period=2, reduction_factor=2)
    made = []
    for number in range(8):
        trial = Trial("training", stub=True)
        scheduler.on_trial_add(None, trial)
        for step in range(1, 17):
            loss = bad if number == 3 and step > 1 else float(number)
            result = {"training_iteration": step, "loss": loss}
            if scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP:
                break
        made.append(step)
    return made


seen = {}
for bad in (3.0, 1e9, math.inf, math.nan):
    seen[str(bad)] = steps_of(bad)
    print(f"fourth loss {bad:g}:", *seen[str(bad)])
same = all(made[3] == 2 for bad, made in seen.items() if bad != "nan") and seen["nan"][3] == 16
raise SystemExit(0 if same and seen["nan"][4:] == [2, 2, 2, 2] else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
