"""``flashpoint diagnose`` on a run of this package, on a capture and on a model of Transformers."""

import dataclasses
import json
import os
import pty
import re
import select
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from safetensors.torch import save_file

from flashpoint.cli import diagnose_tables
from flashpoint.cli.main import main
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.delta_bias import delta_sample
from flashpoint.diagnosis.faults import Fault
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.other_attention import function_named
from flashpoint.diagnosis.probe import results_of
from flashpoint.drop_in import attention
from flashpoint.runs.folder import RunFolder
from flashpoint.watching import delta_collection
from flashpoint.watching.interceptor import Interceptor
from tests import warm
from tests.cli.diagnosed import captured, diagnose
from tests.conftest import Command, environment


@pytest.mark.slow
def test_a_terminal_shows_how_many_layers_are_done_and_a_log_does_not(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    captured(Fault("none")).write(path)
    logged = warm.run([sys.executable, "-m", "flashpoint", "diagnose", str(path)], env=environment())
    mine, of_terminal = pty.openpty()
    script = tmp_path / "of_a_terminal.py"
    script.write_text(f"""
import os, runpy, sys
os.dup2(os.open({os.ttyname(of_terminal)!r}, os.O_RDWR), 2)
sys.stderr = open(2, "w", closefd=False)
sys.argv = ["flashpoint", "diagnose", {str(path)!r}]
runpy.run_module("flashpoint", run_name="__main__", alter_sys=True)
""")
    shown = warm.Process([sys.executable, str(script)], env=environment() | {"TERM": "xterm"})
    told = b""
    while shown.poll() is None or select.select([mine], [], [], 0)[0]:
        if select.select([mine], [], [], 0.05)[0]:
            told += os.read(mine, 1 << 12)
    os.close(mine)
    os.close(of_terminal)
    assert (logged.returncode, logged.stderr) == (0, "")
    assert (shown.returncode, shown.communicate()[0]) == (0, logged.stdout)
    assert b"layers" in told
    assert b"0/1" in told
    assert b"1/1" in told


@pytest.mark.slow
def test_a_run_is_diagnosed_with_its_own_attention(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recorded)
    told = diagnose("runs/original", "--sequences", "8")
    assert "initial weights" in told["heading"]  # it keeps no checkpoint
    *_, measures = told["tables"]
    assert [(row["layer"], row["head"]) for row in measures["rows"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert "called anew" in told["heading"]
    other = diagnose("original", "--sequences", "8", "--attention", "flash_exact_rowsum", "--layer", "2")
    assert [row["layer"] for row in other["tables"][-1]["rows"]] == [2, 2]
    assert all(abs(row["follows O"]) < 0.3 for row in other["tables"][-1]["rows"])


@pytest.mark.slow
def test_a_run_is_diagnosed_with_the_weights_of_the_checkpoint_before_a_step(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("run_name=kept", "checkpoints.interval=5").check_returncode()
    monkeypatch.chdir(tmp_path)
    for step, weights in (("9", "weights after 5 steps"), ("4", "initial weights")):
        assert weights in diagnose("runs/kept", "--sequences", "4", "--step", step)["heading"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "onset", "outcome", "told", "said"),
    [
        (3.0, 1600, "exploded", [(1500, 2, 2)], "W_Q of layer 2 grew, and the loss exploded at step 1,600."),
        (3.0, 1600, "nonfinite", [(1500, 2, 2)], "W_Q of layer 2 grew, and the loss was no finite number at step 1,6"),
        (3.0, None, "stable", [(1500, 2, 2)], "W_Q of layer 2 grew."),
        (3.0, 1400, "exploded", [(1000, 1, 1)], "No early warning came before the loss exploded at step 1,400: "),
        (1.5, 1600, "exploded", [(1500, 2, 2)], "No early warning came before the loss exploded at step 1,600: "),
        (3.0, 400, "exploded", [], ""),  # W_Q had not been measured for long enough
        (1.5, 1600, "nonfinite", [], ""),
        (1.5, None, "stable", [], ""),
    ],
)
def test_what_w_q_did_before_the_onset_is_told(
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: float,
    onset: int | None,
    outcome: str,
    told: list[tuple[int, int, int]],
    said: str,
) -> None:
    monkeypatch.chdir(recorded)  # the data are there
    shutil.copytree("runs/original", tmp_path / "grown")
    grown = RunFolder(tmp_path / "grown")
    with grown.metrics.open("a") as file:
        for step, first_norm, last_norm in ((500, 1.0, 1.0), (1000, 1.2, 1.0), (1500, 1.2, last)):
            norms = [[first_norm, 1.0], [1.0, last_norm]]
            file.write(json.dumps({"step": step, "w_q_spectral_norm": norms}) + "\n")
    changed = {**json.loads(grown.outcome.read_text()), "outcome": outcome, "onset_step": onset}
    grown.outcome.write_text(json.dumps(changed))
    tables = diagnose(str(grown.path), "--sequences", "4")["tables"]
    first = tables[0]
    assert [(row["step"], row["layer"], row["head"]) for row in first["rows"] if "W_Q norm" in row] == told
    assert first["note"].startswith(said)
    assert ("No early warning could come" in tables[-1]["note"]) == (onset == 400)


def test_a_damaged_run_does_not_keep_its_capture_from_being_diagnosed(tmp_path: Path) -> None:
    folder = tmp_path / "captures/step-9"
    folder.mkdir(parents=True)
    capture(folder / "layer-03.safetensors", Fault("none"))
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "metrics.jsonl").write_text("{")
    assert diagnose(str(folder))["heading"].startswith("Nothing found.")


def capture(path: Path, fault: Fault) -> None:
    captured(fault).write(path)


def test_layers_of_several_sizes_are_told_as_that(tmp_path: Path) -> None:
    for layer, (sequences, heads, length, size) in enumerate(((4, 2, 20, 8), (3, 4, 1, 16)), 1):
        q, k, v, grad_out = torch.randn(4, sequences, heads, length, size).bfloat16()
        call = AttentionCall(q, k, v, grad_out, Form(True, 0.25), layer, 9, "sdpa")
        found = results_of(lambda q, k, v, causal, scale: F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale), call)  # fmt: skip
        dataclasses.replace(call, **vars(found)).write(tmp_path / f"layer-0{layer}.safetensors")
    heading = diagnose(str(tmp_path))["heading"]
    assert "2 layers of 2 to 4 heads, 3 to 4 sequences of 1 to 20 tokens, d 8 to 16" in heading


@pytest.mark.parametrize(("dtype", "told"), [(torch.float16, True), (torch.bfloat16, False)])
def test_of_fp16_tensors_it_says_that_a_grad_scaler_scales_nats(tmp_path: Path, dtype: torch.dtype, told: bool) -> None:
    captured(Fault("delta_bias", size=1e-3), dtype=dtype).write(tmp_path / "layer-03.safetensors")
    assert ("GradScaler" in diagnose(str(tmp_path))["tables"][-1]["note"]) == told


@pytest.mark.slow
def test_a_capture_is_diagnosed_with_a_function_of_the_users(tmp_path: Path) -> None:
    capture(tmp_path / "layer-03.safetensors", Fault("dropped_tile", head=1))
    told = diagnose(str(tmp_path))
    assert [(row["layer"], row["heads"], row["finding"]) for row in told["tables"][0]["rows"]] == [(3, "2", "out_rows")]
    own = tmp_path / "own.py"
    own.write_text(
        "from flashpoint.diagnosis.faults import Fault, faulty_attention\n"
        "def attend(q, k, v, is_causal):\n"
        "    return faulty_attention(Fault('dropped_tile', head=1))(q, k, v, is_causal)\n"
    )
    told = diagnose(str(tmp_path / "layer-03.safetensors"), "--attention", f"{own}:attend")
    assert told["tables"][0]["rows"][0]["finding"] == "dropped_tile"
    assert "flash_fp32" in told["tables"][0]["note"]  # is it this kernel alone?
    clean = diagnose(str(tmp_path), "--attention", "sdpa:math")
    assert clean["heading"].startswith("Nothing found.")
    assert [table["note"] for table in clean["tables"]] == [""]


def test_a_users_function_gets_is_causal_and_the_scale_by_name(tmp_path: Path) -> None:
    """By position it would be flash-attn's ``dropout_p``, and 1 there. A scale of another width than q's would else
    round q in BF16, and so O: δ then seemed to follow its rounding with a slope of 0.7."""
    capture(tmp_path / "layer-03.safetensors", Fault("none"))
    own = tmp_path / "own.py"
    own.write_text(
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "def like_flash_attn(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):\n"
        "    return sdpa(q, k, v, dropout_p=dropout_p, scale=softmax_scale, is_causal=causal)\n"
        "def without_scale(q, k, v, is_causal):\n"
        "    return sdpa(q, k, v, is_causal=is_causal)\n"
        "def other(q, k, v, strength=0.0):\n"
        "    return sdpa(q, k, v, is_causal=True) * (1 + strength)\n"
    )
    told = diagnose(str(tmp_path), "--attention", f"{own}:like_flash_attn")
    assert told["heading"].startswith("Nothing found.")
    q, k, v = torch.randn(3, 2, 2, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.25, is_causal=True)
    assert torch.equal(function_named(f"{own}:like_flash_attn")(q, k, v, True, 0.25), wanted)  # q is not rounded
    told = CliRunner().invoke(main, ["diagnose", str(tmp_path), "--attention", f"{own}:without_scale"]).output
    assert told.count("without_scale: has no parameter scale: q is multiplied by 1.41, and rounded by that") == 1
    refused = CliRunner().invoke(main, ["diagnose", str(tmp_path), "--attention", f"{own}:other"])
    assert refused.exit_code == 2
    assert "strength is its fourth parameter; give a function of q, k, v and is_causal" in refused.output


def test_without_grad_q_no_bias_of_delta_is_a_finding(tmp_path: Path) -> None:
    """Every O is 1.003, which BF16 rounds up, and the backward pass takes δ from an O that is not rounded."""
    call = captured(Fault("none"))
    v = torch.where(torch.arange(64) % 5 < 3, 1.0, 1.0078125)[:, None].expand_as(call.v).bfloat16()
    call = dataclasses.replace(call, v=v, grad_out=torch.ones_like(v))
    found = results_of(
        lambda q, k, v, c, s: attention(q, k, v, is_causal=c, scale=s, variant="flash_unrounded_out"), call
    )
    dataclasses.replace(call, **vars(found)).write(tmp_path / "layer-03.safetensors")
    assert diagnose(str(tmp_path))["heading"].startswith("Nothing found.")
    dataclasses.replace(call, out=found.out, grad_q=None, grad_k=None, grad_v=None).write(
        tmp_path / "layer-03.safetensors"
    )
    told = diagnose(str(tmp_path))
    (measures,) = told["tables"]
    largest = max((row["δ bias"] for row in measures["rows"]), key=abs)
    assert abs(largest) > 1e-5
    assert told["heading"].startswith("Nothing found, and δ was not judged.")
    assert measures["note"].startswith("If δ is rowsum(dO∘O), its bias is")
    assert f"{largest:+.1e} of |dO||O|" in measures["note"]
    assert "dQ is needed to tell" in measures["note"]
    dataclasses.replace(call, layer=4, **vars(found)).write(tmp_path / "layer-04.safetensors")
    assert diagnose(str(tmp_path))["heading"].startswith("Nothing found, and δ of layer 3 was not judged.")


def only(call: AttentionCall, sequences: int) -> AttentionCall:
    """The first sequences of a call."""
    return dataclasses.replace(
        call, **{name: of[:sequences] for name, of in vars(call).items() if isinstance(of, torch.Tensor)}
    )


def test_too_few_sequences_to_judge_delta_by_are_told(tmp_path: Path) -> None:
    """A bias is sure from 3 sequences on. Sequences without loss do not count."""
    fault = Fault("delta_bias", head=1, size=2e-3)
    masked = captured(fault)
    for of in (masked.grad_out, masked.grad_q, masked.grad_k, masked.grad_v):
        assert of is not None
        of[2:] = 0
    for call, with_loss in ((only(captured(fault), 1), "1 sequence"), (masked, "2 sequences")):
        call.write(tmp_path / "layer-03.safetensors")
        told = diagnose(str(tmp_path))
        (measures,) = told["tables"]
        assert told["heading"].startswith("Nothing found, and δ was not judged.")
        assert measures["note"].startswith("Too few sequences")
        assert f"{with_loss} with loss" in measures["note"]
        assert "watched.capture(sequences=256)" in measures["note"]
    only(captured(fault), 3).write(tmp_path / "layer-03.safetensors")
    findings, measures = diagnose(str(tmp_path))["tables"]
    assert [row["finding"] for row in findings["rows"]] == ["delta_bias"]
    assert "Too few" not in measures["note"]


@pytest.fixture
def model_and_text(tmp_path: Path) -> tuple[str, str]:
    """A GPT-2 with random weights that reads letters, and a text."""
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(words, [])))
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=95, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the loss of a model falls until one head explodes " * 20)
    return str(tmp_path / "model"), str(text)


