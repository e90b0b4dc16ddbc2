"""Which matrices make the queries and keys of each head, in models of others: found, or told that there are none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashpoint.early_warning import Sentinel
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from flashpoint.watching.projections import ProjectedGradients, Projection
from tests.watching.loops import Block, Heads, Pair, Project, loop, rotated, spectral_norms

NONE_FOUND = "norms of W_Q and W_K are not logged"


def normed_and_rotated(x: Tensor) -> Tensor:
    return rotated(F.rms_norm(x, (8,)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 4, 16])
def test_rotary_and_normed_queries_are_traced_to_their_matrix(tmp_path: Path, heads: int, dtype: torch.dtype) -> None:
    """More heads than one backward pass tells apart, too; keys are shared by all of them."""
    model = Heads(nn.Linear(32, 8 * heads), nn.Linear(32, 8), nn.Linear(32, 8), normed_and_rotated).to(dtype)

    def step(_model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(number)).to(dtype)
        (loss := model(x)).backward()
        watched.step(loss.float(), x)

    run = loop(tmp_path, model, step, steps=2)
    for name, weight in (("w_q_spectral_norm", model.q.weight), ("w_k_spectral_norm", model.k.weight)):
        norms = spectral_norms(weight) if name[2] == "q" else spectral_norms(weight) * heads
        np.testing.assert_allclose(run.columns[name][1][0, :, 0], norms, rtol=1e-3)


def normed_over_all_heads(x: Tensor) -> Tensor:
    features = x.transpose(1, 2).flatten(2)
    return rotated(F.layer_norm(features, features.shape[-1:]).unflatten(2, (-1, 8)).transpose(1, 2))


def divided_by_a_length_over_all_heads(x: Tensor) -> Tensor:
    return rotated(x * x.float().square().mean((1, 3), keepdim=True).rsqrt().to(x.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("norm", [normed_over_all_heads, divided_by_a_length_over_all_heads])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 16])
def test_the_features_of_a_head_are_known_behind_a_norm_over_all_heads(
    tmp_path: Path, heads: int, dtype: torch.dtype, norm: Project
) -> None:
    """Each feature reaches all heads through the norm's denominator."""
    torch.manual_seed(0)
    model = Heads(nn.Linear(32, 8 * heads), nn.Linear(32, 8 * heads), nn.Linear(32, 8 * heads), norm).to(dtype)

    def step(_model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(number)).to(dtype)
        (loss := model(x)).backward()
        watched.step(loss.float(), x)

    run = loop(tmp_path, model, step, steps=2)
    for name, weight in (("w_q_spectral_norm", model.q.weight), ("w_k_spectral_norm", model.k.weight)):
        np.testing.assert_allclose(run.columns[name][1][0, :, 0], spectral_norms(weight), rtol=1e-3)


