"""The batch order: a pure function of seed and step, and the batches it points at."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashpoint.errors import UserError


class Order(Protocol):
    """Says which windows a step trains on."""

    def windows(self, step: int) -> NDArray[np.uint32]:
        """Return the window numbers [micro-batches, ranks, sequences]."""
        ...


class BatchOrder:
    """Windows of ``context`` + 1 tokens at multiples of ``context``, a fresh permutation each epoch.

    Args:
        n_tokens: tokens in the stream.
        context: T; window w holds tokens w·T to w·T + T.
        shape: (micro-batches, ranks, sequences) of one optimiser step.
        seed: of the permutations (NumPy's PCG64, seeded by seed and epoch).

    Raises:
        UserError: the stream is shorter than one window.
    """

    def __init__(self, n_tokens: int, context: int, shape: tuple[int, int, int], seed: int) -> None:
        self.n_windows = (n_tokens - 1) // context
        if self.n_windows < 1:
            raise UserError(
                f"model.context={context}: the {n_tokens:,} training tokens hold no whole sequence; "
                "take more data or a shorter context"
            )
        self.shape, self.seed = shape, seed
        self._epoch, self._permutation = -1, np.empty(0, np.uint32)

    def windows(self, step: int) -> NDArray[np.uint32]:
        """Return the window numbers of a step, of the shape given."""
        first = step * int(np.prod(self.shape))
        positions = np.arange(first, first + int(np.prod(self.shape)), dtype=np.int64)
        epochs, places = np.divmod(positions, self.n_windows)
        windows = np.empty(len(positions), np.uint32)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = self._permutation_of(int(epoch))[places[chosen]]
        return windows.reshape(self.shape)

    def _permutation_of(self, epoch: int) -> NDArray[np.uint32]:
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._permutation = generator.permutation(self.n_windows).astype(np.uint32)
            self._epoch = epoch
        return self._permutation


def gather_windows(tokens: NDArray[np.uint16], windows: NDArray[np.uint32], context: int) -> Tensor:
    """Return the tokens [..., T + 1] int64 of the windows [...]: inputs without the last, targets without the first."""
    starts = windows.astype(np.int64).ravel() * context
    batch = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    return torch.from_numpy(batch.reshape(*windows.shape, context + 1))
