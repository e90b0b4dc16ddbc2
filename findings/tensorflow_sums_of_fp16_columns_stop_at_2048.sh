#!/usr/bin/env bash
# tensorflow 2.21.0: on a CPU, reduce_sum of FP16 ones along the first axis is at most 2,048, and the mean 0.5 of 1.
#
# reduce_mean of a vector, and along the last axis, adds FP16 up in FP32, so one may expect the same along each axis.
# Along the first or a middle one tensorflow adds row to row in FP16: where the sum is 2,048 times a row it stands
# still. A mean over the batch or the tokens of 4,096 is half of the right one, of 16,384 an eighth, and so are a loss
# by feature and the statistics of a normalisation that one writes oneself. In BF16 the same reduction is right.
# Nothing warns.
#
# Seen with tensorflow 2.21.0 and Python 3.11 on a CPU, 2026-11-30. Ones: the mean along the first axis of a table of 4
# columns, along its last if it lies on its side, and along the middle axis of two such tables:
#
#   float16, 2000 ones: first axis 1, last 1, middle 1
#   float16, 4096 ones: first axis 0.5, last 1, middle 0.5
#   float16, 16384 ones: first axis 0.125, last 1, middle 0.125
#   bfloat16, 16384 ones: first axis 1, last 1, middle 1
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tensorflow==2.21.0
cat > "$folder/program.py" <<'PY'
import tensorflow as tf


def means(dtype, count):
    first = tf.reduce_mean(tf.ones((count, 4), dtype), 0)[0]
    last = tf.reduce_mean(tf.ones((4, count), dtype), 1)[0]
    middle = tf.reduce_mean(tf.ones((2, count, 4), dtype), 1)[0, 0]
    found = float(first), float(last), float(middle)
    print("{}, {} ones: first axis {:.3g}, last {:.3g}, middle {:.3g}".format(dtype.name, count, *found), flush=True)
    return found


few, more, many, brain = (
    means(*of) for of in ((tf.float16, 2000), (tf.float16, 4096), (tf.float16, 16_384), (tf.bfloat16, 16_384))
)
same = few == brain == (1, 1, 1) and more == (0.5, 1, 0.5) and many == (0.125, 1, 0.125)
raise SystemExit(0 if same else "changed")
PY
TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES= "$folder/venv/bin/python" -W ignore "$folder/program.py" 2> /dev/null