class Adapted(nn.Module):
    """A matrix and a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(32, 32), nn.Linear(32, 4), nn.Linear(4, 32)

    @property
    def weight(self) -> nn.Parameter:  # as PEFT's
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Convolved(nn.Module):
    """A convolution of each feature, as with a short memory, over the product with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.convolution = nn.Linear(32, 32), nn.Conv1d(32, 32, 3, padding=1, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(self.time(x).mT).mT


class FrozenBeside(nn.Module):
    """A frozen matrix of features without gradients, and a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 4), nn.Linear(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class AdaptedInside(nn.Linear):
    """A matrix that has a low-rank one inside."""

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.adapter = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 32))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)


class Mixed(nn.Module):
    """A matrix, whose features are mixed over all heads afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("mixing", torch.linalg.qr(torch.randn(32, 32)).Q)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.mixing


@pytest.mark.parametrize("make", [Adapted, Convolved, FrozenBeside, AdaptedInside, Mixed])
def test_no_other_matrix_is_taken_for_that_of_queries(
    tmp_path: Path, make: type[nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    run = loop(tmp_path, Heads(make(), make(), make()), steps=2)
    assert not {"w_q_spectral_norm", "w_k_spectral_norm"} & set(run.columns)
    assert NONE_FOUND in capsys.readouterr().err


Made = tuple[list[nn.Parameter], Callable[[Tensor], Tensor], Callable[[nn.Parameter], Tensor]]
"""Weights, q [B, T, H·8] or k of x [B, T, 32], and the matrix [H·8, 32] of a weight."""


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 6)


def _written_out(name: str) -> Made:
    """Products with parameters of no module, as users write them."""
    heads, side, each = _parameter(32, 4, 8), _parameter(32, 32), _parameter(4, 32, 8)
    fused, transposed, kernel = _parameter(3, 32, 32), _parameter(96, 32), _parameter(32, 32, 1)
    made: dict[str, Made] = {
        "einsum": ([heads], lambda x: torch.einsum("btc,chd->bthd", x, heads).flatten(2), lambda w: w.flatten(1).mT),
        "einsum, weight first": (
            [each], lambda x: torch.einsum("hcd,btc->bthd", each, x).flatten(2), lambda w: w.mT.flatten(0, 1)
        ),
        "broadcast": (
            [each], lambda x: (x[:, None] @ each).transpose(1, 2).flatten(2), lambda w: w.mT.flatten(0, 1)
        ),
        "@": ([side], lambda x: x @ side, lambda w: w.mT),
        "@ from the left": ([side], lambda x: (side @ x.mT).mT, lambda w: w),
        "fused": (
            [fused], lambda x: torch.einsum("btc,scd->sbtd", x, fused).unbind()[1], lambda w: w[1].mT
        ),
        "chunked": ([transposed], lambda x: F.linear(x, transposed.chunk(3)[2]), lambda w: w[64:]),
        "interleaved": (
            [transposed],
            lambda x: F.linear(x, transposed).unflatten(2, (4, 8, 3))[..., 1].flatten(2),
            lambda w: w[1::3],
        ),
        "convolution": ([kernel], lambda x: F.conv1d(x.mT, kernel).mT, lambda w: w[..., 0]),
    }  # fmt: skip
    return made[name]


class Written(nn.Module):
    """A part of attention that a function computes with parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        weights, self.function, self.matrix = _written_out(name)
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", [
    "einsum", "einsum, weight first", "broadcast", "@", "@ from the left", "fused", "chunked", "interleaved",
    "convolution",
])  # fmt: skip
def test_products_with_parameters_of_no_module_are_found(tmp_path: Path, name: str, dtype: torch.dtype | None) -> None:
    """With autocast, too, which casts the weight before the product. No hook of a weight is called once more."""
    model = Heads(Written(name), Written(name), nn.Linear(32, 32), rotated)
    called: list[int] = []
    model.q.weights[0].register_hook(lambda _: called.append(1))
    expected = [spectral_norms(made.matrix(made.weights[0])) for made in (model.q, model.k)]

    def step(_model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(number))
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(x)
        loss.backward()
        watched.step(loss, x)

    run = loop(tmp_path, model, step, steps=2)
    for metric, norms in zip(("w_q_spectral_norm", "w_k_spectral_norm"), expected, strict=True):
        np.testing.assert_allclose(run.columns[metric][1][0, :, 0], norms, rtol=1e-3)
    assert len(called) == 2


def test_gradients_of_a_parameter_of_three_dimensions_are_told_by_head() -> None:
    """As where NaN came in the heads of a dQ or dK: by the largest magnitude of each."""
    heads, fused = _parameter(32, 4, 8), _parameter(96, 32)
    of_q, of_k = torch.arange(32).view(4, 8), torch.arange(32, 64).view(4, 8)
    found = {
        "w_q_spectral_norm": [(Projection(heads, (0,), of_q),)],
        "w_k_spectral_norm": [(Projection(fused, (1,), of_k),)],
    }
    for one in (heads, fused):
        one.grad = torch.randn_like(one)
    largest = ProjectedGradients(found).largest()
    torch.testing.assert_close(largest["dQ"][0], heads.grad.abs().amax((0, 2)))
    torch.testing.assert_close(largest["dK"][0], fused.grad[32:64].view(4, -1).abs().amax(1))


class TwoStreams(nn.Module):
    """Attention of tokens of two kinds, each with matrices of its own, joined or written into one tensor."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.of_text, self.of_image, self.joined = nn.Linear(32, 96), nn.Linear(24, 96), joined

    def forward(self, x: Tensor) -> Tensor:
        text, image = self.of_text(x[:, :5]), self.of_image(x[:, 5:, :24])
        if self.joined:
            both = torch.cat([text, image], 1)
        else:
            both = torch.zeros(*x.shape[:2], 96)
            both[:, :5], both[:, 5:] = text, image
        q, k, v = both.unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        q, k = (rotated(F.rms_norm(one, (8,))) for one in (q, k))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("joined", [True, False])
def test_of_two_matrices_for_tokens_of_two_kinds_the_larger_norm_counts(tmp_path: Path, joined: bool) -> None:
    model = TwoStreams(joined)
    with torch.no_grad():
        model.of_text.weight[:8] *= 3
    for first, metric in ((0, "w_q_spectral_norm"), (32, "w_k_spectral_norm")):
        norms = [spectral_norms(made.weight[first : first + 32]) for made in (model.of_text, model.of_image)]
        run = loop(
            tmp_path / metric,
            model,
            steps=2,
        )
        np.testing.assert_allclose(run.columns[metric][1][0, :, 0], np.maximum(*norms), rtol=1e-2)


def test_a_layer_whose_queries_are_no_product_leaves_the_others_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Any] = []
    monkeypatch.setattr(Sentinel, "update", lambda _self, _step, norms: judged.append(norms))
    model = Pair()
    model.first.register_parameter("queries", _parameter(1, 4, 5, 8))

    def pooled(x: Tensor) -> Tensor:
        q, kv = model.first.queries, model.first.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q.expand(len(x), -1, -1, -1), kv[1], kv[2])
        return x[:, :5] + out.transpose(1, 2).flatten(2)

    monkeypatch.setattr(model.first, "forward", pooled)
    norms = spectral_norms(model.second.qkv.weight[:32])
    loop(tmp_path, model, steps=2)
    told = capsys.readouterr().err
    assert "W_Q of layer 1 is not known" in told
    assert "q of layer 1 (first) is made of a parameter [1, 4, 5, 8] without a product" in told
    np.testing.assert_allclose(judged[0], [[np.nan] * 4, norms], rtol=1e-3)


