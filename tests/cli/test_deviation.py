"""``flashpoint deviation`` as a user calls it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.form import Form
from flashpoint.lab.cli.deviation_inputs import captured_inputs
from flashpoint.lab.deviation.arithmetic import arithmetic
from flashpoint.lab.deviation.drawn_inputs import DRAWN, drawn
from flashpoint.lab.deviation.emulated import golden
from flashpoint.lab.deviation.formats import FP16, TF32
from tests.records import call, refusal, rows, values

SMALL = ("--length", "16", "--head-size", "16", "--seeds", "3", "--device", "cpu")


def differences(*arguments: Path | str) -> list[str]:
    return [row["difference"] for row in values("deviation", *SMALL, *arguments)]


def test_each_pair_and_quantity_has_a_row_and_a_line_says_where_it_was_measured() -> None:
    result = call("deviation", *SMALL, "--block", "4x4", "--columns", "all")
    assert rows(result)[0].startswith(
        "| flash − baseline | O | normal | bf16 | fp32 | 16 | 16 | 4 × 4 | absolute | 3 | "
    )
    assert len(rows(result)) == 3 * 6 + 6
    told = f"torch {torch.__version__}; normal inputs, seeds 0 to 2; causal; emulated: flash, baseline; 20"
    assert told in result.stdout.splitlines()[0]


def test_what_differs_between_rows_has_a_column_and_what_does_not_is_told_once() -> None:
    def headings(*arguments: str) -> list[list[str]]:
        printed = call("deviation", *SMALL, "--of", "O", *arguments).stdout.splitlines()
        tables = [at for at, line in enumerate(printed) if line.startswith("|:--")]
        return [[cell.strip() for cell in printed[at - 1].split("|")[1:-1]] for at in tables]

    ratios = ["distance from golden over that of baseline", "of", "largest ratio", "RMS ratio"]
    assert headings() == [["difference", "of", "largest", "mean", "std", "RMS"], ratios]
    assert headings("--precision", "bf16,fp16") == [
        ["difference", "of", "precision", "largest", "mean", "std", "RMS"], [*ratios[:2], "precision", *ratios[2:]],
    ]  # fmt: skip
    assert headings("--block", "1x4,4x4,4x16")[1] == [*ratios[:2], "B_r × B_c", *ratios[2:], "rescalings a row"]
    assert headings("--unit", "relative,ulps")[0][2] == "unit"
    told = "In all rows: inputs normal, precision bf16, sums fp32, T 16, d 16, B_r × B_c 16 × 16, unit absolute, n 3, "
    assert f"{told}rescalings a row 0.00, not finite 0." in call("deviation", *SMALL).stdout


def test_the_columns_fit_each_other() -> None:
    found = values("deviation", *SMALL, "--block", "4x4")
    assert [row["of"] for row in found[:6]] == ["O", "L", "δ", "dQ", "dK", "dV"]
    assert [row["difference"] for row in found[::6]] == ["flash − baseline", "flash − golden", "baseline − golden"]
    for row in found:
        assert 0 <= row["50 %"] <= row["99 %"] <= row["99.9 %"] <= row["largest"]
        assert row["mean"] ** 2 + row["std"] ** 2 == pytest.approx(row["RMS"] ** 2)
        assert row["95 % interval"]["low"] < row["signed mean"] < row["95 % interval"]["high"]


def test_a_sweep_has_every_combination_and_what_has_no_tiles_stands_once() -> None:
    sweep = (
        "--precision",
        "bf16,fp16",
        "--length",
        "8,16",
        "--block",
        "4x4,8x2",
        "--of",
        "O",
        "--unit",
        "ulps,relative",
    )
    found = values("deviation", *SMALL, *sweep)
    told = {(row["precision"], row["T"], row["B_r × B_c"], row["difference"], row["unit"]) for row in found}
    assert len(told) == len(found) == 2 * 2 * (2 * 2 + 1) * 2
    assert {row[2] for row in told if row[3] == "baseline − golden"} == {None}
    assert {row[2] for row in told if row[3] == "flash − golden"} == {"4 × 4", "8 × 2"}


def test_smaller_blocks_of_keys_rescale_more_and_one_block_never() -> None:
    found = values("deviation", *SMALL, "--block", "4x1,4x4,16x16", "--of", "O")
    rescalings = [row["rescalings a row"] for row in found if row["difference"] == "flash − golden"]
    assert rescalings[0] > rescalings[1] > rescalings[2] == 0


def test_fp64_deviates_by_its_own_rounding_only_and_has_no_ratio() -> None:
    found = json.loads(call("deviation", *SMALL, "--precision", "fp64", "--format", "json").stdout)["tables"]
    assert max(row["largest"] for row in found[0]["rows"]) < 1e-13
    assert [row["largest"] for row in found[0]["rows"][12:]] == [0.0] * 6
    assert {row["RMS ratio"] for row in found[1]["rows"]} == {None}
    turned = json.loads(
        call("deviation", "baseline", "flash", *SMALL, "--precision", "fp64", "--format", "json").stdout
    )
    assert {row["RMS ratio"] for row in turned["tables"][1]["rows"]} == {None}


def test_a_ratio_sets_the_distances_from_golden_against_each_other() -> None:
    result = call("deviation", *SMALL, "--of", "O", "--format", "json")
    table, ratios = json.loads(result.stdout)["tables"]
    (ratio,) = ratios["rows"]
    assert ratio["distance from golden over that of baseline"] == "flash"
    flash, baseline = (row["RMS"] for row in table["rows"][1:])
    assert ratio["RMS ratio"]["mean"] == pytest.approx(flash / baseline, rel=0.1)
    assert ratio["RMS ratio"]["low"] < ratio["RMS ratio"]["mean"] < ratio["RMS ratio"]["high"]
    one = call("deviation", *SMALL, "--seeds", "1", "--of", "O", "--format", "json")
    table, ratios = json.loads(one.stdout)["tables"]
    assert table["rows"][0]["95 % interval"] is None
    flash, baseline = (row["RMS"] for row in table["rows"][1:])
    assert ratios["rows"][0]["RMS ratio"] == {"mean": pytest.approx(flash / baseline), "low": None, "high": None}


def test_a_ratio_and_its_interval_turn_over_with_the_engines() -> None:
    """So does a geometric mean, and the mean of the ratios themselves does not."""
    (one,), (turned,) = (
        json.loads(call("deviation", *engines, *SMALL, "--of", "O", "--format", "json").stdout)["tables"][1]["rows"]
        for engines in (("flash", "baseline"), ("baseline", "flash"))
    )
    for which in ("largest ratio", "RMS ratio"):
        assert one[which]["mean"] == pytest.approx(1 / turned[which]["mean"])
        assert one[which]["low"] == pytest.approx(1 / turned[which]["high"])
        assert one[which]["high"] == pytest.approx(1 / turned[which]["low"])


def test_the_last_engine_may_be_the_one_with_tiles() -> None:
    result = call("deviation", "sdpa:math", "flash", *SMALL, "--of", "O", "--block", "4x4,8x8", "--format", "json")
    table, ratios = json.loads(result.stdout)["tables"]
    told = [(row["difference"], row["B_r × B_c"]) for row in table["rows"]]
    assert told == [
        ("sdpa:math − flash", "4 × 4"), ("sdpa:math − golden", None), ("flash − golden", "4 × 4"),
        ("sdpa:math − flash", "8 × 8"), ("flash − golden", "8 × 8"),
    ]  # fmt: skip
    assert [row["B_r × B_c"] for row in ratios["rows"]] == ["4 × 4", "8 × 8"]
    assert ratios["rows"][0]["rescalings a row"] > ratios["rows"][1]["rescalings a row"]


def test_engines_of_the_package_and_of_pytorch_are_compared_with_the_last_named() -> None:
    engines = ("flash_bf16", "released", "sdpa", "sdpa:math", "baseline")
    found = values("deviation", *engines, *SMALL, "--of", "O,L,δ,dQ")
    told: dict[str, list[str]] = {}
    for row in found:
        told.setdefault(row["difference"], []).append(row["of"])
    assert list(told) == [f"{one} − {other}" for other in ("baseline", "golden") for one in engines][:4] + [
        f"{one} − golden" for one in engines
    ]
    assert told["flash_bf16 − baseline"] == ["O", "L", "dQ"]
    assert told["sdpa:math − golden"] == ["O", "dQ"]
    assert all(row["RMS"] < 0.05 and row["not finite"] == 0 for row in found)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["flash_bf16", "flash_fp32", "standard", "released", "released_fixed", "sdpa:math"])
@pytest.mark.parametrize("mask", ["--causal", "--no-causal"])
def test_every_engine_is_within_twice_the_deviation_that_the_emulation_foretells(engine: str, mask: str) -> None:
    """Those of a GPU: tests/gpu."""
    arguments = ("--length", "128", "--seeds", "2", "--of", "O,dQ,dK,dV", mask, "--device", "cpu")
    found = {(row["difference"], row["of"]): row["RMS"] for row in values("deviation", engine, "baseline", *arguments)}
    for quantity in ("O", "dQ", "dK", "dV"):
        assert found[f"{engine} − golden", quantity] < 2 * found["baseline − golden", quantity]


def test_production_numerics_deviate_less_than_the_failing_baseline() -> None:
    """FlashAttention-2 rounds neither S nor Ō. In FP32 the same engine deviates by FP32's rounding of O alone."""
    found = {
        row["difference"]: row["RMS"] for row in values("deviation", "flash_bf16", "flash_fp32", *SMALL, "--of", "O")
    }
    assert found["flash_bf16 − golden"] > found["flash_fp32 − golden"]
    assert values("deviation", "sdpa:math", *SMALL, "--of", "O", "--precision", "fp32")[0]["RMS"] < 1e-6