@pytest.mark.slow
def test_a_model_of_transformers_is_diagnosed_on_a_text(
    model_and_text: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = model_and_text
    monkeypatch.setattr(diagnose_tables, "MOST_ADVISED", 10**12)  # of so short sequences very many are needed
    told = diagnose(model, "--text", text, "--tokens", "32", "--sequences", "4")
    assert [(row["layer"], row["head"]) for row in told["tables"][-1]["rows"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert told["heading"].endswith("2 layers of 2 heads, 4 sequences of 32 tokens, d 16")
    assert re.search(r"About [\d,]+ sequences would show one of 1e-06: --sequences \d+\.", told["tables"][-1]["note"])


@pytest.mark.slow
@pytest.mark.parametrize("attention", [(), ("--attention", "flash_bf16", "--layer", "2")])
def test_a_model_is_read_in_batches_as_at_once(
    model_and_text: tuple[str, str], monkeypatch: pytest.MonkeyPatch, attention: tuple[str, ...]
) -> None:
    model, text = model_and_text
    at_once: list[int] = []
    monkeypatch.setattr("flashpoint.watching.model_calls.MODEL_BATCH", 12)
    whole = diagnose(model, "--text", text, "--tokens", "32", "--sequences", "12", *attention)
    original = Interceptor.__init__
    monkeypatch.setattr(
        Interceptor, "__init__", lambda self, count, *rest: (at_once.append(count), original(self, count, *rest))[1]
    )
    monkeypatch.setattr("flashpoint.watching.model_calls.MODEL_BATCH", 5)
    parts = diagnose(model, "--text", text, "--tokens", "32", "--sequences", "12", *attention)
    assert at_once == [5, 5, 2]
    assert "5 sequences of 32 tokens, d 16; bias of δ: 12 sequences" in parts["heading"]
    for one, other in zip(whole["tables"][-1]["rows"], parts["tables"][-1]["rows"], strict=True):
        for column in ("δ bias", "standard errors", "δ error, nats", "δ noise"):
            assert other[column] == pytest.approx(one[column], rel=1e-2)


@pytest.mark.slow
def test_a_run_is_read_in_batches_as_at_once(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recorded)
    whole = diagnose("runs/original", "--sequences", "10")
    monkeypatch.setattr("flashpoint.lab.trained_calls.TOKENS_AT_ONCE", 1)  # a sequence at a time
    parts = diagnose("runs/original", "--sequences", "10")
    assert parts["heading"].split("head, ")[-1].endswith("; bias of δ: 10 sequences")
    for one, other in zip(whole["tables"][-1]["rows"], parts["tables"][-1]["rows"], strict=True):
        for column in ("δ bias", "standard errors", "δ error, nats", "δ noise"):
            assert other[column] == pytest.approx(one[column], rel=1e-2)


@pytest.mark.slow
def test_what_was_collected_after_a_capture_counts(tmp_path: Path) -> None:
    folder = tmp_path / "captures/step-0000009"
    folder.mkdir(parents=True)
    fault = Fault("delta_bias", head=1, size=3e-5)
    capture(folder / "layer-03.safetensors", fault)
    alone = diagnose(str(folder))
    assert alone["heading"].startswith("Nothing found.")
    assert "No number of sequences that one can wait for" in alone["tables"][0]["note"]
    refused = CliRunner().invoke(main, ["diagnose", str(folder), "--sequences", "9"])
    assert refused.exit_code == 2
    assert "watched.capture(sequences=9) in the loop measures δ on as many more" in refused.stderr
    for step in range(10, 50):
        delta_collection.append(folder / "delta.jsonl", step, {3: delta_sample(captured(fault, step))})
    for path in (tmp_path, folder, folder / "layer-03.safetensors"):
        told = diagnose(str(path))
        (found,) = told["tables"][0]["rows"]
        assert (found["layer"], found["heads"], found["finding"]) == (3, "2", "delta_bias")
        assert "164 sequences of 41 steps" in found["what shows it"]
        assert told["heading"].endswith("4 sequences of 64 tokens, d 16; bias of δ: 164 sequences of 41 steps")
    anew = diagnose(str(folder), "--attention", "flash_fp32")  # they are not of this attention
    assert "bias of δ:" not in anew["heading"]


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
def test_columns_are_empty_where_inputs_are_not_finite(tmp_path: Path, names: str, value: float) -> None:
    """In the first of two heads, from a row on in all sequences; of V no score is made."""
    call = captured(Fault("none"))
    for name in names:
        getattr(call, name)[:, 0, 5:] = value
    call.write(tmp_path / "layer-03.safetensors")
    head, other = diagnose(str(tmp_path))["tables"][1]["rows"]
    columns = ["dead rows", "ties", "largest score"]
    assert [head[of] is None for of in columns] == [True] + [names != "v"] * 2
    assert [other[of] is None for of in columns] == [False] * 3


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "grad_out", "out", "grad_q"])
def test_a_capture_with_nan_or_infinity_is_diagnosed(tmp_path: Path, name: str, value: float) -> None:
    """One of its four sequences has it, and there is a layer beside it that has none."""
    call = captured(Fault("none"))
    getattr(call, name)[1, 0, 5] = value
    call.write(tmp_path / "layer-03.safetensors")
    dataclasses.replace(captured(Fault("none")), layer=4).write(tmp_path / "layer-04.safetensors")
    told = diagnose(str(tmp_path))
    (found,) = told["tables"][0]["rows"]
    assert (found["layer"], found["heads"], found["finding"]) == (3, "1", "nonfinite")
    cells = [told["tables"][1]["rows"][0][of] for of in ("ties", "largest score")]
    assert (None in cells) == (name == "q")
    assert told["tables"][1]["note"] == ""  # no advice to wait for more sequences after a finding


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "nowhere: no capture and no run"),
        (["{folder}"], "holds no layer-*.safetensors"),
        (
            ["{folder}/broken.safetensors"],
            "; write q, k, v and grad_out with safetensors.torch.save_file; of a checkpoint",
        ),
        (["{folder}/few.safetensors"], "no tensor k, v, grad_out"),
        (["{folder}/odd.safetensors"], "q needs [N, H, T_q, d]"),
        (["{folder}/good", "--layer", "7"], "--layer 7"),
        (["{folder}/good", "--attention", "flash"], "an emulation"),
        (["{folder}/good", "--attention", "nothing"], "no such attention; give FILE.py:FUNCTION, or one of "),
        (["{folder}/good", "--attention", "flex_fixed", "--device", "cpu"], "flex_fixed: trains on a GPU alone"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"no such thing")
    save_file({"q": torch.zeros(1, 2, 3, 4)}, tmp_path / "few.safetensors")
    shapes = {"q": (1, 2, 3, 4), "k": (1, 2, 5, 4), "v": (1, 2, 3, 4), "grad_out": (1, 2, 3, 4)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "odd.safetensors")
    (tmp_path / "good").mkdir()
    capture(tmp_path / "good/layer-03.safetensors", Fault("none"))
    result = CliRunner().invoke(main, ["diagnose", *(word.format(folder=tmp_path) for word in arguments)])
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_of_a_name_that_was_watched_again_the_later_run_is_told(tmp_path: Path) -> None:
    for hour in range(2):
        folder = RunFolder.create(tmp_path, "mine")
        folder.config.write_text("{}")
        os.utime(folder.config, (hour, hour))
    first, second = (CliRunner().invoke(main, ["diagnose", str(tmp_path / name)]).output for name in ("mine", "mine-2"))
    assert str(tmp_path / "mine-2") in first
    assert "later run" not in second


@pytest.mark.parametrize("heads", [24, 25])
def test_of_more_heads_than_a_screen_has_lines_the_surest_of_the_layer_is_shown(tmp_path: Path, heads: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, heads, 16, 8, dtype=torch.float64).bfloat16().requires_grad_() for _ in range(3))
    out = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    ).bfloat16()
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    tensors = dict(zip(("q", "k", "v", "grad_q", "grad_k", "grad_v"), (q, k, v, *grads), strict=True))
    path = str(tmp_path / "mine.safetensors")
    save_file(
        {**{name: x.detach().contiguous() for name, x in tensors.items()}, "out": out.detach(), "grad_out": grad_out},
        path,
    )
    told = diagnose(path)
    assert told["heading"].startswith("Nothing found")
    (table,) = (one for one in told["tables"] if len(one["rows"]) == heads)
    surest = max(table["rows"], key=lambda row: abs(row["standard errors"]))
    shown = [line for line in CliRunner().invoke(main, ["diagnose", path]).stdout.splitlines() if line.startswith("| ")]
    numbers = [int(line.split("|")[2]) for line in shown if line.split("|")[2].strip().isdigit()]
    assert numbers == ([surest["head"]] if heads > 24 else list(range(1, heads + 1)))
