"""Which code made a run, and on what."""

import dataclasses
import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import flashpoint
import flashpoint_kernels
from flashpoint.lab.config import Config, TrainConfig
from flashpoint.lab.precision import Precision
from flashpoint.lab.training import determinism
from flashpoint.lab.training.determinism import (
    describe_environment,
    environment_difference,
    source_difference,
    source_digest,
)
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs import migrations
from flashpoint.runs.manifest import Environment


def as_read(environment: dict[str, Any]) -> Environment:
    """Return the record of a manifest's environment; an older version wrote fewer keys."""
    manifest = migrations.manifest({"environment": environment, "data": {}})
    return Environment.model_validate(manifest["environment"])


def test_the_source_is_all_python_files_and_their_places(tmp_path: Path) -> None:
    package, kernels = tmp_path / "src/package", tmp_path / "kernels/of_it"
    (package / "inside").mkdir(parents=True)
    kernels.mkdir(parents=True)
    (package / "b.py").write_bytes(b"xy")
    (package / "inside/a.py").write_bytes(b"")
    (kernels / "k.py").write_bytes(b"z")
    (package / "b.pyc").write_bytes(b"no source")
    by_hand = b"package/b.py\x002\x00xy" + b"package/inside/a.py\x000\x00" + b"of_it/k.py\x001\x00z"
    assert source_digest(package, kernels) == hashlib.sha256(by_hand).hexdigest()


def test_a_manifests_source_covers_the_kernels() -> None:
    packages = [Path(str(package.__file__)).parent for package in (flashpoint, flashpoint_kernels)]
    assert describe_environment(torch.device("cpu"), Config()).source == source_digest(*packages)


def test_a_commit_is_of_a_repository_that_tracks_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel in an environment inside somebody's project had the project's commit."""

    def git(*arguments: str) -> str:
        own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.check_output(["git", *own, *arguments], cwd=tmp_path, text=True).strip()

    def commit() -> object:
        determinism._commit.cache_clear()  # of another process
        return describe_environment(torch.device("cpu"), Config()).commit

    package = tmp_path / ".venv/flashpoint"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "theirs.py").touch()
    git("init", "--quiet")
    git("add", "theirs.py")
    git("commit", "--quiet", "-m", "theirs")
    monkeypatch.setattr(determinism, "_PACKAGES", [package])
    assert commit() is None
    git("add", ".venv")
    git("commit", "--quiet", "-m", "with its source")
    assert commit() == git("rev-parse", "HEAD")
    (package / "__init__.py").write_text("changed")
    assert commit() == f"{git('rev-parse', 'HEAD')}+changes"


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32), ("tf32", torch.float32)],
)
def test_a_manifest_names_pytorchs_kernel_of_the_precision(
    precision: Precision, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU FP32 has another one than BF16, whose name FP32 runs had."""
    monkeypatch.setattr(determinism, "sdpa_operation", lambda q: str(q.dtype))
    attention = AttentionVariant(name="sdpa", kernel="sdpa")
    config = dataclasses.replace(Config(), attn=attention, train=TrainConfig(precision=precision))
    assert describe_environment(torch.device("cpu"), config).sdpa == str(dtype)


def test_a_manifest_has_the_tiles_of_the_kernels_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, of heads of 128 features, those of ``flash_fixed`` are other kernels."""
    monkeypatch.setattr(determinism, "chip_of", lambda _: "sm_90")
    monkeypatch.setattr(determinism, "hardware_name", str)
    fixed = AttentionVariant(delta="out_fp32", out_residual_bits=6)

    def forward(attention: AttentionVariant, d_model: int) -> dict[str, int | None]:
        model = dataclasses.replace(Config().model, n_head=2, d_model=d_model)
        tiles = describe_environment(
            torch.device("cuda"), dataclasses.replace(Config(), attn=attention, model=model)
        ).tiles
        assert tiles is not None
        return tiles["forward"]

    plain = forward(AttentionVariant(), 256)
    assert forward(fixed, 256) == {**plain, "bq": 128, "bk": 128, "stages": 2, "registers": 168}
    assert forward(fixed, 128) == forward(AttentionVariant(), 128)


@pytest.mark.parametrize(
    ("recorded", "here", "told"),
    [
        ("ScaledDotProductFlashAttention", "ScaledDotProductFlashAttention", None),
        ("ScaledDotProductFlashAttention", "math", "sdpa ScaledDotProductFlashAttention → math"),
        ("ScaledDotProductFlashAttention", None, None),  # a replay with another attention
        (None, "math", None),
    ],
)
def test_another_production_kernel_is_told(recorded: str | None, here: str | None, told: str | None) -> None:
    same = {"torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0", "hardware": "NVIDIA H200", "tiles": {}}
    line = environment_difference(as_read({**same, "sdpa": recorded}), as_read({**same, "sdpa": here}))
    whole = f"not the tape's environment ({told}): same batches and initial weights, other bits"
    assert line == (whole if told else None)


def test_a_run_recorded_before_the_production_kernel_was_is_compared_in_the_rest() -> None:
    old = {"torch": "2.11.0", "cuda": None, "triton": None, "hardware": "CPU, 2 threads", "tiles": None}
    assert environment_difference(as_read(old), as_read({**old, "sdpa": "math"})) is None
    line = environment_difference(as_read(old), as_read({**old, "torch": "2.12.0", "sdpa": "math"}))
    assert line == "not the tape's environment (torch 2.11.0 → 2.12.0): same batches and initial weights, other bits"


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ({"source": "a" * 64, "commit": "1" * 40}, "111111111111, here 222222222222"),
        ({"source": "a" * 64, "commit": None}, "aaaaaaaaaaaa, here 222222222222"),
        ({"source": "b" * 64, "commit": "1" * 40}, None),  # another commit of the same code
        ({}, None),
    ],
)
def test_a_run_that_goes_on_with_other_code_is_told(recorded: dict[str, Any], told: str | None) -> None:
    here = {"torch": "2.11.0", "source": "b" * 64, "commit": "2" * 40}
    line = source_difference(as_read({"torch": "2.11.0", **recorded}), as_read(here))
    assert line == told or (told and line and line.startswith(f"begun with other source code ({told}): its digest"))
