#!/usr/bin/env bash
# keras 3.15.1: a model that predicts NaN has an accuracy, which is the share of the first class, or of the zeros.
#
# A classifier whose weights have become NaN predicts nothing. So one may expect its accuracy to be NaN, as its loss is,
# or 0. Accuracy compares the class of the largest prediction with the target: among NaN that is the first one, class 0.
# BinaryAccuracy asks whether a prediction exceeds 0.5, which NaN does not, and so counts as 0. Where the first class, or
# zero, is the frequent one, a model that has failed is better than most of its epochs before, and a callback that keeps
# the best accuracy keeps it. Top-1 accuracy, the same number otherwise, is 0 or 1, by the backend. Nothing warns.
#
# Seen with keras 3.15.1, torch 2.13.0, jax 0.10.2 and Python 3.11 on a CPU, 2026-11-30. Ten targets, of which eight are
# 0, and predictions that are NaN:
#
#   torch: loss nan; SparseCategoricalAccuracy 0.8, BinaryAccuracy 0.8, top 1 0.0
#   torch: ModelCheckpoint by accuracy keeps epoch 2 of 2, whose weights are NaN
#   jax: loss nan; SparseCategoricalAccuracy 0.8, BinaryAccuracy 0.8, top 1 1.0
#   jax: ModelCheckpoint by accuracy keeps epoch 2 of 2, whose weights are NaN
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 torch==2.13.0 jax==0.10.2 numpy
cat > "$folder/program.py" <<'PY'
import sys

import keras
import numpy as np

backend = keras.backend.backend()
targets = np.array([0] * 8 + [1, 2])
predictions = np.full((10, 3), np.nan, np.float32)
metrics = keras.metrics
by_class = float(metrics.SparseCategoricalAccuracy()(targets, predictions))
binary = float(metrics.BinaryAccuracy()(targets > 0, predictions[:, 0]))
top = float(metrics.SparseTopKCategoricalAccuracy(k=1)(targets, predictions))
loss = float(keras.losses.SparseCategoricalCrossentropy(from_logits=True)(targets, predictions))
said = f"SparseCategoricalAccuracy {by_class:.1f}, BinaryAccuracy {binary:.1f}, top 1 {top:.1f}"
print(f"{backend}: loss {loss}; {said}")

model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(3, kernel_initializer="zeros", name="last")])
model.compile(
    keras.optimizers.SGD(0.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
model.layers[-1].bias.assign([0.0, 1.0, 0.0])  # predicts class 1
fails = keras.callbacks.LambdaCallback(
    on_epoch_begin=lambda epoch, logs: model.layers[-1].bias.assign([np.nan] * 3) if epoch == 1 else None
)
keeps = keras.callbacks.ModelCheckpoint(
    "best.weights.h5", "accuracy", mode="max", save_best_only=True, save_weights_only=True
)
model.fit(np.ones((10, 1), np.float32), targets, epochs=2, verbose=0, callbacks=[fails, keeps])
model.load_weights("best.weights.h5")
kept = bool(np.isnan(keras.ops.convert_to_numpy(model.layers[-1].bias)).all())
weights = "NaN" if kept else "finite"
print(f"{backend}: ModelCheckpoint by accuracy keeps epoch {1 + kept} of 2, whose weights are {weights}")
same = [round(by_class, 3), round(binary, 3), round(top, 3)] == [0.8, 0.8, 0.0 if backend == "torch" else 1.0]
sys.exit(0 if same and np.isnan(loss) and kept else "changed")
PY
cd "$folder"
for backend in torch jax; do
    KERAS_BACKEND=$backend JAX_PLATFORMS=cpu venv/bin/python program.py 2> /dev/null
done
