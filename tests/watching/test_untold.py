"""Attentions written by hand whose scale or window no option tells: O does."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpoint.cli.diagnose_advice import suspects
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.verdict import Diagnosis, diagnose
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from flashpoint.watching.untold import with_scale
from tests.watching.loops import loop

SIZE, TOKENS = 16, 40


def softmax(q: Tensor, k: Tensor, v: Tensor, scale: Tensor | float, keys: int = TOKENS) -> Tensor:
    """Causal, of as many keys; ``scale`` may be [H, 1, 1]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril().triu(1 - keys)
    return (scale * q @ k.mT).masked_fill(~seen, -math.inf).softmax(-1) @ v


def written(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    return _inside(q, k, v)


_inside: Callable[[Tensor, Tensor, Tensor], Tensor] = softmax  # type: ignore[assignment]


class Model(nn.Module):
    """Two layers of 4 heads that share 2 of keys, whose scores are of a size with their scale."""

    def __init__(self, of_scores: float, window: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleList((nn.Linear(32, 128), nn.Linear(64, 32))) for _ in range(2))
        self.of_scores, self.window = of_scores, window

    def forward(self, x: Tensor) -> Tensor:
        for qkv, out in self.layers:
            heads = qkv(x).unflatten(-1, (8, SIZE)).transpose(1, 2)
            q, k, v = heads.split((4, 2, 2), 1)
            x = x + out(written(self.of_scores * q, k, v, window=self.window).transpose(1, 2).flatten(2))
        return x


def step(model: nn.Module, _number: int, watched: Watch) -> None:
    watched.capture(sequences=0)
    x = torch.randn(3, TOKENS, 32)
    loss = model(x).square().mean()
    loss.backward()
    watched.step(loss, x)


def diagnosed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    of_scores: float = 1.0,
    window: int | None = None,
) -> tuple[list[Diagnosis], tuple[str, ...]]:
    """Return the diagnosis of each layer that a watch has recorded, and why others were not."""
    monkeypatch.setattr(f"{__name__}._inside", attention)
    model = Model(of_scores, window)
    run = loop(folder, model, step, steps=1, functions=[f"{__name__}:written"])
    calls = read_calls(folder / "own") if (folder / "own/captures").exists() else []
    return [diagnose(call) for call in calls], run.manifest.not_recorded


@pytest.mark.slow
@pytest.mark.parametrize("of_scores", [0.02, 1.0, 8.0])
@pytest.mark.parametrize("scale", [1.0, 1 / SIZE, SIZE**0.5, 144**-0.5, 10.0])
def test_a_scale_that_a_model_means_is_told_and_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float, of_scores: float
) -> None:
    """A forgotten one, muP's, one that multiplies, Gemma's of another size, cosine attention's. O hardly depends on it
    where scores are small, and all of dQ is off by another."""
    found, missed = diagnosed(
        tmp_path, monkeypatch, lambda q, k, v: softmax(q, k, v, scale), of_scores=of_scores / scale * SIZE**-0.5
    )
    assert missed == ()
    for one in found:
        assert one.findings == ()
        assert one.call.form.scale == scale
        assert one.otherwise_called == [f"scale {scale:.3g}, where 1/√d is 0.25,"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_scores", [0.0, 1e-5])
def test_a_scale_that_no_score_shows_is_hedged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_scores: float, dtype: torch.dtype
) -> None:
    """muP begins with W_Q = 0: O is that of every scale, and dQ is of its own."""

    def mup(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(*(x.to(dtype) for x in (q, k, v)), 1 / SIZE).to(q.dtype)

    found, missed = diagnosed(tmp_path, monkeypatch, mup, of_scores=of_scores)
    assert missed == ()
    for one in found:
        if one.call.form.scale != 1 / SIZE:  # else FP32 shows it, at scores of 1e-5
            (finding,) = one.findings
            assert (finding.kind, finding.heads) == ("other_scores", (1, 2, 3, 4))
            assert "as of scale 0.0625 in the place of" in finding.text
        assert one.call.form.scale != 1 / SIZE or of_scores > 0


class OneHead(torch.autograd.Function):
    """A dQ that is three times as large, in one head or in all."""

    @staticmethod
    def forward(_: Any, q: Tensor, heads: int) -> Tensor:
        OneHead.heads = heads
        return q.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        larger = gradient.clone()
        larger[:, : OneHead.heads] *= 3
        return larger, None


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "of_scores"), [(1, 0.0), (1, 1.0), (4, 1.0)])
def test_a_wrong_gradient_is_no_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: int, of_scores: float
) -> None:
    """A scale is that of all heads, and O shows it where scores are no longer 0."""
    found, missed = diagnosed(
        tmp_path,
        monkeypatch,
        lambda q, k, v: softmax(OneHead.apply(q, heads), k, v, SIZE**-0.5),
        of_scores=of_scores,
    )
    assert missed == ()
    wrong = tuple(range(1, heads + 1))
    assert [[(each.kind, each.heads) for each in one.findings] for one in found] == [[("gradients_off", wrong)]] * 2


