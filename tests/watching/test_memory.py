"""A recorded step leaves nothing of its batch behind: neither in Python nor in the hooks of its graph."""

import gc
from pathlib import Path

import pytest
from torch import Tensor, nn

from flashpoint.watching.loop import Watch
from tests.watching.loops import loop, plain


def tensors() -> list[Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]  # isinstance asks proxies of the dead


@pytest.mark.slow
@pytest.mark.parametrize(("interval", "sequences"), [(1, 0), (500, 10_000)])
def test_tensors_do_not_become_more_with_the_steps_that_are_recorded(
    tmp_path: Path, interval: int, sequences: int
) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 0:
            watched.capture(sequences=sequences)
        plain(model, number, watched)
        if number in (14, 24):  # the weights of the first steps, and batches until their losses are read, are held
            held.append(len(tensors()))

    held: list[int] = []
    gc.freeze()  # what others hold, and what is imported: to look through it takes longer than to train
    loop(tmp_path, step=step, steps=25, interval=interval, weights_interval=500)
    assert held[0] == held[1] > 0
