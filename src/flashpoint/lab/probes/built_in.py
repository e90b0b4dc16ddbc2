"""The probes that a configuration can name: the names stand in :mod:`flashpoint.lab.config`, too."""

from __future__ import annotations

from flashpoint.lab.probes.attention import DeltaError, Deviation, NullDirection, Probe, Rows, Scores, Similarity
from flashpoint.lab.probes.out_error import OutBias, Ties

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
