"""``flashpoint deviation`` as a user calls it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashpoint.deviation.inputs import drawn
from tests.records import call, refusal, rows, values

SMALL = ("--length", "16", "--head-size", "16", "--seeds", "3", "--device", "cpu")
OWN = """
import torch
def attention(q, k, v, is_causal):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
def without_gradient(q, k, v, is_causal):
    return attention(q, k, v, is_causal).detach()
def fails(q, k, v):
    return q
def too_long(q, k, v, is_causal):
    return torch.cat([q, q])
def tells(q, k, v, is_causal):
    return "O"
constant = 3
"""


def differences(*arguments: Path | str) -> list[str]:
    return [row["difference"] for row in values("deviation", *SMALL, *arguments)]


def test_each_pair_and_quantity_has_a_row_and_a_line_says_where_it_was_measured() -> None:
    result = call("deviation", *SMALL, "--block", "4x4")
    assert rows(result)[0].startswith("| flash − baseline | O | bf16 | 16 | 4 × 4 | absolute | 3 | ")
    assert len(rows(result)) == 3 * 6 + 6
    told = f"torch {torch.__version__}; normal inputs, head size 16, seeds 0 to 2; causal; sums in fp32; 20"
    assert told in result.stdout.splitlines()[0]


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
    assert {row["RMS, ratio"] for row in found[1]["rows"]} == {None}


def test_blocks_follow_from_sram_as_in_flashattention() -> None:
    """M/4d of 4,096 bytes: 16 numbers in FP32 and 32 in BF16 at d = 16; B_r is at most d."""
    arguments = ("--sram", "4096", "--precision", "fp32,bf16", "--of", "O")
    found = values("deviation", *SMALL, *arguments)
    assert [row["B_r × B_c"] for row in found] == ["16 × 16", "16 × 16", None, "16 × 32", "16 × 32", None]
    assert values("deviation", *SMALL, "--sram", "300", "--of", "O")[0]["B_r × B_c"] == "3 × 3"


def test_a_ratio_sets_the_distances_from_golden_against_each_other() -> None:
    result = call("deviation", *SMALL, "--of", "O", "--format", "json")
    table, ratios = json.loads(result.stdout)["tables"]
    (ratio,) = ratios["rows"]
    assert ratio["distance from golden, over that of baseline"] == "flash"
    flash, baseline = (row["RMS"] for row in table["rows"][1:])
    assert ratio["RMS, ratio"]["mean"] == pytest.approx(flash / baseline, rel=0.1)
    assert ratio["RMS, ratio"]["low"] < ratio["RMS, ratio"]["mean"] < ratio["RMS, ratio"]["high"]
    one = call("deviation", *SMALL, "--seeds", "1", "--of", "O", "--format", "json")
    table, ratios = json.loads(one.stdout)["tables"]
    assert table["rows"][0]["95 % interval"] is None
    assert isinstance(ratios["rows"][0]["RMS, ratio"], float)


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


def test_a_function_of_the_users_own_is_an_engine(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = f"{tmp_path / 'own.py'}:"
    for mask in ("--causal", "--no-causal"):
        attention, math = (
            [{**row, "difference": ""} for row in values("deviation", engine, *SMALL, mask, "--precision", "fp32")]
            for engine in (f"{own}attention", "sdpa")
        )
        assert attention == math
        assert [row["of"] for row in attention] == ["O", "dQ", "dK", "dV"]
    assert [row["of"] for row in values("deviation", f"{own}without_gradient", *SMALL)] == ["O"]
    for name, told in (
        (
            "fails",
            "TypeError: fails() takes 3 positional arguments but 4 were given; it is called with q, k, v, is_causal",
        ),
        ("too_long", "returns [6, 1, 16, 16] for q of [3, 1, 16, 16]; return O of q's shape"),
        ("tells", "returns a str; return O [B, H, T, d] as a tensor"),
        ("constant", "no function; give one that takes q, k, v and is_causal"),
        ("nowhere", "AttributeError: "),
    ):
        assert f"own.py:{name}: {told}" in refusal(call("deviation", f"{own}{name}", *SMALL))


def test_inputs_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "captured.safetensors"
    inputs = drawn("normal", 3, 16, 16)
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "grad_out": inputs.grad_out}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    result = call("deviation", "--inputs", path, "--device", "cpu")
    assert f"{path}: B 3, H 1, head size 16" in result.stdout.splitlines()[0]
    assert rows(result) == rows(call("deviation", *SMALL))
    assert "a file takes no --seeds and no --length" in refusal(
        call("deviation", "--inputs", path, "--seeds", "2", "--length", "4")
    )


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
        (["flsh"], "flsh: no such engine; give flash, baseline, sdpa:math, "),
        (["sdpa:mth"], "sdpa:mth: no such engine; give flash, baseline, sdpa:math, "),
        (["nowhere.py:attention"], "nowhere.py:attention: nowhere.py is no file"),
        (["--precision", "fp12"], "fp12: no such format; give one of fp64, "),
        (["--accumulate", "fp12"], "--accumulate fp12: no such format; give one of fp64, "),
        (["--length", "256,-1"], "-1: give numbers of tokens, e.g. 128,256"),
        (["--block", "64"], "64: give B_r x B_c, queries and keys of a tile, e.g. 64x64,128x32"),
        (["--block", "0x64"], "0x64: give B_r x B_c"),
        (["--sram", "1"], "--sram 1: holds no number of bf16, which takes 2 bytes"),
        (["--sram", "64", "--block", "4x4"], "--sram: takes no --block"),
        (["--of", "O,S"], "S: give some of O, L, δ (or delta), dQ, dK, dV"),
        (["--unit", "percent"], "percent: give some of absolute, relative, ulps"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
        (["--inputs", "nowhere"], "--inputs nowhere: no such file; give one, or normal, sink, tied"),
        (["sdpa:math", "--of", "L"], "--of L: sdpa:math tell none of these"),
        (["sdpa:math", "--block", "4x4"], "--block and --sram: only of the engine flash"),
        (["sdpa:math", "--accumulate", "fp32"], "--accumulate: only of the engines flash and baseline"),
        (["sdpa:cudnn"], "sdpa:cudnn: "),
        (["flash_bf16", "--precision", "fp16"], "flash_bf16: computes in bf16, fp32, not fp16; change --precision"),
    ],
)  # fmt: skip
def test_bad_input_costs_one_line_that_tells_what_to_do(arguments: list[str], told: str) -> None:
    small = () if "--length" in arguments or "--seeds" in arguments else SMALL
    assert told in refusal(call("deviation", *small, *arguments))


def test_what_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("flashpoint.deviation.engines.baseline", allocate)
    told = refusal(call("deviation", *SMALL))
    assert told == "error: baseline at 16 tokens: not enough memory; give fewer tokens"

    def too_large(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("flashpoint.deviation.inputs._of_seed", too_large)
    assert refusal(call("deviation", *SMALL)) == "error: --length 16: not enough memory; give fewer tokens"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert "--device cuda: no CUDA device is visible; use --device cpu or auto" in refusal(
        call("deviation", "--device", "cuda")
    )
