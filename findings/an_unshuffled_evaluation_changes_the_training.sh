#!/usr/bin/env bash
# PyTorch 2.13.0: iterating an unshuffled DataLoader moves the global random numbers, and so the training after it.
#
# An evaluation in order, in this process, without dropout, needs no random number. So one may expect the same training
# with it and without it, from the same seed. Each iterator of a DataLoader draws a number from the global generator,
# also with shuffle=False and num_workers=0: the order and the dropout of the next epoch are others. Two runs that are
# to differ in one setting then differ in their batches if they evaluate at other steps. A generator of its own, given
# to the DataLoader that evaluates, leaves the global one alone.
#
# And the order of an epoch is drawn when its iterator begins. A generator's state that is saved in the middle of an
# epoch is one after that draw: restored, it gives the order of another epoch, of which the rest repeats some examples
# and leaves others out. The state is to be saved before the epoch.
#
# Seen with torch 2.13.0 and Python 3.11, 2026-11-29, of eight examples. The second epoch of a training; then the last
# five of an epoch, and what comes after its first three are skipped:
#
#   no evaluation: 0 3 7 1 6 2 5 4
#   evaluated unshuffled: 6 1 3 4 7 0 5 2
#   evaluated unshuffled, generator=: 0 3 7 1 6 2 5 4
#   rest of the epoch: 3 2 5 1 6
#   resumed by the state in its middle: 4 6 2 0 3
#   resumed by the state before it: 3 2 5 1 6
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torch.utils.data import DataLoader, RandomSampler

examples = list(range(8))


def second_epoch(**evaluation):
    torch.manual_seed(0)
    training = DataLoader(examples, shuffle=True)
    list(training)
    if evaluation:
        list(DataLoader(examples, **evaluation))
    return [int(example) for example in training]


def resumed(state):
    generator = torch.Generator()
    generator.set_state(state)
    return list(RandomSampler(examples, generator=generator))[3:]


seen = {
    "no evaluation": second_epoch(),
    "evaluated unshuffled": second_epoch(shuffle=False),
    "evaluated unshuffled, generator=": second_epoch(shuffle=False, generator=torch.Generator()),
}
generator = torch.Generator().manual_seed(0)
before = generator.get_state()
epoch = iter(RandomSampler(examples, generator=generator))
for _ in range(3):
    next(epoch)
middle = generator.get_state()
seen["rest of the epoch"] = list(epoch)
seen["resumed by the state in its middle"] = resumed(middle)
seen["resumed by the state before it"] = resumed(before)
for what, order in seen.items():
    print(f"{what}:", *order)
none, unshuffled, own, rest, from_middle, from_before = seen.values()
raise SystemExit(0 if none == own != unshuffled and from_before == rest != from_middle else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