def test_every_backend_that_is_there_can_be_asked_for() -> None:
    found = differences("sdpa:all", "--of", "O")
    assert "sdpa:math − golden" in found
    assert all(row.startswith("sdpa:") for row in found)
    assert not any(row.startswith("sdpa:cudnn") for row in found)


def test_inputs_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "captured.safetensors"
    inputs = drawn("normal", 3, 16, 16)
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "grad_out": inputs.grad_out}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    result = call("deviation", "--inputs", path, "--device", "cpu")
    assert f"{path}: 3 sequences of 16 tokens, 1 heads; causal" in result.stdout.splitlines()[0]
    expected = [row.replace("normal", "L1 step 0") for row in rows(call("deviation", *SMALL))]
    assert rows(result) == expected
    assert len(values("deviation", "--inputs", path, "--sequences", "2", "--device", "cpu")) == len(expected) - 6
    assert values("deviation", "--inputs", path, "--sequences", "2", "--device", "cpu")[0]["n"] == 2
    assert f"--inputs {path}: takes no --length and no --seeds" in refusal(
        call("deviation", "--inputs", path, "--seeds", "2", "--length", "4")
    )


@pytest.mark.slow
def test_the_inputs_of_a_run_are_those_of_its_steps_and_layers(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dO is that of the loss, and so far smaller than 1."""
    monkeypatch.chdir(recorded)
    arguments = ("--inputs", "original", "--device", "cpu", "--of", "O,dQ", "--sequences", "3")
    result = call("deviation", *arguments, "--step", "0", "--format", "json")
    assert "original: 3 sequences of 16 tokens, 2 heads; causal" in result.stdout
    found = json.loads(result.stdout)["tables"][0]["rows"]
    assert [row["inputs"] for row in found[::6]] == ["L1 step 0", "L2 step 0"]
    assert all(0 < row["largest"] < 1e-2 for row in found if row["of"] == "dQ")
    one = values("deviation", *arguments, "--layer", "2", "--step", "0")
    assert one == [row for row in found if row["inputs"].startswith("L2")]
    later = values("deviation", *arguments, "--step", "7")  # the run has no checkpoint: its initial weights
    assert {row["inputs"] for row in later} == {"L1 step 0", "L2 step 0"}
    assert "--layer 9: runs/original has layers 1, 2; give some of these" in last_line(
        "deviation", *arguments, "--step", "0", "--layer", "9"
    )


def last_line(*arguments: str) -> str:
    """Of what the verb refused: notices of a replay may come before."""
    result = call(*arguments)
    assert result.returncode == 2
    return result.stderr.splitlines()[-1]


def test_the_inputs_may_be_what_watch_captured(tmp_path: Path) -> None:
    """Two heads share one of keys and values, α is not 1/√d, and there is no mask."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad_out = (torch.randn(3, heads, 8, 4, generator=generator) for heads in (4, 2, 2, 4))
    for step in (5, 9):
        folder = tmp_path / f"captures/step-{step:09}"
        folder.mkdir(parents=True)
        AttentionCall(q, k, v, grad_out, Form(False, 0.3), 2, step, "mine").write(folder / "layer-02.safetensors")
    arguments = ("sdpa:math", "--inputs", tmp_path, "--precision", "fp64", "--of", "O,dQ", "--device", "cpu")
    (given,) = captured_inputs(tmp_path, [9], [], None, None, torch.device("cpu"))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), scale=0.3, enable_gqa=True
    )
    found = golden(given.inputs, 1, causal=given.causal, backward=False).values["O"]
    assert (found - expected).abs().max() < 1e-13
    told = values("deviation", *arguments, "--step", "5,9")
    assert [row["inputs"] for row in told] == ["L2 step 5"] * 2 + ["L2 step 9"] * 2
    assert max(row["largest"] for row in told) < 1e-13
    assert values("deviation", *arguments)[0]["inputs"] == "L2 step 9"
    assert values("deviation", *arguments, "--causal")[0]["RMS"] < 1e-13
    assert "captured steps 5, 9" in refusal(call("deviation", *arguments, "--step", "7"))


