"""The heat map of a run that goes on: time from left to right, a head a band, larger norms brighter."""

import numpy as np

from flashpoint.lab.wandb_tracking.media import heat_map


def test_each_head_is_a_band_and_time_runs_to_the_right() -> None:
    norms = np.array([[0.3, 1.0], [3.0, 1.0], [300.0, 1.0]])  # three measurements of two heads
    picture = heat_map(norms)
    assert picture.shape == (24, 720, 3)
    first, second = picture[:12], picture[12:]
    assert (second == second[0, 0]).all()  # does not change
    assert (first == first[:1]).all()
    columns = first[0].astype(int)
    changes = np.flatnonzero((columns[1:] != columns[:-1]).any(-1)) + 1
    assert changes.tolist() == [240, 480]
    assert columns[0].tolist() == [0, 0, 3]  # both ends of Matplotlib's magma
    assert columns[-1].tolist() == [251, 252, 191]
    assert columns[240].sum() < columns[480].sum()


def test_what_is_no_number_is_grey_and_what_is_beyond_the_colours_is_their_end() -> None:
    picture = heat_map(np.array([[np.nan, np.inf, 1e9, 0.0]]))
    bands = picture[::12, 0].tolist()
    assert bands == [[128] * 3, [128] * 3, [251, 252, 191], [0, 0, 3]]
