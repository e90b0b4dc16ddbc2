"""The batch order is a function of seed and step alone, and every epoch sees every window once."""

import numpy as np
import pytest
import torch

from flashpoint.errors import UserError
from flashpoint.lab.data.batches import BatchOrder, gather_windows


def order(seed: int = 0, shape: tuple[int, int, int] = (2, 1, 3), n_tokens: int = 10 * 16 + 1) -> BatchOrder:
    return BatchOrder(n_tokens, 16, shape, seed)


def test_each_epoch_takes_every_window_once_even_across_steps() -> None:
    windows = np.concatenate([order().windows(step).ravel() for step in range(10)])  # 60 = 6 epochs of 10
    for epoch in windows.reshape(6, 10):
        assert sorted(epoch) == list(range(10))


def test_epochs_and_seeds_differ() -> None:
    first, second = order(shape=(1, 1, 10)).windows(0), order(shape=(1, 1, 10)).windows(1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, order(seed=1, shape=(1, 1, 10)).windows(0))


def test_a_step_does_not_depend_on_the_steps_asked_before() -> None:
    forward = order()
    in_order = [forward.windows(step) for step in range(8)]
    backward = order()
    for step in reversed(range(8)):
        np.testing.assert_array_equal(backward.windows(step), in_order[step])


def test_splitting_a_batch_keeps_its_sequences() -> None:
    whole, split = order(shape=(1, 1, 6)), order(shape=(3, 1, 2))
    for step in range(5):
        np.testing.assert_array_equal(whole.windows(step).ravel(), split.windows(step).ravel())


def test_the_last_window_has_a_target_for_its_last_token() -> None:
    assert order(n_tokens=161).n_windows == 10
    assert order(n_tokens=160).n_windows == 9


def test_data_shorter_than_one_sequence_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.context=16"):
        BatchOrder(16, 16, (1, 1, 1), 0)


def test_gathered_windows_overlap_by_the_target_of_the_last_token() -> None:
    tokens = np.arange(200, dtype=np.uint16)
    batch = gather_windows(tokens, np.array([[0], [3]], np.uint32), 16)
    assert batch.tolist() == [[list(range(17))], [list(range(48, 65))]]
    assert batch.dtype == torch.int64
