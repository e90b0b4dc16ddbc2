#!/usr/bin/env bash
# grain 0.2.18: IndexSampler gives each host the same stretch of the data in all epochs, and shuffles within it alone.
#
# IndexSampler(shuffle=True) says that it shuffles the dataset globally, and PyTorch's DistributedSampler shuffles
# before it deals the examples out. So one may expect each epoch to give each host others. Grain cuts the data into
# consecutive pieces first, one a host, and shuffles each piece. Where the data are sorted, by source, length or class,
# one host has the code and another the prose for the whole training, and each global batch holds a fixed share of
# each. With drop_remainder=True it is the same last examples that no epoch sees. Hosts whose pieces are of one length
# have the same permutation, so that what stands at equal offsets stays together. Nothing warns. Take
# MapDataset.source(...).shuffle(seed)[host::hosts] instead, which is right.
#
# Seen with grain 0.2.18 and Python 3.11, 2026-11-30. Ten examples in order on three hosts, shuffled with seed 0, two
# epochs of each host:
#
#   IndexSampler, drop_remainder=True: 021 120, 354 453, 687 786; never 9
#   MapDataset: 0712 5093, 489 742, 635 681; never none
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grain==0.2.18
cat > "$folder/program.py" <<'PY'
import grain.python as grain

NUMBER, HOSTS, EPOCHS = 10, 3, 2


def sampled(host):
    shard = grain.ShardOptions(host, HOSTS, drop_remainder=True)
    sampler = grain.IndexSampler(NUMBER, shard, shuffle=True, num_epochs=EPOCHS, seed=0)
    return list(grain.DataLoader(data_source=grain.RangeDataSource(0, NUMBER, 1), sampler=sampler, worker_count=0))


def mapped(host):
    return [int(x) for x in grain.MapDataset.range(NUMBER).shuffle(seed=0)[host::HOSTS].repeat(EPOCHS)]


def epochs_of(name, one_host):
    hosts = [one_host(host) for host in range(HOSTS)]
    epochs = [[given[: len(given) // EPOCHS], given[len(given) // EPOCHS :]] for given in hosts]
    shown = ", ".join(" ".join("".join(map(str, epoch)) for epoch in host) for host in epochs)
    never = sorted(set(range(NUMBER)).difference(*hosts))
    print(f"{name}: {shown}; never {', '.join(map(str, never)) or 'none'}")
    return epochs, never


pieces, left_out = epochs_of("IndexSampler, drop_remainder=True", sampled)
mixed, none = epochs_of("MapDataset", mapped)
same = [[sorted(epoch) for epoch in host] for host in pieces] == [
    [list(range(3 * host, 3 * host + 3))] * EPOCHS for host in range(HOSTS)
]
other = all(set(first) != set(second) for first, second in mixed)
raise SystemExit(0 if same and left_out == [9] and other and not none else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py" 2> "$folder/log" || { tail -3 "$folder/log"; exit 1; }
