"""The probes that a configuration can name: the names stand in :mod:`flashpoint.config`, too."""

from __future__ import annotations

from flashpoint.probes.attention import DeltaError, Deviation, NullDirection, Probe, Rows, Scores, Similarity
from flashpoint.probes.out_error import OutBias, Ties

BUILT_IN: dict[str, type[Probe]] = {
    "delta_error": DeltaError,
    "ties": Ties,
    "scores": Scores,
    "rows": Rows,
    "deviation": Deviation,
    "out_bias": OutBias,
    "null_direction": NullDirection,
    "similarity": Similarity,
}
