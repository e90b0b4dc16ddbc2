"""``flashpoint diagnose --attention`` on a GPU: each backend on a capture, and cuDNN in deterministic mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from flashpoint.cli.main import main
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.form import Form

pytestmark = pytest.mark.gpu
ERRORS = ("O error", "dQ error", "dK error", "dV error")


@pytest.fixture(autouse=True)
def _in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As steps of a run are repeated."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch._dynamo.reset()  # how often FlexAttention may be compiled in a process is bounded
    yield
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before)


def diagnose(folder: Path, attention: str) -> dict[str, Any]:
    """Of four sequences, in which four heads share two of keys."""
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(4, heads, 256, 64, generator=generator).bfloat16() for heads in (4, 2, 2, 4)]
    call = AttentionCall(*tensors, Form(True, 0.125), 1, 0, "sdpa")
    call.write(folder / "layer-01.safetensors")
    result = CliRunner().invoke(main, ["diagnose", str(folder), "--attention", attention, "--format", "json"])
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def test_each_backend_runs_near_fp64_and_nothing_is_found(tmp_path: Path) -> None:
    told = diagnose(tmp_path, "all")
    rows = {row["attention"]: row for row in told["tables"][0]["rows"]}
    for name in ("sdpa:math", "sdpa:flash", "sdpa:efficient", "sdpa:cudnn", "flex"):
        row = rows.pop(name)
        assert (row["why not"], row["findings"]) == ("", ""), name
        assert all(0 < row[error] < 2**-6 for error in ERRORS), name
        assert row["follows O"] is not None, name
    assert all(row["why not"] or row["O error"] < 2**-6 for row in rows.values())  # installed ones may not compute here
    assert "sdpa:cudnn was called outside PyTorch's deterministic mode" in told["tables"][0]["note"]


def test_cudnn_alone_is_called_outside_the_mode(tmp_path: Path) -> None:
    assert "sdpa:cudnn was called outside PyTorch's deterministic mode" in diagnose(tmp_path, "sdpa:cudnn")["heading"]
