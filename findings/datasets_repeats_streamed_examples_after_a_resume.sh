#!/usr/bin/env bash
# datasets 5.2.0: the shuffled stream of a Dataset, resumed, gives some examples twice and leaves others out.
#
# A resume warns that the shuffle buffer will be refilled. So one may expect to lose what lay in it, and to see all
# other examples once. Some come again that the process before had already given, with one shard as with four. A stream
# that is not shuffled resumes exactly, and so does one of a Dataset that is shuffled before it becomes a stream.
#
# Seen with datasets 5.2.0 and Python 3.11, 2026-11-29. 40 examples, a buffer of 10, state_dict() after so many:
#
#   1 shard, after 15: 6 lost, 1 twice
#   1 shard, after 33: 6 lost, 1 twice
#   4 shards, after 20: 7 lost, 2 twice
#   4 shards, after 20, not shuffled: 0 lost, 0 twice
#   4 shards, after 20, shuffled before: 0 lost, 0 twice
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
cat > "$folder/program.py" <<'PY'
import itertools

import datasets

datasets.logging.set_verbosity_error()


def lost_and_twice(shards, after, shuffled):
    def stream():
        rows = datasets.Dataset.from_dict({"i": list(range(40))})
        rows = rows.shuffle(seed=0) if shuffled == "shuffled before" else rows
        made = rows.to_iterable_dataset(num_shards=shards)
        return made if shuffled else made.shuffle(seed=0, buffer_size=10)

    first = stream()
    before = [row["i"] for row in itertools.islice(first, after)]
    second = stream()
    second.load_state_dict(first.state_dict())
    rest = [row["i"] for row in second]
    return len(set(range(40)) - {*before, *rest}), len(set(before) & set(rest))


expected = {(1, 15, ""): (6, 1), (1, 33, ""): (6, 1), (4, 20, ""): (7, 2), (4, 20, "not shuffled"): (0, 0),
            (4, 20, "shuffled before"): (0, 0)}
seen = {}
for shards, after, shuffled in expected:
    lost, twice = seen[shards, after, shuffled] = lost_and_twice(shards, after, shuffled)
    how = f", {shuffled}" if shuffled else ""
    print(f"{shards} shard{'s' * (shards > 1)}, after {after}{how}: {lost} lost, {twice} twice")
raise SystemExit(0 if seen == expected else "changed")
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/program.py"