def test_the_three_matrices_of_a_multi_head_attention_are_found(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.narrow = nn.Linear(32, 32), nn.Linear(32, 16)
            self.attend = nn.MultiheadAttention(32, 4, kdim=16, vdim=16, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.narrow(x)
            return self.attend(self.embed(x), y, y, need_weights=False)[0].square().mean()

    model = Model()
    expected = [spectral_norms(weight) for weight in (model.attend.q_proj_weight, model.attend.k_proj_weight)]

    def step(_model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(number))
        (loss := model(x)).backward()
        watched.step(loss, x)

    run = loop(tmp_path, model, step, steps=2)
    for name, norms in zip(("w_q_spectral_norm", "w_k_spectral_norm"), expected, strict=True):
        np.testing.assert_allclose(run.columns[name][1][0, :, 0], norms, rtol=1e-3)


class Checkpointed(nn.Module):
    """A layer of 16 heads with dropout, computed anew in the backward pass, where dropout draws anew as well."""

    def __init__(self) -> None:
        super().__init__()
        heads = (nn.Linear(32, 128) for _ in range(3))
        self.layer, self.computed = Heads(*heads, change=lambda x: F.dropout(normed_and_rotated(x), 0.1)), 0

    def forward(self, x: Tensor) -> Tensor:
        def counted(x: Tensor) -> Tensor:
            self.computed += 1
            return self.layer(x)

        out: Tensor = checkpoint(counted, x, use_reentrant=False, preserve_rng_state=False)
        return out


def test_a_checkpoint_is_computed_a_few_times_whatever_the_heads_and_draws_as_unwatched(tmp_path: Path) -> None:
    """Twice for the training; for each of q and k at most three times to tell 16 heads apart."""
    torch.manual_seed(1)
    plain, watched = Checkpointed(), Checkpointed()
    watched.load_state_dict(plain.state_dict())
    counts = []
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for number in range(3):
        x = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(number))
        plain(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    def step(model: nn.Module, number: int, watched_loop: Watch) -> None:
        x = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(number))
        (loss := model(x)).backward()
        watched_loop.step(loss, x)
        counts.append(watched.computed)

    run = loop(tmp_path, watched, step, steps=3)
    assert "w_q_spectral_norm" in run.columns
    assert counts[0] <= 2 + 2 * 3
    assert [counts[1] - counts[0], counts[2] - counts[1]] == [2, 2]
    assert all(torch.equal(one, other) for one, other in zip(watched.parameters(), plain.parameters(), strict=True))


def test_a_forward_pass_that_no_hook_shows_and_without_gradients_makes_no_layers(tmp_path: Path) -> None:
    """A loop that calls a method of the model, first for a number to log."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        watched.capture(sequences=0)
        x = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(number))
        model.forward(x[:1]).mean().item()
        loss = model.forward(x).square().mean()
        loss.backward()
        watched.step(loss, x)

    run = loop(tmp_path, Pair(), step, steps=2)
    calls = read_calls(tmp_path / "own")
    assert {call.layer for call in calls} == {1, 2}
    assert all(call.q.shape[0] == 3 for call in calls)
    assert run.columns["w_q_spectral_norm"][1].shape[0] == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_does_not_hide_the_attention(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.scripted = Pair(), torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.ReLU()))

        def forward(self, x: Tensor) -> Tensor:
            return self.scripted(self.pair(x))

    run = loop(tmp_path, Model(), steps=2)
    assert {"w_q_spectral_norm", "row_sum_relative_bias"} <= set(run.columns)


def test_norms_of_layers_with_different_numbers_of_heads_are_judged_and_not_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Halves(Block):
        def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    judged: list[Any] = []
    monkeypatch.setattr(Sentinel, "update", lambda _self, _step, norms: judged.append(norms))
    model = Pair()
    model.second = Halves()
    first, second = (block.qkv.weight[:32].detach().double() for block in (model.first, model.second))
    run = loop(tmp_path, model, steps=2)
    assert "w_q_spectral_norm" not in run.columns
    told = capsys.readouterr().err
    assert told.count("norms of W_Q and W_K are judged for the early warning, and not logged") == 1
    assert "failed" not in told
    assert "the loss and sdpa in 2 layers of 2 to 4 heads (first to second)" in told
    expected = [
        [float(torch.linalg.matrix_norm(head, 2)) for head in weight.unflatten(0, (heads, -1))]
        for weight, heads in ((first, 4), (second, 2))
    ]
    np.testing.assert_allclose(judged[0], [expected[0], [*expected[1], np.nan, np.nan]], rtol=1e-3)


@pytest.mark.parametrize(("repeat", "heads"), [
    (lambda x: x.repeat_interleave(2, 1), [0, 0, 1, 1]),
    (lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2), [0, 0, 1, 1]),
    (lambda x: x[:, :1].expand(-1, 4, -1, -1), [0, 0, 0, 0]),
    (lambda x: x.repeat(1, 2, 1, 1), [0, 1, 0, 1]),
])  # fmt: skip
def test_keys_that_were_repeated_for_heads_of_queries_are_traced(
    tmp_path: Path, repeat: Project, heads: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (one(x).unflatten(-1, (-1, 8)).transpose(1, 2) for one in (self.q, self.k, self.v))
            return F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True).transpose(1, 2).flatten(2)

    model = Grouped()
    norms = spectral_norms(model.k.weight)
    run = loop(tmp_path, model, steps=2)
    found = run.columns["w_k_spectral_norm"][1][0, :, 0].tolist()
    assert found == pytest.approx([norms[head] for head in heads], rel=1e-2)
    assert "no matrix found" not in capsys.readouterr().err
