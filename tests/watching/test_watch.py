"""Somebody's own training loop, watched: what is recorded, found and kept."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashpoint
from examples import nanogpt, plain_pytorch
from flashpoint.cli.run_words import open_run
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.verdict import diagnose
from flashpoint.runs.run import Run
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests import releases
from tests.watching.loops import spectral_norms

TEXT = Path(nanogpt.__file__).read_bytes()
SMALL = {"layers": "3", "heads": "4", "width": "64", "context": "64", "batch": "16", "steps": "3"}


class Net(nn.Module):
    """Two attentions between linear layers: q and k of the second by matrices of their own, with rotations."""

    def __init__(self, attend: Callable[..., Tensor] = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (part.view(B, T, 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, 32))
        q, k, v = (m(x).view(B, T, -1, 8).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = (torch.cat([-part[..., 4:], part[..., :4]], -1) for part in (q, k))
        return self.attend(q, k, v, is_causal=True, enable_gqa=True).square().mean()


def ungrouped(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool = False) -> Tensor:
    """PyTorch's attention, which is given a key and a value for each head of q."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def loop(
    model: nn.Module, runs: Path, steps: int = 6, at: Callable[[int, Watch], None] | None = None, **options: Any
) -> Run:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flashpoint.watch(model, runs_dir=runs, name="own", steps=steps, **options) as watched:
        for step in range(steps):
            x = torch.randn(5, 12, 32)
            if at:
                at(step, watched)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x)
            loss.backward()
            watched.step(loss, {"x": x}, lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    return open_run("own", runs)


def test_a_watched_loop_is_a_run(tmp_path: Path) -> None:
    model = Net()
    run = loop(model, tmp_path, interval=3, weights_interval=6, log_interval=2)
    assert (run.verdict, run.title, run.shape.n_layer) == ("stable to 6", "sdpa", 2)
    assert run.columns["loss"][0].tolist() == list(range(6))
    assert run.columns["grad_norm"][0].tolist() == [1, 3, 5]
    assert run.columns["row_sum_relative_bias"][0].tolist() == [0, 2, 5]
    assert len(set((tmp_path / "own" / "batches.csv").read_text().splitlines())) == 6


def test_norms_are_those_of_the_matrices_that_make_q_and_k(tmp_path: Path) -> None:
    model = Net()

    def at(step: int, _watched: Watch) -> None:
        if step == 5:  # norms are taken before the step changes the weights
            expected.extend([spectral_norms(model.qkv.weight[:32]), spectral_norms(model.q.weight)])
            of_keys.extend([spectral_norms(model.qkv.weight[32:64]), np.repeat(spectral_norms(model.k.weight), 2)])

    expected: list[Any] = []
    of_keys: list[Any] = []
    run = loop(model, tmp_path, at=at, weights_interval=6)
    np.testing.assert_allclose(run.columns["w_q_spectral_norm"][1][..., 0], expected, rtol=1e-3)
    np.testing.assert_allclose(run.columns["w_k_spectral_norm"][1][..., 0], of_keys, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "attend"),
    [
        (False, F.scaled_dot_product_attention),
        (True, ungrouped),
        pytest.param(True, F.scaled_dot_product_attention, marks=releases.compiles_grouped_heads_to_bits_of_eager),
    ],
)
def test_watching_changes_no_bit_of_the_training(tmp_path: Path, compiled: bool, attend: Callable[..., Tensor]) -> None:
    weights = []
    for watched in (True, False):
        torch.manual_seed(1)
        model = Net(attend)
        trained: Any = torch.compile(model, backend="aot_eager") if compiled else model
        if watched:
            loop(trained, tmp_path, interval=2)
        else:
            torch.manual_seed(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(6):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = trained(torch.randn(5, 12, 32))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_a_capture_holds_what_the_attention_took_and_gave(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, **options)
        if torch.is_grad_enabled() and len(seen) < 8:
            seen.extend([q.detach(), k.detach(), v.detach(), out.detach()])
        return out

    loop(Net(attend), tmp_path, steps=1, at=lambda _step, watched: watched.capture(), sequences=2)
    calls = read_calls(tmp_path / "own")
    assert [(call.layer, call.step, call.attention, call.form.is_causal) for call in calls] == [
        (1, 0, "sdpa", True), (2, 0, "sdpa", True),
    ]  # fmt: skip
    for call, at in zip(calls, (0, 4), strict=True):
        for kept, given in zip((call.q, call.k, call.v, call.out), seen[at : at + 4], strict=True):
            assert torch.equal(kept, given.bfloat16())  # a capture has 16 sequences, or all
        leaves = [x.requires_grad_() for x in (call.q, call.k, call.v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(out, leaves, call.grad_out)
        for kept, expected in zip((call.grad_q, call.grad_k, call.grad_v), grads, strict=True):
            assert torch.equal(kept, expected)
    batch = torch.load(tmp_path / "own/captures/step-0000000/batch.pt")
    assert batch["x"].shape == (5, 12, 32)


def test_a_loss_that_is_no_number_leaves_the_batch_and_the_last_tensors(tmp_path: Path) -> None:
    model = Net()

    def at(step: int, _watched: Watch) -> None:
        if step == 3:
            with torch.no_grad():
                model.out.weight.fill_(float("nan"))

    run = loop(model, tmp_path, at=at, interval=2, log_interval=2)
    assert run.verdict == "nonfinite at 3"
    folder = tmp_path / "own/captures/step-0000003"
    assert sorted(path.name for path in folder.iterdir()) == [
        "batch.pt", "layer-01.safetensors", "layer-02.safetensors",
    ]  # fmt: skip


@pytest.mark.slow
def test_growth_of_w_q_is_warned_of_and_the_layer_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()

    def at(_step: int, _watched: Watch) -> None:
        with torch.no_grad():
            model.q.weight[8:16] *= 1.03

    run = loop(model, tmp_path, steps=60, at=at, weights_interval=1, interval=1000)
    assert run.folder is not None
    assert not run.folder.captures.exists()  # 500 steps before there is a growth to speak of
    run = loop(model, tmp_path / "longer", steps=530, at=at, weights_interval=10, interval=1000)
    assert "W_Q of layer 2, head 2 has grown" in capsys.readouterr().err
    assert [call.layer for call in read_calls(tmp_path / "longer/own")] == [2]


class Encoder(nn.Module):
    """PyTorch's own layer behind another matrix, which makes no q by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(32, 32), nn.TransformerEncoderLayer(32, 4, 32, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embed(x)).square().mean()


def test_pytorchs_multi_head_attention_is_found_with_its_matrices(tmp_path: Path) -> None:
    model = Encoder()

    def at(step: int, _watched: Watch) -> None:
        if step == 1:
            weight = model.layer.self_attn.in_proj_weight
            expected.extend([spectral_norms(weight[:32]), spectral_norms(weight[32:64])])

    expected: list[Any] = []
    run = loop(model, tmp_path, steps=2, at=at, weights_interval=2)
    assert (run.title, run.shape.n_head) == ("sdpa", 4)
    for name, norms in zip(("w_q_spectral_norm", "w_k_spectral_norm"), expected, strict=True):
        np.testing.assert_allclose(run.columns[name][1][0, :, 0], norms, rtol=1e-3)


def test_the_matrix_before_that_of_queries_is_not_taken_for_theirs(tmp_path: Path) -> None:
    """Queries by a parameter, behind a module with a matrix."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.weight = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            q = (self.embed(x) @ self.weight).unflatten(-1, (4, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().mean()

    model = Bare()
    run = loop(model, tmp_path, steps=1, weights_interval=1)
    norms = [float(torch.linalg.matrix_norm(part.double(), 2)) for part in model.weight.detach().split(8, 1)]
    np.testing.assert_allclose(run.columns["w_q_spectral_norm"][1][0, :, 0], norms, rtol=1e-2)


def test_a_model_in_distributed_data_parallel_is_watched(tmp_path: Path) -> None:
    """One process; its weights are those of the training without."""
    import torch.distributed as dist

    torch.manual_seed(1)
    plain, wrapped = Net(), Net()
    wrapped.load_state_dict(plain.state_dict())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = loop(nn.parallel.DistributedDataParallel(wrapped), tmp_path, interval=2, weights_interval=2)
    finally:
        dist.destroy_process_group()
    loop(plain, tmp_path / "plain", interval=2, weights_interval=2)
    assert {"w_q_spectral_norm", "row_sum_relative_bias"} <= set(run.columns)
    assert all(torch.equal(one, other) for one, other in zip(wrapped.parameters(), plain.parameters(), strict=True))


def test_an_attention_of_ones_own_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool = False) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return scores.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ v

    loop(Net(own), tmp_path / "unnamed", steps=1)
    assert "functions=['MODULE:NAME']" in capsys.readouterr().err
    monkeypatch.setattr(_Here, "attend", staticmethod(own))
    model = Net(lambda *qkv, **options: _attend(*qkv, **options))
    with pytest.raises(ValueError, match="has no function nowhere"):
        loop(model, tmp_path, functions=[f"{__name__}:nowhere"])
    run = loop(model, tmp_path, steps=1, functions=[f"{__name__}:_attend"])
    assert run.title == f"{__name__}:_attend"


class _Here:
    attend: Callable[..., Tensor] = staticmethod(F.scaled_dot_product_attention)


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool = False) -> Tensor:
    return _Here.attend(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)


def test_what_fails_in_watching_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flashpoint.watching.logged_metrics.by_sequence", lambda *_: 1 / 0)
    assert loop(Net(), tmp_path, interval=2).verdict == "stable to 6"
    assert "ZeroDivisionError: division by zero); training goes on" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "kind"), [(nanogpt, "delta_bias"), (nanogpt, "rounded_denominator"), (plain_pytorch, "delta_bias")]
)
def test_a_loop_from_failure_to_fix(tmp_path: Path, example: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 2 has a fault in head 3: watching and diagnosing name it, and find nothing with the drop-in."""
    faulty = faulty_attention(Fault(kind, head=2, size=0.02))
    calls = itertools.count(1)
    by_layer = lambda *qkv, **options: (faulty if next(calls) % 3 == 2 else clean)(*qkv, is_causal=True)  # noqa: E731
    clean = faulty_attention(Fault("none"))
    monkeypatch.setattr(_Here, "attend", staticmethod(by_layer))
    settings = {**SMALL, "waves": "48", "epochs": "1", "length": "64"} if example is plain_pytorch else SMALL
    options = {**settings, "runs": str(tmp_path), "functions": f"{__name__}:_attend"}
    example.train(lambda q, k, v, is_causal: _attend(q, k, v, is_causal), **options, name="failing")
    assert found_in(tmp_path / "failing") == [(kind, 2, (3,))]
    if kind != "delta_bias":  # the loop with the fix is the same whatever the fault was
        return
    fixed = example.attention_named("flash_fixed")
    example.train(fixed, **settings, runs=str(tmp_path), name="fixed")
    assert found_in(tmp_path / "fixed") == []


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_transformers_loop_from_failure_to_fix(tmp_path: Path, model: str) -> None:
    """An attention of Transformers with a fault in head 2 of layer 1, by its interface."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from examples import transformers_gpt2
    from flashpoint.huggingface import implementation

    faulty = faulty_attention(Fault("delta_bias", head=1, size=0.02))

    def forward(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        if module.layer_idx:
            return sdpa_attention_forward(module, q, k, v, mask, **options)
        q, k, v = (x.bfloat16() for x in (q, k, v))
        return faulty(q, k, v, scale=options["scaling"]).transpose(1, 2), None

    AttentionInterface.register("faulty", forward)
    options = {**SMALL, "layers": "2", "model": model, "runs": str(tmp_path)}
    transformers_gpt2.train(TEXT, "faulty", **options, name="failing")
    assert found_in(tmp_path / "failing") == [("delta_bias", 1, (2,))]
    transformers_gpt2.train(TEXT, implementation("flash_fixed"), **options, name="fixed")
    assert found_in(tmp_path / "fixed") == []


def found_in(run: Path) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(found.kind, found.layer, found.heads) for call in read_calls(run) for found in diagnose(call).findings]
