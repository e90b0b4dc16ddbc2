"""Sequences that come again, as where a loop passes over few data several times: they are no further evidence.

A sequence has an *identity*, a word that it shares with its repetitions alone. The empty word is that of a sequence of
which nobody knows whether it came before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall


def digests(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """Return a digest of each of the rows [N] that tensors [N, …] have together: of their bytes. Without any, none."""
    return tuple(_digest(rows) for rows in zip(*(x.detach().cpu() for x in tensors), strict=True))


def identities_of(call: AttentionCall) -> tuple[str, ...]:
    """Return the identities of a call's sequences [N]: its own, or else digests of Q, K and V of the first head.

    Such a digest is another one as soon as the weights have moved.
    """
    return call.identities or digests([x[:, 0] for x in (call.q, call.k, call.v)])


def by_identity(identities: Sequence[str]) -> list[list[int]]:
    """Return the places of each different sequence, in the order in which the sequences came first."""
    places: dict[str | int, list[int]] = {}
    for place, one in enumerate(identities):
        places.setdefault(one or place, []).append(place)
    return list(places.values())


def averaged(values: Tensor, identities: Sequence[str]) -> Tensor:
    """Return values [S, H] of sequences as those of the different ones, each the mean over its repetitions. NaN is left
    out where another repetition has a value."""
    return torch.stack([values[places].nanmean(0) for places in by_identity(identities)])


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for one in tensors:
        digest.update(one.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
