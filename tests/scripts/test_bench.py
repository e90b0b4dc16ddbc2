"""``scripts/benchmarks/bench.py``: what it counts, what it compares, and that it runs; a CPU's times say nothing."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from flashpoint.cli.table import Table
from flashpoint.errors import UserError
from flashpoint.lab.config import ModelConfig
from flashpoint.lab.model import GPT
from flashpoint.numerics.variant import AttentionVariant
from tests import warm
from tests.conftest import REPOSITORY, environment

sys.path.insert(0, str(REPOSITORY / "scripts"))

from benchmarks import bench as script
from benchmarks import kernels, other_work
from benchmarks.kernel_groups import group_of
from benchmarks.nanogpt import NanoGPT
from benchmarks.rounds import ROUNDS, interleaved
from benchmarks.shapes import training_shape
from benchmarks.shown import Report

DRIFT = np.linspace(1, 3, ROUNDS)
"""Of a clock that slows down while the rounds go on."""


def bench(*arguments: str | Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(REPOSITORY / "scripts/benchmarks/bench.py"), *map(str, arguments)]
    return warm.run(command, env={**environment(), **variables}, timeout=300)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_candidates_take_turns_so_that_a_drift_cancels() -> None:
    order: list[str] = []

    def candidate(name: str, seconds: float) -> Callable[[int], float]:
        def timed(runs: int) -> float:
            order.append(name)
            return seconds * runs * (1 + len(order) // 2)

        return timed

    times = interleaved({"a": candidate("a", 1e-3), "b": candidate("b", 3e-3)}, seconds=0)
    assert [sorted(order[i : i + 2]) for i in range(0, len(order), 2)] == [["a", "b"]] * (1 + ROUNDS)
    assert times["a"][-1] > 5 * times["a"][0]
    ratios = times["b"] / times["a"]
    assert 2.5 <= np.median(ratios) <= 3.5


def test_what_a_candidate_leaves_to_the_next_one_falls_on_all_alike() -> None:
    before = [""]

    def candidate(name: str) -> Callable[[int], float]:
        def timed(runs: int) -> float:
            cool, before[0] = before[0] == "idle", name
            return runs * (0.9 if cool else 1.0)

        return timed

    times = interleaved({name: candidate(name) for name in ("idle", "a", "b")}, seconds=0)
    assert all({0.9, 1.0} == set(times[name]) for name in ("a", "b"))
    assert np.median(times["a"] / times["b"]) == 1


def test_a_round_has_as_many_runs_as_fill_its_time() -> None:
    runs: list[int] = []

    def timed(count: int) -> float:
        runs.append(count)
        return 0.25 * count

    times = interleaved({"a": timed}, seconds=ROUNDS)
    assert runs == [1] + [4] * ROUNDS  # a second each
    assert times["a"] == pytest.approx([0.25] * ROUNDS)


def test_flops_ratios_and_additional_time(tmp_path: Path) -> None:
    """2 heads of 4 features and 8 tokens: QKᵀ and PV are 2 · 2 · 8 · 8 · 4 FLOPs each, half of them causal, and the
    backward pass has five such products."""
    product = 2 * 2 * 8 * 8 * 4 / 2

    def measured(forward: float, backward: float) -> kernels.Measured:
        return kernels.Measured({"forward": forward * DRIFT, "backward": backward * DRIFT}, 12.0)

    found = {
        "sdpa_flash": measured(2e-9, 4e-9),
        "sdpa_cudnn": measured(1e-9, 5e-9),
        "naive_bf16": measured(0.5e-9, 0.5e-9),  # fastest, but not what ratios are to
        "flash_bf16": measured(3e-9, 5e-9),
        "flash_fp32": measured(2e-9, 3e-9),
    }
    report = Report("kernels", "heading", tmp_path)
    report.add(kernels.kernels_table((1, 2, 8, 4), found, []))
    report.add(kernels.kernels_table((1, 2, 8, 4), {"sdpa_flash": found["sdpa_flash"]}, ["flash_fp32 failed."]))
    *rows, alone = rows_of(tmp_path / "kernels.csv")
    row = rows[3]
    assert (row["shape"], row["attention"], row["MiB"]) == ("1×2×8×4", "flash_bf16", "12.0")
    middle = np.median(1 / DRIFT)
    assert float(row["forward, TFLOP/s median"]) == pytest.approx(2 * product / 3e-9 / 1e12 * middle, rel=1e-5)
    assert float(row["backward, TFLOP/s median"]) == pytest.approx(5 * product / 5e-9 / 1e12 * middle, rel=1e-5)
    for quartile in ("low", "median", "high"):
        assert float(row[f"forward, ratio {quartile}"]) == pytest.approx(1 / 3, rel=1e-5)
        assert float(row[f"backward, ratio {quartile}"]) == pytest.approx(4 / 5, rel=1e-5)
        assert float(row[f"forward, beyond {quartile}"]) == pytest.approx(3 / 2 - 1, rel=1e-5)
        assert float(row[f"both, beyond {quartile}"]) == pytest.approx(8 / 5 - 1, rel=1e-5)
    assert alone["forward, ratio median"] == "1.0"
    assert "flash_fp32 failed." in (tmp_path / "kernels.txt").read_text()
    assert "+50.0% (+50.0% to +50.0%)" in (tmp_path / "kernels.txt").read_text()


def test_a_table_begins_with_the_load_and_says_where_other_work_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ncase "$1" in *pid) echo 11; echo 12;; *) echo 37;; esac\n')
    smi.chmod(0o755)
    for path, gpu, load, told in (
        (tmp_path, "1", 0.4, "Other work ran: processes on the GPU, a GPU that was busy more than 10 %"),
        (tmp_path, "", 0.4, None),
        (tmp_path / "nothing", "1", 0.4, None),
        (tmp_path / "nothing", "1", 2.0, "Other work ran: a load above 0.25 a core"),
    ):
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        other_work.at_start.cache_clear()
        report = Report("table", "heading", tmp_path)
        monkeypatch.setattr(os, "getloadavg", lambda: (3.2, 0.0, 0.0))
        report.add(Table(["a"], [[1]]))
        first = (tmp_path / "table.txt").read_text().splitlines()[0]
        assert first.startswith(f"heading; load a core of the host {load / 4:.2f} at the start and 0.80 at the end")
        assert ("other processes on the GPU at the start: 2; the GPU was busy 37 %" in first) is ("GPU" in (told or ""))
        assert first.endswith(told) if told else "Other work" not in first
    other_work.at_start.cache_clear()


def test_a_command_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], check: bool) -> "subprocess.CompletedProcess[str]":
        calls.append(command[2:])
        return subprocess.CompletedProcess(command, 2 * (command[2] == "training"))

    monkeypatch.setattr(subprocess, "run", run)
    words = ["bench.py", "all", "--device", "cpu", "--out", str(tmp_path), "--shape", "laptop:2", "1x2x64x16"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        script.main()
    assert [call[0] for call in calls] == ["kernels", "training", "users", "compile"]
    shapes = [call[call.index("--shape") + 1] for call in calls if "--shape" in call]
    assert shapes == ["1x2x64x16", "laptop:2", "laptop:2"]
    assert all(call[call.index("--out") + 1] == str(tmp_path) for call in calls)


def test_the_plain_loop_has_the_same_model() -> None:
    shape = ModelConfig(n_layer=2, n_head=2, d_model=32, context=16, vocab_size=300)
    ours, plain = GPT(shape, AttentionVariant(name="sdpa", kernel="sdpa"), 0), NanoGPT(shape)
    names = {"token_embedding": "wte", "position_embedding": "wpe", "blocks": "h", "attention_norm": "ln_1",
             "mlp_norm": "ln_2", "attention": "attn", "qkv": "c_attn", "projection": "c_proj", "final_norm": "ln_f",
             "expand": "0"}  # fmt: skip
    state = {
        ".".join(names.get(part, part) for part in name.split(".")).replace("mlp.c_proj", "mlp.2"): value
        for name, value in ours.state_dict().items()
    }
    plain.load_state_dict({**state, "lm_head.weight": state["wte.weight"]})
    tokens = torch.randint(300, (3, 17), generator=torch.Generator().manual_seed(0))
    losses = [
        ours(tokens[:, :-1], tokens[:, 1:], torch.zeros(2, dtype=torch.int64)),
        plain(tokens[:, :-1], tokens[:, 1:]),
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for model, loss in zip((ours, plain), losses, strict=True):
        loss.backward()
        assert sum(parameter.grad is not None for parameter in model.parameters()) == 2 + 2 * 6 + 1


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("flash_bwd_dkdv_kernel", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_1", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "matrix products"),
        ("aten::mm", "matrix products"),
        ("flashpoint::rounded_matmul", "matrix products"),
        ("triton_red_fused__log_softmax__to_copy_nll_loss_forward_view_3", "cross-entropy"),
        ("triton_per_fused__to_copy_add_native_layer_norm_native_layer_norm_backward_2", "layer norm"),
        ("triton_poi_fused__to_copy_gelu_view_5", "GELU"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            "optimiser",
        ),
        ("embedding_grad_kernel", "embedding"),
        ("triton_poi_fused__to_copy_7", "copies"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("aten::add", "other"),
        ("triton_poi_fused_add_0", "other"),
    ],
)
def test_kernels_go_to_groups_by_their_names(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


def test_shapes_of_trainings() -> None:
    assert training_shape("gpt2_124m:128/32").overrides == (
        "experiment=gpt2_124m", "train.batch_size=128", "train.micro_batch_size=32"
    )  # fmt: skip
    assert training_shape("ignite").overrides == ("experiment=ignite",)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_training_on_a_cpu(tmp_path: Path) -> None:
    """One loop cannot be compiled; the others are measured without it."""
    no_compiler = {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    attentions = ("flash_bf16", "sdpa,train.micro_batch_size=2", "sdpa,train.compile=true")
    arguments = ("training", "--device", "cpu", "--shape", "laptop:4", "--seconds", "0.01", "--profile")
    result = bench(*arguments, "--attention", *attentions, "--out", tmp_path, **no_compiler)
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path / "training.csv")
    assert [row["loop"] for row in rows] == [*attentions[:2], "nanogpt"]
    parameters = 257 * 64 + 64 * 64 + 2 * (12 * 64 * 64 + 2 * 64) + 64
    for row in rows:
        assert int(row["parameters"]) == parameters
        assert int(row["tokens a step"]) == 4 * 64
        low, high = (float(row[f"ms a step {end}"]) / 1000 for end in ("low", "high"))
        assert 256 / high <= float(row["tokens/s median"]) * 1.001
        assert float(row["tokens/s median"]) <= 256 / low * 1.001
    assert float(rows[-1]["rate over nanogpt's median"]) == 1
    text = (tmp_path / "training.txt").read_text()
    assert text in result.stdout
    assert f"torch {torch.__version__}, triton " in text.splitlines()[0]
    assert text.splitlines()[-1].startswith("Not measured: sdpa,train.compile=true:")
    for row in rows_of(tmp_path / "training-profile.csv"):
        times = [float(time) for name, time in row.items() if name not in ("shape", "loop", "sum")]
        assert sum(times) == pytest.approx(float(row["sum"]), rel=1e-3)
        assert min(float(row["matrix products"]), float(row["optimiser"])) > 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_one_command_measures_all_and_a_candidate_that_fails_is_a_line(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--shape", "1x2x64x16", "laptop:2", "--seconds", "0.01", "--out", tmp_path)
    result = bench("all", *arguments, "--profile", "--attention", "sdpa,model.n_layer=1", CXX="/bin/false")
    assert result.returncode == 0, result.stderr
    names = [row["attention"] for row in rows_of(tmp_path / "kernels.csv")]
    assert names == ["sdpa_flash", "naive_bf16", "flash_fp32", "flash_fp32 again"]
    told = (tmp_path / "kernels.txt").read_text().splitlines()[-1]
    assert "Not measured: fa4 (pip install flash-attn-4)." in told
    assert "Not available at 1×2×64×16: sdpa_cudnn (" in told
    assert [row["loop"] for row in rows_of(tmp_path / "training.csv")] == ["sdpa,model.n_layer=1", "nanogpt"]
    for name in ("users", "users-host"):
        assert [row["attention"] for row in rows_of(tmp_path / f"{name}.csv")] == ["sdpa", "stabilize", "flash_fixed"]
    for row in rows_of(tmp_path / "users-profile.csv"):
        assert float(row["attention"]) > 0 < float(row["matrix products"])
    assert "Not measured at laptop:2: sdpa,model.n_layer=1 (status 1" in (tmp_path / "compile.txt").read_text()
    for file in tmp_path.glob("*.txt"):
        assert "load a core of the host" in file.read_text().splitlines()[0]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_compilation_on_a_cpu(tmp_path: Path) -> None:
    """PyTorch still records what the phases are taken from."""
    quick = {"TORCHINDUCTOR_DEBUG_COMPILE": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}  # C++ as it stands: half of the time
    result = bench("compile", "--device", "cpu", "--shape", "laptop:2", "--attention", "sdpa,model.n_layer=1",
                   "--out", tmp_path, **quick)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path / "compile.csv")
    assert [row["caches"] for row in rows] == ["empty", "warm"]
    for row in rows:
        phases = {
            name: float(time) for name, time in row.items() if name not in ("shape", "attention", "caches", "sum")
        }
        assert sum(phases.values()) == pytest.approx(float(row["sum"]), abs=0.01)
        assert min(phases.values()) >= 0
        assert min(phases[name] for name in ("PyTorch", "Dynamo", "AOTAutograd", "Inductor", "first step")) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("kernels", "no CUDA device is visible"),
        (
            "training --device cpu --attention flash_nothing",
            "attn=flash_nothing: no such option; choose one of fa4, fa4_fixed, flash_attn, flash_bf16",
        ),
        (
            "training --device cpu --shape nothing",
            "experiment=nothing: no such option; choose one of demo_cpu",
        ),
        ("compile --device cpu --shape laptop/2", "--shape laptop/2: give EXPERIMENT"),
        ("training --device cpu --shape 1x2x64x16", "--shape 1x2x64x16: training takes EXPERIMENT"),
        ("training --device cpu --shape 1x2x64x96", "--shape 1x2x64x96: heads of 96 features"),
        (
            "compile --device cpu --attention sdpa,train.nothing=1",
            "Could not override 'train.nothing': Key 'nothing' not in 'TrainConfig'; "
            "train.nothing: no such key; flashpoint train help=all",
        ),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(arguments: str, told: str) -> None:
    command = [sys.executable, str(REPOSITORY / "scripts/benchmarks/bench.py"), *arguments.split()]
    result = warm.run(command, env=environment())
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {told}")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_variants_with_kernels_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*attentions: str) -> list[str]:
        return [variant.name for variant in kernels.chosen(attentions)]

    assert names("released") == ["flash_fp32", "released"]
    assert {"flash_bf16", "sdpa", "standard"} < set(kernels.variant_names(kernels.CONFIGS / "attn"))
    monkeypatch.setattr(
        kernels, "variant_names", lambda _: ["flash_bf16", "sdpa", "standard"]
    )  # of 40 in as many looks
    assert names() == ["flash_bf16", "standard"]
    assert names("sdpa", "flex") == ["flash_fp32"]  # others' attentions are there in any case
    assert names("flex_fixed", "fa4_fixed") == ["flash_fp32", "flex_fixed", "fa4_fixed"]
    assert names("flash_fixed", "flash_fixed,attn.out_residual_bits=3")[1:] == [
        "flash_fixed",
        "flash_fixed out_residual_bits=3",
    ]
    assert kernels.chosen(["flash_fixed,attn.out_residual_bits=3"])[1].out_residual_bits == 3
    with pytest.raises(UserError, match="flash_nothing"):
        kernels.chosen(["flash_nothing"])
