#!/usr/bin/env bash
# hydra-core 1.3.8: a sweep over range(START, STOP, STEP) of floats runs STOP, too, for some numbers.
#
# A range leaves its stop out, as Python's does: range(0,5) is 0 to 4, and range(0,0.3,0.1) is 0, 0.1 and 0.2. So
# range(0,0.9,0.3) is to be three jobs. Hydra adds up the binary fractions of START and STEP as exact decimals and
# compares with that of STOP: 3 · 0.29999999999999998889… = 0.89999999999999996669… lies below
# 0.9 = 0.90000000000000002220…, and a fourth job runs. Other values come out as 0.30000000000000004.
#
# Seen with hydra-core 1.3.8, omegaconf 2.3.1 and Python 3.11, 2026-11-28:
#
#   range(0,0.3,0.1): 0.0 0.1 0.2
#   range(0,0.9,0.3): 0.0 0.3 0.6 0.8999999999999999
#   range(0,2.1,0.7): 0.0 0.7 1.4 2.1
#   range(0.1,0.5,0.1): 0.1 0.2 0.30000000000000004 0.4
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet hydra-core==1.3.8 omegaconf==2.3.1
cd "$folder"
echo "x: 0" > config.yaml
cat > app.py <<'PY'
import hydra


@hydra.main(config_path=".", config_name="config", version_base="1.3")
def main(config):
    print("x", config.x)


main()
PY
values() {
    venv/bin/python app.py -m "x=$1" hydra.sweep.dir=sweep hydra/job_logging=disabled hydra/hydra_logging=disabled |
        sed -n 's/^x //p' | paste -sd' '
}
while read -r sweep expected; do
    seen=$(values "$sweep")
    echo "$sweep: $seen"
    [ "$seen" = "$expected" ] || { echo "changed: it was $expected" >&2; exit 1; }
done <<'SEEN'
range(0,0.3,0.1) 0.0 0.1 0.2
range(0,0.9,0.3) 0.0 0.3 0.6 0.8999999999999999
range(0,2.1,0.7) 0.0 0.7 1.4 2.1
range(0.1,0.5,0.1) 0.1 0.2 0.30000000000000004 0.4
SEEN
