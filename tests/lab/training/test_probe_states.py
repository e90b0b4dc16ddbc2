"""What probes remember from one observation to the next: a resumed run measures what an undisturbed one does."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from flashpoint.files import file_sha256, write_json
from flashpoint.lab.probes.runner import BUILT_IN
from flashpoint.lab.training.run_size import RunSize
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metrics import read_metrics
from tests.composed import composed
from tests.conftest import TINY, Command

pytestmark = pytest.mark.slow
EVERY = (
    f"probes.attention=[{','.join(BUILT_IN)}]", "probes.attention_interval=4", "probes.weights_interval=1",
    "checkpoints.interval=6",
)  # fmt: skip
"""Observed are the steps 3, 7 and 11; checkpoints follow 6 and 12 steps."""


@pytest.fixture
def run(train: Command, tmp_path: Path) -> RunFolder:
    result = train(*EVERY, "run_name=whole")
    assert result.returncode == 0, result.stderr
    return RunFolder(tmp_path / "runs/whole")


def resumed(run: RunFolder, train: Command, name: str, *overrides: str) -> RunFolder:
    """A copy of a run that was killed after its first checkpoint, and went on from there."""
    copy = RunFolder(run.path.with_name(name))
    if not copy.path.exists():
        shutil.copytree(run.path, copy.path)
    copy.outcome.unlink()
    for late in copy.checkpoints.glob("*12.*"):
        late.unlink()
    result = train(f"resume={name}", *overrides, tiny=False)
    assert result.returncode == 0, result.stderr
    return copy


def without(checkpoint: Path, prefix: str) -> int:
    """Take the tensors of a prefix out of a checkpoint, as an earlier version wrote it; return their bytes."""
    with safe_open(checkpoint, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        metadata = file.metadata()
    taken = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    save_file({name: tensors[name] for name in tensors.keys() - taken.keys()}, checkpoint, metadata=metadata)
    sidecar: dict[str, Any] = json.loads(checkpoint.with_suffix(".json").read_text())
    size, digest = checkpoint.stat().st_size, file_sha256(checkpoint)
    write_json(checkpoint.with_suffix(".json"), {**sidecar, "size": size, "sha256": digest})
    return sum(tensor.nbytes for tensor in taken.values())


def test_a_resumed_run_has_the_metrics_of_heads_of_an_undisturbed_one(run: RunFolder, train: Command) -> None:
    """``step_similarity`` of the first observation was missing."""
    whole, again = (read_metrics(one.metrics) for one in (run, resumed(run, train, "killed")))
    of_heads = {name: series for name, series in whole.items() if series[1].ndim == 3}
    assert of_heads["step_similarity"][0].tolist() == [7, 11]
    for name, (steps, values) in of_heads.items():
        assert np.array_equal(again[name][0], steps), name
        assert np.array_equal(again[name][1], values, equal_nan=True), name


def test_a_checkpoint_of_an_earlier_version_resumes_to_the_same_digest(run: RunFolder, train: Command) -> None:
    old = RunFolder(run.path.with_name("old"))
    shutil.copytree(run.path, old.path)
    assert without(old.checkpoints / "step-000000006.safetensors", "probes/") > 0
    digests = [one.read_outcome().digest for one in (run, resumed(run, train, "old"))]
    assert digests[0] == digests[1]
    assert read_metrics(old.metrics)["step_similarity"][0].tolist() == [11]


def test_another_number_of_observed_sequences_is_compared_with_what_was_kept(run: RunFolder, train: Command) -> None:
    """Of 4 sequences 64 tokens were kept; of 2 there are 32."""
    branch = train("replay=whole", "from_step=6", "probes.sequences=2", "run_name=branch", tiny=False)
    assert branch.returncode == 0, branch.stderr
    steps, values = read_metrics(RunFolder(run.path.with_name("branch")).metrics)["step_similarity"]
    assert steps.tolist() == [7, 11]
    assert np.isfinite(values).all()


def test_a_checkpoint_is_as_large_as_its_budget_counts(run: RunFolder, text_file: Path) -> None:
    data = (f"data.path={text_file}",)
    with safe_open(run.checkpoints / "step-000000012.safetensors", "pt") as file:
        size = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - not a mapping
    assert RunSize.of_config(composed(*TINY, *EVERY, *data), "cpu").state_bytes == size
    plain = without(run.checkpoints / "step-000000012.safetensors", "probes/")
    fewer = composed(*TINY, *EVERY, *data, "probes.attention_interval=0")
    assert RunSize.of_config(fewer, "cpu").state_bytes == size - plain