def test_captured_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    x = torch.ones(1, 1, 4, 4)
    save_file({"q": x, "k": x.clone(), "v": x * torch.nan, "grad_out": x.clone()}, tmp_path / "nan.safetensors")
    assert "nan.safetensors: v of L1 step 0 holds values that are not finite" in refusal(
        call("deviation", "--inputs", tmp_path / "nan.safetensors")
    )


def test_a_step_or_layer_that_a_capture_lacks_is_refused(tmp_path: Path) -> None:
    x = torch.ones(1, 1, 4, 4)
    path = tmp_path / "layer-01.safetensors"
    save_file({name: x.clone() for name in ("q", "k", "v", "grad_out")}, path)
    for what in (path, tmp_path):
        assert f"--step 3: {what} is one capture" in refusal(call("deviation", "--inputs", what, "--step", "3"))
        told = refusal(call("deviation", "--inputs", what, "--layer", "1", "--layer", "2"))
        assert f"--layer 2: {what} has layers 1" in told


def test_a_sweep_over_sums_and_head_sizes_leaves_what_has_no_sums_once() -> None:
    sweep = ("--accumulate", "fp32,within", "--head-size", "8,16", "--of", "O")
    found = values("deviation", "sdpa:math", "flash", *SMALL, *sweep)
    told = [(row["difference"], row["sums"], row["d"]) for row in found]
    assert told == [
        row
        for d in (8, 16)
        for row in [
            ("sdpa:math − flash", "fp32", d), ("sdpa:math − golden", None, d), ("flash − golden", "fp32", d),
            ("sdpa:math − flash", "within", d), ("flash − golden", "within", d),
        ]
    ]  # fmt: skip


