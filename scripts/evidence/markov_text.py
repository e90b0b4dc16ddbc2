"""Write a text whose characters follow a Markov chain.

    python scripts/evidence/markov_text.py --back 1 2 --out markov.txt

Each character has four possible successors, of probabilities 0.7, 0.1, 0.1 and 0.1. ``--back`` says on which earlier
characters they depend: ``1``, the last one, which a model knows without attention; ``2``, the one before it; ``1 2``,
both. The entropy of the next character, 0.94 nats, is the same. In ``experiment=laptop`` a character is a token:
``flashpoint train experiment=laptop data=text data.path=FILE``. The same arguments write the same file everywhere.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ALPHABET = string.ascii_letters + string.digits + ",."
PROBABILITIES = (0.7, 0.1, 0.1, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--back", type=int, choices=(1, 2), nargs="+", required=True, help="1 is the last character")
    parser.add_argument("--length", type=int, default=5_000_000, help="characters")
    parser.add_argument("--out", type=Path, required=True, help="the file")
    arguments = parser.parse_args()
    chain = markov_chain(arguments.back, len(ALPHABET), arguments.length)
    arguments.out.write_text("".join(ALPHABET[number] for number in chain))


def markov_chain(back: Sequence[int], states: int, length: int) -> list[int]:
    """Return ``length`` numbers below ``states``, from PCG64 with seed 0.

    Args:
        back: how far back the numbers stand that the next one depends on. Before the first number there are zeros.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    shuffled = generator.permuted(np.tile(np.arange(states), (states ** len(back), 1)), axis=1)
    successors = shuffled[:, : len(PROBABILITIES)].tolist()
    places = [(distance, states**place) for place, distance in enumerate(sorted(back))]
    chain = [0] * max(back)
    for draw in generator.choice(len(PROBABILITIES), size=length, p=PROBABILITIES).tolist():
        chain.append(successors[sum(chain[-distance] * factor for distance, factor in places)][draw])
    return chain[max(back) :]


if __name__ == "__main__":
    main()
