"""What the next character of a Markov chain's text depends on, counted in the text."""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/evidence/markov_text.py"


def written(folder: Path, *back: int) -> str:
    file = folder / "text"
    command = [sys.executable, str(SCRIPT), "--back", *map(str, back), "--length", "60000", "--out", str(file)]
    subprocess.run(command, check=True)
    return file.read_text()


def most_successors(text: str, *back: int) -> int:
    """Return how many different characters follow one context, at most."""
    successors = defaultdict(set)
    for place in range(max(back), len(text)):
        successors[tuple(text[place - distance] for distance in back)].add(text[place])
    return max(map(len, successors.values()))


@pytest.mark.slow
@pytest.mark.parametrize(("back", "others"), [((1,), (2,)), ((2,), (1,)), ((1, 2), (1,)), ((1, 2), (2,))])
def test_four_characters_follow_what_the_next_depends_on_and_more_follow_anything_else(
    back: tuple[int, ...], others: tuple[int, ...], tmp_path: Path
) -> None:
    text = written(tmp_path, *back)
    assert len(text) == 60000
    assert most_successors(text, *back) == 4
    assert most_successors(text, *others) > 10


@pytest.mark.slow
def test_the_same_arguments_write_the_same_text(tmp_path: Path) -> None:
    assert written(tmp_path, 1, 2) == written(tmp_path, 1, 2)