def biased(bias: Tensor, forward_alone: bool = False) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return an attention with a bias inside; its backward pass may not have it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = q @ k.mT * SIZE**-0.5
        out = (scores + bias).softmax(-1) @ v
        if forward_alone:
            causal = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0, -math.inf).softmax(-1) @ v
            out = causal + (out - causal).detach()
        return out

    return attend


def prefix(tokens: int) -> Tensor:
    """A mask by which each row sees so many tokens at least."""
    later = torch.ones(TOKENS, TOKENS).triu(1)
    later[:, :tokens] = 0
    return torch.zeros(TOKENS, TOKENS).masked_fill(later > 0, -math.inf)


@pytest.mark.slow
@pytest.mark.parametrize("forward_alone", [False, True])
def test_a_prefix_that_was_not_told_is_named_by_its_rows_and_hedged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward_alone: bool
) -> None:
    found, missed = diagnosed(tmp_path, monkeypatch, biased(prefix(7), forward_alone), of_scores=3.0)
    assert missed == ()
    for one in found:
        (finding,) = one.findings
        assert (finding.kind, finding.heads) == ("out_rows", (1, 2, 3, 4))
        assert "in rows 1 to 6" in finding.text
        assert ("rows see later keys" in finding.text) is not forward_alone
    assert bool(suspects(found, None)) is not forward_alone


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.02, 0.03])
def test_a_small_bias_that_was_not_told_is_no_wrong_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: float
) -> None:
    """Of T5, at the first steps. Gradients are of another O, by as much as it."""
    bias = size * torch.randn(4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0))
    found, missed = diagnosed(tmp_path, monkeypatch, biased(bias))
    assert missed == ()
    assert all(one.findings for one in found)
    assert "gradients_off" not in {each.kind for one in found for each in one.findings}
    assert suspects(found, None)


def test_a_scale_is_read_beside_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        probs = (q @ k.repeat_interleave(2, 1).mT).masked_fill(later, -math.inf).softmax(-1)
        return F.dropout(probs, 0.3) @ v.repeat_interleave(2, 1)

    found, missed = diagnosed(tmp_path, monkeypatch, dropping, of_scores=0.5)
    assert missed == ()
    assert [one.findings for one in found] == [(), ()]
    assert {one.call.form.scale for one in found} == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize(("told", "keys"), [(16, 15), (16, 17), (16, 18), (None, 7), (None, 38)])
def test_a_window_of_another_size_is_told_and_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: int | None, keys: int
) -> None:
    found, missed = diagnosed(
        tmp_path, monkeypatch, lambda q, k, v: softmax(q, k, v, SIZE**-0.5, keys), of_scores=3.0, window=told
    )
    assert missed == ()
    assert [(one.findings, one.otherwise_called) for one in found] == [((), [f"a window of {keys} keys"])] * 2


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (12.34, "scale 12.3, where 1/√d is 0.25"),
        (torch.tensor([0.3, 0.5, 0.8, 1.3])[:, None, None], "in its heads, or has"),
    ],
)
def test_a_learned_temperature_leaves_the_call_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: Tensor | float, told: str
) -> None:
    """It is not known to all digits, and an error of it looks like one of δ."""
    found, missed = diagnosed(tmp_path, monkeypatch, lambda q, k, v: softmax(q, k, v, scale), of_scores=0.5)
    assert found == []
    assert all(told in reason for reason in missed)
    assert missed


def test_another_scale_in_one_head_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = torch.tensor([1.0, 1.0, 1.25, 1.0])[:, None, None]
    found, _ = diagnosed(tmp_path, monkeypatch, lambda q, k, v: softmax(q, k, v, factor * SIZE**-0.5), of_scores=3.0)
    assert [[(each.kind, each.heads) for each in one.findings] for one in found] == [[("other_scores", (3,))]] * 2


@pytest.mark.parametrize("scale", [1 / 80, 1.0, 80**0.5])
def test_of_scales_that_bf16_does_not_tell_apart_the_usual_one_is_taken(scale: float) -> None:
    """1/80 is 1/√6400, and in BF16 O is as well that of 1/√6401; √80 is no whole number. Of one sequence."""
    q, k, v = torch.randn(3, 1, 4, 48, 80, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = (2 / scale * 80**-0.5 * q).bfloat16()
    out = softmax(q.double(), k.double(), v.double(), scale, 48).bfloat16()
    found = with_scale(Form(True, 80**-0.5), [q, k, v, out])
    assert found is not None
    assert found.scale == scale


@pytest.mark.parametrize("scale", [12**-0.5, 3.0])
def test_a_scale_is_read_under_a_soft_cap(scale: float) -> None:
    q, k, v = torch.randn(3, 1, 4, 48, 16, generator=torch.Generator().manual_seed(1)).double()
    q = q / scale
    scores = 2 * torch.tanh(scale * q @ k.mT / 2)
    out = scores.masked_fill(torch.ones(48, 48).triu(1) > 0, -math.inf).softmax(-1) @ v
    found = with_scale(Form(True, 0.25, softcap=2.0), [q, k, v, out])
    assert found is not None
    assert found.scale == scale
