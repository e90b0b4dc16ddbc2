"""Made-up runs that have all that evidence needs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashpoint.runs.chain import ChainWriter
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metrics import MetricsFile
from flashpoint.runs.run import Run
from tests.records import write_run

STEPS = 45


def write_kept_run(path: Path, seed: int = 0, heads: tuple[int, int] = (2, 3)) -> Run:
    """A run of 45 steps with loss and gradient norm of each, norms of heads every tenth, and a digest chain."""
    random = np.random.default_rng(seed)
    write_run(path, {"name": "flash_bf16"}, seed=seed, steps=STEPS, onset=40)
    folder = RunFolder(path)
    losses, norms = random.standard_normal((2, STEPS), np.float32)
    norms[3] = np.nan
    chain, metrics = ChainWriter(folder.chain), MetricsFile(folder.metrics)
    for step, (loss, norm) in enumerate(zip(losses.tolist(), norms.tolist(), strict=True)):
        chain.append(loss, norm, state=2**64 - 1 - step if step % 10 == 0 else 0)
        metrics.log(step, {"loss": loss, "grad_norm": norm})
        if step % 10 == 9:
            metrics.log(step, {"w_q_spectral_norm": random.standard_normal(heads), "only_once": 1.0})
    chain.close()
    metrics.close()
    set_outcome(path, chain_digest=chain.digest, digest=f"{seed:016x}")
    return Run.of_folder(folder)


def set_outcome(path: Path, **values: Any) -> None:
    outcome = json.loads((path / "outcome.json").read_text())
    (path / "outcome.json").write_text(json.dumps({**outcome, **values}))


def assert_equal(one: Run, other: Run, digits: int) -> None:
    """All that two runs hold is the same, metrics of heads to so many significant digits, of the run to 6 at least."""
    assert (one.name, one.config, one.manifest, one.outcome) == (
        other.name,
        other.config,
        other.manifest,
        other.outcome,
    )
    assert one.chain.records.tobytes() == other.chain.records.tobytes()
    assert one.columns.keys() == other.columns.keys()
    for name, (steps, values) in one.columns.items():
        np.testing.assert_array_equal(steps, other.columns[name][0])
        stored = digits if values.ndim == 3 else max(digits, 6)
        np.testing.assert_array_equal(rounded(values, stored), rounded(other.columns[name][1], stored))


def rounded(values: np.ndarray, digits: int) -> list[Any]:
    return np.vectorize(lambda value: f"{value:.{digits}g}")(values).tolist()


def bytes_of(root: Path, parts: Sequence[str] = ("*.parquet", "*/*.parquet", "*.csv")) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for part in parts for path in sorted(root.glob(part))}
