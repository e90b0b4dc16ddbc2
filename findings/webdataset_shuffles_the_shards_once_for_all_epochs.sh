#!/usr/bin/env bash
# webdataset 1.0.2: shuffled shards stand in the same order in each epoch, and with_epoch never comes to the last
# ones.
#
# WebDataset(shards, shardshuffle=100) shuffles the shards. So one may expect another order in each epoch, as of a
# loader with shuffle=True. One order is drawn when the dataset is made, and is that of all epochs, in each worker
# anew, with a seed as without. detshuffle=True seeds by the epoch's number: in the main process each epoch is
# another, with workers each is the first, as new workers count from 0. A buffer, .shuffle(n), mixes neighbours alone.
# with_epoch(n) sets how long an epoch is, so one may expect the next one to go on behind it, or to draw n others:
# each begins with the same shards, and what stands behind the n-th example is never trained on. Nothing warns.
# persistent_workers=True keeps the count of detshuffle, and resampled=True draws shards for each epoch.
#
# Seen with webdataset 1.0.2, torch 2.13.0 and Python 3.11, 2026-11-30. 40 examples in eight shards, ten epochs: how
# many orders there are, and how many examples come:
#
#   shardshuffle: 1 orders, 40 examples
#   shardshuffle, two workers: 1 orders, 40 examples
#   detshuffle: 10 orders, 40 examples
#   detshuffle, two workers: 1 orders, 40 examples
#   detshuffle, two persistent workers: 9 orders, 40 examples
#   shardshuffle, with_epoch(20): 1 orders, 20 examples
#   detshuffle, with_epoch(20): 10 orders, 40 examples
#   shardshuffle, shuffle(4), with_epoch(20): 10 orders, a part
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet webdataset==1.0.2 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import tempfile

import torch
import webdataset

folder = tempfile.TemporaryDirectory()
for shard in range(8):
    with webdataset.TarWriter(f"{folder.name}/{shard}.tar") as writer:
        for example in range(5 * shard, 5 * shard + 5):
            writer.write({"__key__": f"{example:03d}", "number.cls": example})


def epochs(length=None, buffer=0, workers=0, persistent=False, **options):
    dataset = webdataset.WebDataset(folder.name + "/{0..7}.tar", **options).shuffle(buffer)
    dataset = dataset.decode().to_tuple("number.cls")
    dataset = dataset.with_epoch(length) if length else dataset
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=persistent)
    found = [tuple(row[0] for row in loader) for _ in range(10)]
    return len(set(found)), len(set().union(*found))


determined = {"shardshuffle": 8, "detshuffle": True, "seed": 0}
seen = {}
for name, options in {
    "shardshuffle": {"shardshuffle": 8},
    "shardshuffle, two workers": {"shardshuffle": 8, "workers": 2},
    "detshuffle": determined,
    "detshuffle, two workers": {**determined, "workers": 2},
    "detshuffle, two persistent workers": {**determined, "workers": 2, "persistent": True},
    "shardshuffle, with_epoch(20)": {"shardshuffle": 8, "length": 20},
    "detshuffle, with_epoch(20)": {**determined, "length": 20},
}.items():
    seen[name] = epochs(**options)
    print(f"{name}: {seen[name][0]} orders, {seen[name][1]} examples")
buffered = epochs(shardshuffle=8, length=20, buffer=4)
print(f"shardshuffle, shuffle(4), with_epoch(20): {buffered[0]} orders, {'a part' if buffered[1] < 35 else 'all'}")
once = all(seen[name] == (1, 40) for name in ("shardshuffle", "shardshuffle, two workers", "detshuffle, two workers"))
often = all(seen[name][0] > 1 for name in ("detshuffle", "detshuffle, two persistent workers"))
part = seen["shardshuffle, with_epoch(20)"] == (1, 20) and buffered[1] < 35
raise SystemExit(0 if once and often and part and seen["detshuffle, with_epoch(20)"][1] == 40 else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
