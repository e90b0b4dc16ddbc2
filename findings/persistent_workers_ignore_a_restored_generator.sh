#!/usr/bin/env bash
# PyTorch 2.13.0: with persistent_workers a generator that is restored at an epoch's start gives another epoch.
#
# A DataLoader's shuffling and its workers' random numbers come from its generator. So one may expect a replay of an
# epoch from the state that the generator had before it, and persistent_workers=True, which saves the start of the
# workers, to change no number. The workers are seeded once, from the generator in front of the first epoch, and their
# random numbers go on from there: those of epoch 3 are at no seed of their own. And as no seed is drawn in front of the
# later epochs, one number less leaves the generator: in the resumed run, whose workers start, the order is another one,
# too. So a resume with the saved state trains on other batches with other augmentations, which were each to be equal.
# Nothing warns. With persistent_workers=False order and augmentations come back. Who needs it seeds each example from
# its index and epoch, and shuffles by a sampler with a generator of its own.
#
# Seen with torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Four examples, each with a random number of its worker:
# the third epoch of a run, and of one that starts with the third epoch and the generator's state in front of it:
#
#   persistent_workers=False, whole run: 2 0.438, 1 0.789, 0 0.778, 3 0.422
#   persistent_workers=False, resumed: 2 0.438, 1 0.789, 0 0.778, 3 0.422
#   persistent_workers=True, whole run: 2 0.524, 3 0.199, 0 0.916, 1 0.389
#   persistent_workers=True, resumed: 0 0.182, 1 0.412, 2 0.762, 3 0.447
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from torch.utils.data import DataLoader, Dataset


class Augmented(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index, torch.rand(()).item()


def epochs(number, persistent, state=None):
    """What each epoch gave, and the generator's states in front of them."""
    generator = torch.Generator().manual_seed(0)
    if state is not None:
        generator.set_state(state)
    loader = DataLoader(
        Augmented(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=persistent, generator=generator
    )
    given, states = [], []
    for _ in range(number):
        states.append(generator.get_state())
        given.append([(int(i), f"{float(noise):.3f}") for batch in loader for i, noise in zip(*batch)])
    return given, states


if __name__ == "__main__":
    equal = []
    for persistent in (False, True):
        whole, states = epochs(3, persistent)
        resumed, _ = epochs(1, persistent, states[2])
        for name, epoch in (("whole run", whole[2]), ("resumed", resumed[0])):
            told = ", ".join(f"{index} {noise}" for index, noise in epoch)
            print(f"persistent_workers={persistent}, {name}: {told}")
        orders = [[index for index, _ in epoch] for epoch in (whole[2], resumed[0])]
        noises = [sorted(noise for _, noise in epoch) for epoch in (whole[2], resumed[0])]
        equal.append((orders[0] == orders[1], noises[0] == noises[1]))
    raise SystemExit(0 if equal == [(True, True), (False, False)] else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
