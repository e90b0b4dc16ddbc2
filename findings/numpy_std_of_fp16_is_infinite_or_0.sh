#!/usr/bin/env bash
# numpy 2.4.6 and pandas 3.1.1: std of FP16 is infinite for numbers of 300, and 0 for those of 1e-4, where mean is right.
#
# np.mean of FP16 adds up in FP32, as its documentation says, and is right for any number of activations. So one may
# expect the same of np.std, whose documentation speaks of inaccurate results, and of nanmean. np.std squares and adds in
# FP16: 300 squared is infinite, and 1e-4 squared is 0. np.nanmean adds in FP16, too, so that beyond 65,504 it is
# infinite where np.mean is 3. pandas counts in FP16 as well: of more than 65,519 numbers its std is 0, which is what
# describe() prints. Its mean and its groupby are right. Histograms of FP16 gradients, and scales for a quantisation,
# are made so. dtype=np.float32 helps.
#
# Seen with numpy 2.4.6, pandas 3.1.1 and Python 3.11, 2026-11-30. Normal numbers; FP32's result stands last:
#
#   std of 10000 with a std of 300: numpy inf, nanstd inf, pandas inf; right 299.4
#   std of 10000 with a std of 0.0001: numpy 0, nanstd 0, pandas 0; right 9.981e-05
#   std of 100000 with a std of 1: numpy inf, nanstd inf, pandas 0; right 1
#   mean of 100000 with a mean of 3: numpy 3, nanmean inf, pandas 2.999; right 2.999
#   pandas, groupby: std of 100000 1, mean 2.999
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6 pandas==3.1.1
cat > "$folder/program.py" <<'PY'
import warnings

import numpy as np
import pandas as pd

warnings.simplefilter("ignore")
normal = np.random.default_rng(0).normal(size=100_000)


def spread(count, std, mean=0.0):
    x = (mean + std * normal[:count]).astype(np.float16)
    found = [float(value) for value in (np.std(x), np.nanstd(x), pd.Series(x).std(), np.std(x.astype(np.float32)))]
    told = "numpy {:.4g}, nanstd {:.4g}, pandas {:.4g}; right {:.4g}".format(*found)
    print(f"std of {count} with a std of {std:g}: {told}")
    return found[:3]


large, small, many = spread(10_000, 300.0), spread(10_000, 1e-4), spread(100_000, 1.0, 3.0)
x = (3 + normal).astype(np.float16)
means = [float(value) for value in (np.mean(x), np.nanmean(x), pd.Series(x).mean(), x.astype(np.float32).mean())]
print("mean of 100000 with a mean of 3: numpy {:.4g}, nanmean {:.4g}, pandas {:.4g}; right {:.4g}".format(*means))
group = pd.Series(x).groupby(np.zeros(len(x)))
groups = float(group.std().iloc[0]), float(group.mean().iloc[0])
print("pandas, groupby: std of 100000 {:.4g}, mean {:.4g}".format(*groups))
same = large == [np.inf] * 3 and small == [0] * 3 and many == [np.inf, np.inf, 0]
same = same and np.isinf(means[1]) and all(abs(mean - 3) < 0.01 for mean in means[::2])
raise SystemExit(0 if same and abs(groups[0] - 1) < 0.01 and abs(groups[1] - 3) < 0.01 else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
