"""Captures of a watched run as a diagnosis reads them: half-written ones, several, and files that are none."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.errors import UserError
from flashpoint.watching.captures import captured_steps, read_calls
from tests.watching.loops import loop, plain


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A watched run with captures of steps 0 and 2."""

    def step(*given: object) -> None:
        if given[1] in (0, 2):
            given[2].capture(sequences=0)  # type: ignore[attr-defined]
        plain(*given)  # type: ignore[arg-type]

    loop(tmp_path, step=step)
    return tmp_path / "own"


def test_the_last_of_several_is_read_and_the_others_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert {call.step for call in read_calls(run)} == {2}
    assert "--step takes each of steps 0, 2" in capsys.readouterr().err
    assert {call.step for call in read_calls(run, 0)} == {0}
    assert capsys.readouterr().err == ""


def test_a_capture_without_tensors_hides_none_before_it(run: Path) -> None:
    """As of a disk that is full, or of a batch alone."""
    (run / "captures/step-0000003").mkdir()
    (run / "captures/step-0000003/.layer-01.safetensors.partial").touch()
    assert list(captured_steps(run)) == [0, 2]
    assert {call.step for call in read_calls(run)} == {2}
    with pytest.raises(UserError, match="captured steps 0, 2"):
        read_calls(run, 3)


def test_a_folder_of_a_model_is_told_from_a_run_without_captures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="--text FILE"):
        read_calls(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype"), [("k", torch.bfloat16), ("q", torch.int64), ("grad_out", torch.float8_e4m3fn)]
)
def test_dtypes_that_cannot_be_compared_are_one_line(run: Path, name: str, dtype: torch.dtype) -> None:
    file = run / "captures/step-0000002/layer-01.safetensors"
    tensors: dict[str, Tensor] = load_file(file)
    save_file({**tensors, name: tensors[name].to(dtype)}, file)
    with pytest.raises(UserError, match=f"{name} {str(dtype).removeprefix('torch.')}.* need one dtype"):
        AttentionCall.read(file)
