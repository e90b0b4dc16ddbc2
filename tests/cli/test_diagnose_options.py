"""Options of ``flashpoint diagnose`` that what it is given has no use for, and models that are none."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from flashpoint.cli import diagnose_tables
from flashpoint.cli.main import main
from flashpoint.diagnosis.call import AttentionCall


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    q, k, v, grad_out = torch.randn(4, 2, 1, 8, 4).unbind()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    call = AttentionCall(q, k, v, grad_out, out, None, None, None, True, 0.5, 1, 0, "sdpa")
    call.write(tmp_path / "layer-01.safetensors")
    return tmp_path


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["diagnose", *arguments])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("options", [["--function", "a:b"], ["--step", "3"], ["--text", __file__]])
def test_an_option_that_would_be_passed_over_is_refused(capture: Path, options: list[str]) -> None:
    assert options[0] in refused(str(capture), *options)
    assert options[0] in refused(str(capture / "layer-01.safetensors"), *options)


@pytest.mark.slow
def test_a_folder_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    assert "no model of Transformers" in refused(str(tmp_path), "--text", __file__)


def test_a_text_in_another_encoding_is_one_line(tmp_path: Path) -> None:
    text = tmp_path / "latin.txt"
    text.write_bytes("Gefäß".encode("latin-1"))
    told = refused(str(tmp_path), "--text", str(text))
    assert f"--text {text}: no UTF-8, from byte 3 on (0xe4); give a text, or convert it" in told


def test_nan_in_the_inputs_is_not_said_to_be_the_attentions() -> None:
    assert "computes something wrong" not in diagnose_tables._advice({"nonfinite"})
    assert "computes something wrong" in diagnose_tables._advice({"nonfinite", "out_rows"})


def test_every_layer_that_is_asked_for_has_to_be_there(capture: Path) -> None:
    assert "--layer 5: there are layers 1" in refused(str(capture), "--layer", "1", "--layer", "5")
