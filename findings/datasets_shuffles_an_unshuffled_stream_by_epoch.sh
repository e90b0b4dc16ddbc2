#!/usr/bin/env bash
# datasets 5.2.0: set_epoch shuffles the shards of a stream that nobody has asked to shuffle.
#
# set_epoch gives a shuffled stream another order in each epoch, as its documentation says, and a stream that is not
# shuffled has one order. So one may expect every epoch of that alike: of a curriculum, of an evaluation, of a replay
# without shuffling. From the first epoch number above 0 on, the shards come in an order that is drawn from the epoch.
# Few shards come in the old order now and then, which hides it. Examples within a shard keep their order, and each comes
# once. Nothing warns. Loops call set_epoch on whatever stream they are given, as the Trainer does. Behind
# to_iterable_dataset(num_shards=1) the order stays.
#
# Seen with datasets 5.2.0 and Python 3.11, 2026-11-30. Six examples in three shards of two, not shuffled, by epoch:
#
#   set_epoch: 012345, 012345, 450123, 452301, 012345
#   no set_epoch: 012345, 012345, 012345, 012345, 012345
#   set_epoch, one shard: 012345, 012345, 012345, 012345, 012345
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
cat > "$folder/program.py" <<'PY'
from datasets import Dataset


def orders(shards, sets_epoch):
    stream = Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset(num_shards=shards)
    seen = []
    for epoch in range(5):
        if sets_epoch:
            stream.set_epoch(epoch)
        seen.append("".join(str(example["x"]) for example in stream))
    return seen


cases = {
    "set_epoch": orders(3, True),
    "no set_epoch": orders(3, False),
    "set_epoch, one shard": orders(1, True),
}
for name, seen in cases.items():
    print(f"{name}: " + ", ".join(seen))
shuffled, plain, single = cases.values()
same = set(plain) == set(single) == {"012345"} and len(set(shuffled)) > 1 and shuffled[0] == "012345"
raise SystemExit(0 if same and all(sorted(order) == list("012345") for order in shuffled) else "changed")
PY
HF_HUB_OFFLINE=1 HF_HOME="$folder" "$folder/venv/bin/python" -W ignore "$folder/program.py"
