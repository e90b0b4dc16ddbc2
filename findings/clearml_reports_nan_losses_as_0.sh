#!/usr/bin/env bash
# clearml 2.1.12: a loss that is NaN or infinite is reported as 0, the best that there is.
#
# A loss of NaN is the sign that a training has failed. So one may expect a gap in its curve, or a word there. ClearML
# sends 0.0 in its place, and for infinity of either sign, too: the curve of a run that has exploded falls to 0 and
# stays there. The server never hears of NaN: whatever looks for the smallest loss finds such runs first. The process
# that trains prints a line at the first one, and again after 1,000.
# clearml.Logger.set_reporting_nan_value(1e9) and set_reporting_inf_value(1e9) send another number.
#
# Seen with clearml 2.1.12 and Python 3.11, 2026-12-01. Losses that are handed over, and what the record that is to be
# sent has:
#
#   2, 1.5, inf, -inf, nan, nan: reported 2, 1.5, 0, 0, 0, 0
#   after set_reporting_nan_value(1e9) and set_reporting_inf_value(1e9): 2, 1.5, 1e+09, 1e+09, 1e+09, 1e+09
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet clearml==2.1.12
cat > "$folder/program.py" <<'PY'
import json
import math
from pathlib import Path

from clearml import Logger, Task

LOSSES = (2.0, 1.5, math.inf, -math.inf, math.nan, math.nan)


def reported():
    task = Task.init("findings", "training", auto_connect_frameworks=False, auto_resource_monitoring=False)
    for step, loss in enumerate(LOSSES):
        task.get_logger().report_scalar("train", "loss", value=loss, iteration=step)
    task.flush(wait_for_uploads=True)
    folder = Path(task.get_offline_mode_folder())
    task.close()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event["value"] for line in lines for event in json.loads(line) if event["metric"] == "train"]


def listed(values):
    return ", ".join(f"{value:g}" for value in values)


Task.set_offline(True)  # the record is written to a file, and not sent
seen = reported()
print(f"{listed(LOSSES)}: reported {listed(seen)}")
Logger.set_reporting_nan_value(1e9)
Logger.set_reporting_inf_value(1e9)
replaced = reported()
print(f"after set_reporting_nan_value(1e9) and set_reporting_inf_value(1e9): {listed(replaced)}")
raise SystemExit(0 if seen == [2.0, 1.5, 0, 0, 0, 0] and replaced == [2.0, 1.5, 1e9, 1e9, 1e9, 1e9] else "changed")
PY
cd "$folder"
HOME=$folder "$folder/venv/bin/python" program.py 2> "$folder/errors" | grep -e "^2, " -e "^after" || { cat "$folder/errors"; exit 1; }