def test_sums_are_named_by_the_format_that_they_have() -> None:
    """Asked for a coarser one than the precision, both have the precision."""
    found = values("deviation", *SMALL, "--precision", "bf16,fp64", "--accumulate", "e4m3,fp32,within", "--of", "O")
    told = {(row["precision"], row["sums"]) for row in found}
    assert told == {("bf16", "bf16"), ("bf16", "fp32"), ("bf16", "within"), ("fp64", "fp64"), ("fp64", "within")}
    coarse, same = (
        [row["RMS"] for row in values("deviation", *SMALL, "--accumulate", sums)] for sums in ("e4m3", "same")
    )
    assert coarse == same


def test_of_two_formats_with_as_many_mantissa_bits_sums_have_the_wider_one() -> None:
    assert arithmetic(FP16, "tf32").sums == TF32
    assert arithmetic(TF32, "fp16").sums == TF32


def test_sums_in_the_precision_deviate_more() -> None:
    def rms(accumulate: str) -> float:
        found: list[dict[str, Any]] = values("deviation", "baseline", *SMALL, "--accumulate", accumulate, "--of", "O")
        return float(found[0]["RMS"])

    assert rms("same") > rms("fp32")


def test_what_is_not_finite_is_counted_and_shown(tmp_path: Path) -> None:
    """Queries and keys of 300 make a product of 16·90,000, beyond FP16, and so ∞ − ∞. BF16 has room for it."""
    x = torch.full((2, 1, 4, 16), 300.0)
    save_file({"q": x, "k": x.clone(), "v": x.clone(), "grad_out": x.clone()}, tmp_path / "large.safetensors")
    found = values("deviation", "baseline", "--inputs", tmp_path / "large.safetensors", "--precision", "fp16,bf16")
    assert [row["not finite"] for row in found if row["of"] == "O"] == [2 * 4 * 16, 0]
    assert [row["RMS"] for row in found if row["of"] == "O"] == ["nan", 0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["flsh"], "flsh: no such engine; did you mean flash?"),
        (["nothing"], "nothing: no such engine; give FILE.py:FUNCTION, or one of flash, baseline, sdpa:math, "),
        (["nowhere.py:attention"], "nowhere.py:attention: nowhere.py is no file"),
        (["--precision", "fp12"], "fp12: no such format; give one of fp64, "),
        (["--accumulate", "fp12"], "--accumulate fp12: no such format; give one of fp64, "),
        (["--precision", "bf16,"], "'--precision': 'bf16,': a word is empty"),
        (["--of", ""], "'--of': '': a word is empty"),
        (["--length", "256,-1"], "-1: give numbers of tokens, e.g. 128,256"),
        (["--block", "64"], "64: give B_r x B_c, queries and keys of a tile, e.g. 64x64,128x32"),
        (["--block", "0x64"], "0x64: give B_r x B_c"),
        (["--of", "O,S"], "S: give some of O, L, δ (or delta), dQ, dK, dV"),
        (["--unit", "percent"], "percent: give some of absolute, relative, ulps"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
        (["--inputs", "nowhere"], "--inputs nowhere: no run, no capture and no such file; give one, or normal, sink, "),
        (["--step", "3"], "--inputs normal: takes no --step"),
        (["--block", "8x8,8x17"], "--block 8x17: wider than 16 tokens; give at most 16x16"),
        (["--head-size", "8,x"], "x: give numbers of features, e.g. 64,128"),
        (["sdpa:math", "--of", "L"], "--of L: sdpa:math tell none of these"),
        (["sdpa:math", "--block", "4x4"], "--block: only of the engine flash"),
        (["sdpa:math", "--accumulate", "fp32"], "--accumulate: only of the engines flash and baseline"),
        (["sdpa:cudnn"], "sdpa:cudnn: trains on a GPU alone"),
        (["flex"], "flex: trains on a GPU alone"),
        (["fa4_fixed"], "fa4_fixed: needs flash-attn-4; pip install flash-attn-4"),
        (["flex_fixed", "--precision", "fp16"], "flex_fixed: computes in bf16, not fp16; change --precision"),
        (["flash_bf16", "--precision", "fp16"], "flash_bf16: computes in bf16, fp32, not fp16; change --precision"),
    ],
)  # fmt: skip
def test_bad_input_costs_one_line_that_tells_what_to_do(arguments: list[str], told: str) -> None:
    small = () if "--length" in arguments or "--seeds" in arguments else SMALL
    assert told in refusal(call("deviation", *small, *arguments))


def test_what_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    for place, name in (("engines.baseline", "baseline"), ("pairs.golden", "golden")):
        monkeypatch.setattr(f"flashpoint.lab.deviation.{place}", allocate)
        told = refusal(call("deviation", *SMALL))
        assert told == f"error: {name} at 16 tokens: not enough memory; give fewer tokens"

    def too_large(*_: Any) -> None:
        raise MemoryError

    for kind in DRAWN:
        monkeypatch.setitem(DRAWN, kind, too_large)
    told = "error: --seeds 3, --length 16 and --head-size 16: not enough memory for so many numbers; "
    assert refusal(call("deviation", *SMALL)).startswith(told)


def test_more_inputs_than_any_memory_holds_are_refused_before_one_is_drawn() -> None:
    """They would take 2⁵⁶ bytes."""
    assert "not enough memory" in refusal(call("deviation", *SMALL, "--length", str(2**16), "--seeds", str(2**31 - 1)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert "--device cuda: no CUDA device is visible; use --device cpu or auto" in refusal(
        call("deviation", "--device", "cuda")
    )
