"""What is told where heads and tokens of an attention are exchanged, or look so."""

import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.watching.loops import loop


def by_token(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Model(nn.Module):
    """Of tokens [B, T]: T is 12 with ``heads`` heads, of which ``of_keys`` have keys."""

    def __init__(self, heads: int, of_keys: int, call: str, transposed: bool) -> None:
        super().__init__()
        self.heads, self.of_keys, self.call, self.transposed = heads, of_keys, call, transposed
        self.embedding, self.qkv = nn.Embedding(50, 32), nn.Linear(32, 8 * (heads + 2 * of_keys))

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.qkv(self.embedding(tokens)).unflatten(-1, (-1, 8))
        q, k, v = features.split([self.heads, self.of_keys, self.of_keys], 2)
        if self.transposed:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = globals()[self.call](q, k, v)
        return attended.flatten(2)


def told(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: nn.Module,
    *functions: str,
    tokens: int = 12,
) -> tuple[str, list[str]]:
    """Return what a watch told of a loop that trains on so many tokens, and what was not recorded."""

    def step(model: nn.Module, _number: int, watched: object) -> None:
        batch = torch.randint(50, (3, tokens))
        loss = model(batch).square().mean()
        loss.backward()
        watched.step(loss, batch)  # type: ignore[attr-defined]

    run = loop(tmp_path, model, step, steps=2, functions=[f"{__name__}:{word}" for word in functions])
    return capsys.readouterr().err, list(run.manifest.not_recorded)


QUESTION = "step 0: are heads and tokens exchanged? q"


@pytest.mark.slow
@pytest.mark.parametrize("of_keys", [4, 2])
@pytest.mark.parametrize(
    ("word", "transposed", "remedy"),
    [("by_token", False, "[B, T, H, d]; give @bthd"), ("by_head@bthd", True, "[B, H, T, d]; leave out @bthd")],
)
def test_a_function_of_the_other_layout_is_told_apart_from_one_with_a_mask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, transposed: bool, remedy: str, of_keys: int
) -> None:
    """With fewer heads of keys it was taken for cross-attention."""
    model = Model(4, of_keys, word.partition("@")[0], transposed)
    _, (reason,) = told(tmp_path, capsys, model, word)
    assert f"O is softmax(QKᵀ·scale)V of tensors {remedy} in functions=" in reason


def test_attention_over_heads_is_asked_about_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What PyTorch's attention returns is right for either layout: the shapes tell, and what the model was given."""
    said, not_recorded = told(tmp_path, capsys, Model(4, 4, "by_head", transposed=False))
    (line,) = [line for line in said.splitlines() if "exchanged" in line]
    assert f"{QUESTION} [3, 12, 4, 8] is 12 heads of 4 tokens" in line
    assert "and the model was given sequences of 12: " in line
    assert "give sdpa x.transpose(1, 2)" in line
    assert not not_recorded  # it is recorded: the question may be answered with no


def test_the_heads_that_a_configuration_names_tell_it_where_no_input_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Shifted(Model):
        config: types.SimpleNamespace

        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens[:, :-1])

    for heads in (4, 12):  # the latter is no name of what is seen here
        model = Shifted(4, 4, "by_head", transposed=False)
        model.config = types.SimpleNamespace(num_attention_heads=heads)
        said, _ = told(tmp_path / str(heads), capsys, model)
        assert (f"{QUESTION} [3, 11, 4, 8]" in said and "and names 4 heads" in said) == (heads == 4)


def test_one_query_that_pools_as_many_tokens_as_there_are_heads_is_not_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pooled(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            features = self.qkv(self.embedding(tokens)).unflatten(-1, (-1, 8)).transpose(1, 2)
            q, k, v = features.split(12, 1)
            return F.scaled_dot_product_attention(q[:, :, :1], k, v)

    model = Pooled(12, 12, "by_head", transposed=True)
    model.n_head = 12
    said, not_recorded = told(tmp_path, capsys, model)
    assert "exchanged" not in said
    assert not not_recorded


@pytest.mark.parametrize(("heads", "tokens"), [(12, 4), (4, 12), (12, 12)])
def test_a_right_call_is_not_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], heads: int, tokens: int
) -> None:
    model = Model(heads, heads, "by_head", transposed=True)
    model.n_head = heads  # type: ignore[assignment]
    said, not_recorded = told(tmp_path, capsys, model, tokens=tokens)
    assert "exchanged" not in said
    assert not not_recorded
