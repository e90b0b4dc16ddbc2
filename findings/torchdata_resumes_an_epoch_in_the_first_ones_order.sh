#!/usr/bin/env bash
# torchdata 0.11.0: StatefulDataLoader, resumed in its second epoch, goes on in the order of the first.
#
# StatefulDataLoader saves where an epoch stood, so that a resumed training sees each example once. With shuffle=True
# it does. A sampler with a generator of its own is what one passes to repeat a run, or to sample without replacement
# from a part. So one may expect the same of it. The order comes from the generator, whose state is not saved: a new
# process seeds it as the first one did, and the second epoch goes on in the first one's order. What of it stood at
# the front is lost, and what had been seen comes twice. In the first epoch all looks right, so that a test of the
# resume passes. Nothing warns. With shuffle=True and generator=, the epoch is right and the later ones are others,
# without workers; with two workers they are right. torchdata's own RandomSampler saves its state.
#
# Seen with torchdata 0.11.0, torch 2.13.0 and Python 3.11, 2026-11-30. 24 examples in batches of 4, saved after two
# batches of an epoch: how many examples of that epoch are lost, and come twice; and whether the next epoch is that of
# a training without a resume:
#
#   shuffle=True: first epoch 0 lost, 0 twice, next same; second 0 lost, 0 twice, next same
#   RandomSampler, seeded: first epoch 0 lost, 0 twice, next same; second 6 lost, 6 twice, next another
#   RandomSampler, seeded, two workers: first epoch 0 lost, 0 twice, next same; second 6 lost, 6 twice, next another
#   SubsetRandomSampler, seeded: first epoch 0 lost, 0 twice, next same; second 4 lost, 4 twice, next another
#   torchdata's RandomSampler, seeded: first epoch 0 lost, 0 twice, next same; second 0 lost, 0 twice, next same
#   shuffle=True, generator=: first epoch 0 lost, 0 twice, next another; second 0 lost, 0 twice, next another
#   shuffle=True, generator=, two workers: first epoch 0 lost, 0 twice, next same; second 0 lost, 0 twice, next same
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torchdata==0.11.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
import torchdata.stateful_dataloader.sampler
from torch.utils.data import RandomSampler, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

EXAMPLES = list(range(24))
torch.set_num_threads(1)


def seeded():
    return torch.Generator().manual_seed(7)


def process(sampler, workers):
    torch.manual_seed(0)
    options = {"shuffle": True} if sampler is None else {"shuffle": True, "generator": seeded()}
    if callable(sampler):
        options = {"sampler": sampler()}
    return StatefulDataLoader(EXAMPLES, batch_size=4, num_workers=workers, **options)


def resumed(sampler, workers, epoch):
    exact = process(sampler, workers)
    orders = [torch.cat(list(exact)).tolist() for _ in range(epoch + 2)]
    loader = process(sampler, workers)
    for _ in range(epoch):
        list(loader)
    batches = iter(loader)
    given = [next(batches) for _ in range(2)]
    state, numbers = loader.state_dict(), torch.get_rng_state()
    loader = process(sampler, workers)
    loader.load_state_dict(state)
    torch.set_rng_state(numbers)
    given = torch.cat([*given, *loader]).tolist()
    return len(set(EXAMPLES) - set(given)), len(given) - len(set(given)), torch.cat(list(loader)).tolist() == orders[-1]


seen = {}
for name, sampler, workers in (
    ("shuffle=True", None, 0),
    ("RandomSampler, seeded", lambda: RandomSampler(EXAMPLES, generator=seeded()), 0),
    ("RandomSampler, seeded, two workers", lambda: RandomSampler(EXAMPLES, generator=seeded()), 2),
    ("SubsetRandomSampler, seeded", lambda: SubsetRandomSampler(EXAMPLES, generator=seeded()), 0),
    (
        "torchdata's RandomSampler, seeded",
        lambda: torchdata.stateful_dataloader.sampler.RandomSampler(EXAMPLES, generator=seeded()),
        0,
    ),
    ("shuffle=True, generator=", "generator", 0),
    ("shuffle=True, generator=, two workers", "generator", 2),
):
    seen[name] = [resumed(sampler, workers, epoch) for epoch in (0, 1)]
    told = ["{} lost, {} twice, next {}".format(*found[:2], "same" if found[2] else "another") for found in seen[name]]
    print(f"{name}: first epoch {told[0]}; second {told[1]}")
samplers = [found for name, found in seen.items() if "Sampler" in name and "torchdata" not in name]
wrong = all(first[:2] == (0, 0) and second[0] > 0 for first, second in samplers)
sound = all(found[:2] == (0, 0) for name in seen if "shuffle" in name for found in seen[name])
another = not any(found[2] for found in seen["shuffle=True, generator="])
raise SystemExit(0 if wrong and sound and another else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
