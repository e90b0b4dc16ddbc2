"""Write a text whose characters follow a Markov chain: ``python scripts/markov_text.py --order 2 markov2.txt``.

Each character has four possible successors, of probabilities 0.7, 0.1, 0.1 and 0.1. With ``--order 1`` they depend on
the last character, which a model knows without attention; with ``--order 2`` on the last two, so that it has to attend.
The entropy of the next character, 0.94 nats, is the same. In ``experiment=laptop`` a character is a token:
``flashpoint train experiment=laptop data=text data.path=FILE``. The same arguments write the same file everywhere.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path

import numpy as np

ALPHABET = string.ascii_letters + string.digits + ",."
PROBABILITIES = (0.7, 0.1, 0.1, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--order", type=int, choices=(1, 2), required=True, help="characters that the next depends on")
    parser.add_argument("--length", type=int, default=5_000_000, help="characters")
    arguments = parser.parse_args()
    chain = markov_chain(arguments.order, len(ALPHABET), arguments.length)
    arguments.file.write_text("".join(ALPHABET[number] for number in chain))


def markov_chain(order: int, states: int, length: int) -> list[int]:
    """Return ``length`` numbers below ``states``, from PCG64 with seed 0."""
    generator = np.random.Generator(np.random.PCG64(0))
    contexts = states**order
    shuffled = generator.permuted(np.tile(np.arange(states), (contexts, 1)), axis=1)
    successors = shuffled[:, : len(PROBABILITIES)].tolist()
    chain, context = [], 0
    for draw in generator.choice(len(PROBABILITIES), size=length, p=PROBABILITIES).tolist():
        number = successors[context][draw]
        chain.append(number)
        context = (context * states + number) % contexts
    return chain


if __name__ == "__main__":
    main()
