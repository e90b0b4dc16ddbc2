"""Options of ``flashpoint diagnose`` that what it is given has no use for, and models that are none."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from flashpoint.cli.main import main
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.form import Form
from flashpoint.watching.captures import read_calls


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    write_call(tmp_path, 1)
    return tmp_path


def write_call(folder: Path, layer: int, *, nan: bool = False, wrong: bool = False, made: bool = False) -> None:
    """Write a layer of PyTorch's attention: with NaN in a query or a row of O, or with twice what a row of O is."""
    q, k, v, grad_out = torch.randn(4, 2, 1, 8, 4).unbind()
    if nan:
        q[0, 0, 5] = torch.nan
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    if wrong:
        out[0, 0, 5] *= 2
    if made:
        out[0, 0, 5] = torch.nan
    call = AttentionCall(q, k, v, grad_out, Form(True, 0.5), layer, 0, "sdpa", out)
    call.write(folder / f"layer-{layer:02}.safetensors")


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["diagnose", *arguments])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("options", [["--function", "a:b"], ["--step", "3"], ["--text", __file__]])
def test_an_option_that_would_be_passed_over_is_refused(capture: Path, options: list[str]) -> None:
    assert options[0] in refused(str(capture), *options)
    assert options[0] in refused(str(capture / "layer-01.safetensors"), *options)


def test_layers_come_in_their_order(tmp_path: Path) -> None:
    for layer in (100, 99, 9):
        write_call(tmp_path, layer)
    assert [call.layer for call in read_calls(tmp_path)] == [9, 99, 100]


@pytest.mark.slow
def test_a_folder_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    assert "no model of Transformers" in refused(str(tmp_path), "--text", __file__)


@pytest.mark.slow
def test_code_in_a_folder_of_a_model_is_not_run(tmp_path: Path) -> None:
    (folder := tmp_path / "theirs").mkdir()
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Theirs:\n    pass\n")
    named = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "theirs.Theirs")
    (folder / "config.json").write_text(json.dumps({"auto_map": named}))
    of_tokenizer = {"auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    assert "has code of its own, which is not run" in refused(str(folder), "--text", __file__)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.slow
def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    """Transformers makes it foretell the next token, which it sees: dO would be of a loss that trains no model."""
    from tokenizers import Tokenizer, models
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    words = {chr(code): code - 32 for code in range(32, 127)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(words, []))).save_pretrained(tmp_path)
    config = BertConfig(vocab_size=95, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    result = CliRunner().invoke(main, ["diagnose", str(tmp_path), "--text", __file__, "--tokens", "32"])
    assert result.exit_code == 2
    told = result.stderr.splitlines()[-1]  # Transformers has told something before
    assert f"{tmp_path}: its attention is not causal" in told
    assert "flashpoint.watch" in told


def test_a_text_in_another_encoding_is_one_line(tmp_path: Path) -> None:
    text = tmp_path / "latin.txt"
    text.write_bytes("Gefäß".encode("latin-1"))
    told = refused(str(tmp_path), "--text", str(text))
    assert f"--text {text}: no UTF-8, from byte 3 on (0xe4); give a text, or convert it" in told


def test_nan_in_the_inputs_is_not_said_to_be_the_attentions(tmp_path: Path) -> None:
    write_call(tmp_path, 1, nan=True)
    told = printed(tmp_path)
    assert "nonfinite" in told
    assert "the fault lies before it" in told
    assert "another kernel" not in told
    write_call(tmp_path, 1, made=True)
    made = printed(tmp_path)
    assert "the fault lies before it" not in made
    assert "another kernel" in made
    assert "computes something wrong" not in told
    write_call(tmp_path, 2, wrong=True)
    assert "computes something wrong" in printed(tmp_path)


def printed(capture: Path) -> str:
    result = CliRunner().invoke(main, ["diagnose", str(capture)])
    assert result.exit_code in (0, 1), result.output
    return result.stdout


def test_every_layer_that_is_asked_for_has_to_be_there(capture: Path) -> None:
    assert "--layer 5: there are layers 1" in refused(str(capture), "--layer", "1", "--layer", "5")
