"""Tensors of a checkpoint whose sidecar and hash match, and that are not those of its run."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashpoint.errors import UserError
from flashpoint.files import file_sha256, write_json
from flashpoint.lab.stored_config import read_config
from flashpoint.lab.training import plan
from flashpoint.lab.training.execution import run
from flashpoint.runs.chain import Chain, ChainWriter
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.subfolders import by_step
from tests.composed import composed
from tests.conftest import TINY

pytestmark = [pytest.mark.lab, pytest.mark.slow]
QKV, MOMENT, KEPT = "model/blocks.0.attention.qkv.weight", "exp_avg/token_embedding.weight", "probes/similarity/inputs"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A folder of runs, with one of 12 steps: checkpoints follow 4, 8 and 10, checksums 4, 8 and 12."""
    runs = tmp_path_factory.mktemp("tensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "fix_numerics", lambda *_: None)
        run(composed(*TINY, f"data.path={text_file}", f"data.root={runs / 'data'}", f"runs_dir={runs}",
                     "run_name=whole", "checkpoints.interval=2", "probes.attention=[delta_error,similarity]",
                     "probes.attention_interval=3", "detector.window=2"))  # fmt: skip
    return runs


@pytest.fixture
def tampered(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A copy of it that was cut short."""
    monkeypatch.setattr(plan, "fix_numerics", lambda *_: None)
    folder = RunFolder(tmp_path / "runs/cut")
    shutil.copytree(recorded / "whole", folder.path)
    folder.outcome.unlink()
    return folder


def newest(folder: RunFolder, step: int = 10) -> Path:
    for later in (at for at in by_step(folder.checkpoints, ".json") if at > step):
        (folder.checkpoints / f"step-{later:09}.json").unlink()
    return folder.checkpoints / f"step-{step:09}.safetensors"


def rewrite(path: Path, change: Callable[[Tensors], object], state: Callable[[dict[str, Any]], object] = id) -> None:
    """Change tensors and state of a checkpoint, and make size and hash of its sidecar fit."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        kept = json.loads(file.metadata()["state"])
    change(tensors)
    state(kept)
    save_file(tensors, path, metadata={"state": json.dumps(kept)})
    sidecar = json.loads(path.with_suffix(".json").read_text())
    size, digest = path.stat().st_size, file_sha256(path)
    write_json(path.with_suffix(".json"), {**sidecar, "size": size, "sha256": digest})


def resumed(folder: RunFolder) -> None:
    run(replace(read_config(folder.config), resume=str(folder.path), runs_dir=str(folder.path.parent)))


CHANGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda held: held.pop(QKV), f"{QKV}: missing, expected F32 \\[96, 32\\]"),
    "int8": (lambda held: held.update({QKV: held[QKV].to(torch.int8)}), f"{QKV}: I8 \\[96, 32\\], expected F32"),
    "of one value": (lambda held: held.update({QKV: torch.zeros(1)}), f"{QKV}: F32 \\[1\\], expected F32 \\[96, 32\\]"),
    "transposed": (lambda held: held.update({QKV: held[QKV].T.contiguous()}), f"{QKV}: F32 \\[32, 96\\], expected"),
    "in FP64": (lambda held: held.update({MOMENT: held[MOMENT].double()}), f"{MOMENT}: F64 .*, expected F32"),
    "NaN": (lambda held: held[QKV][3].fill_(torch.nan), f"{QKV}: holds NaN or infinity, before which the run"),
    "an infinite moment": (lambda held: held[MOMENT][0].fill_(torch.inf), f"{MOMENT}: holds NaN or infinity"),
    "one more": (lambda held: held.update({"model/extra": torch.zeros(2)}), "model/extra: no tensor of this model"),
    "a count": (lambda held: held[QKV.replace("model/", "step/")].add_(1), "step/.* is \\d+ after \\d+ steps; "),
    "the step": (lambda held: held.pop("seed_and_step"), "seed_and_step: missing, expected I64 \\[2\\]"),
    "none": (lambda held: held.clear(), "seed_and_step: missing, expected I64 \\[2\\]"),
    "of a probe, another": (lambda held: held.update({KEPT: torch.zeros(2)}), "the state of similarity is none that"),
    "of a probe, half": (lambda held: held.pop(KEPT), "the state of similarity is none that it has in this model"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_are_not_the_runs_are_one_line_with_file_and_tensor(tampered: RunFolder, name: str) -> None:
    """An int8 and a one-element tensor were taken, and the run called equal; the others were tracebacks."""
    change, told = CHANGES[name]
    path = newest(tampered)
    rewrite(path, change)
    with pytest.raises(UserError, match=f"^{path}: {told}"):
        resumed(tampered)


def test_finite_weights_of_another_state_are_found_where_the_chain_has_a_checksum(tampered: RunFolder) -> None:
    path = newest(tampered, step=8)
    rewrite(path, lambda held: held[QKV].mul_(1.001))
    with pytest.raises(UserError, match=f"^{path}: other weights or moments than the run had after 8 steps"):
        resumed(tampered)
    path.unlink()
    resumed(tampered)  # from the checkpoint before it


@pytest.mark.parametrize("sums", ["x", [1.0], [[1.0, 2.0]], None, [[1.0, 2.0], [3.0]], {"a": 1}])
def test_what_a_probe_had_summed_is_of_its_model(tampered: RunFolder, sums: Any) -> None:
    rewrite(newest(tampered), id, lambda state: state["probes"]["attention"]["delta_error"].update(cumulative=sums))
    with pytest.raises(UserError, match="the state of delta_error is none that it has in this model"):
        resumed(tampered)


def test_norms_of_other_heads_are_no_state_of_the_sentinel(tampered: RunFolder) -> None:
    rewrite(newest(tampered), id, lambda state: state["probes"]["sentinel"].update(history=[[3, [[1.0]]]]))
    with pytest.raises(UserError, match="the state of sentinel is none that it has in this model"):
        resumed(tampered)


def test_a_run_that_turned_nan_may_have_nan_in_its_weights(tampered: RunFolder, tmp_path: Path) -> None:
    """Where a step before computed NaN; else not, and a twin's weights are read in the same way."""
    records = Chain.read(tampered.chain).records
    writer = ChainWriter(tmp_path / "chain.bin")
    for step, record in enumerate(records[:10]):
        values = record[["loss", "grad_norm"]].tolist()
        loss, norm = (torch.tensor(value, dtype=torch.uint32).view(torch.float32).item() for value in values)
        writer.append(float("nan") if step == 8 else loss, norm, 0)
    digest = writer.digest
    writer.close()
    shutil.copy(tmp_path / "chain.bin", tampered.chain)

    def of_the_chain(state: dict[str, Any]) -> None:
        state["chain"] = digest

    rewrite(newest(tampered), lambda held: held[QKV].fill_(torch.nan), of_the_chain)
    resumed(tampered)
    assert tampered.read_outcome().outcome == "nonfinite"
