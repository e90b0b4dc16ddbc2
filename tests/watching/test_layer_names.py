"""Layers are told by the modules that call their attentions: numbers alone mix an encoder's with a decoder's."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from flashpoint.cli.main import main
from flashpoint.watching.captures import read_calls
from flashpoint.watching.interceptor import with_hooks
from flashpoint.watching.loop import Watch
from tests.watching.loops import loop, plain


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(32, 4, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.both(x, x, tgt_mask=mask, tgt_is_causal=True)
        return out


NAMES = ["both.encoder.layers.0.self_attn", "both.decoder.layers.0.self_attn", "both.decoder.layers.0.multihead_attn"]


def captured(model: nn.Module, number: int, watched: Watch) -> None:
    if not number:
        watched.capture(sequences=3)
    plain(model, number, watched)


def diagnosed(path: Path, *options: str) -> str:
    result = CliRunner().invoke(main, ["diagnose", str(path), *options])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_captures_lines_and_tables_name_the_module_of_a_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compiled: bool
) -> None:
    model = EncoderDecoder()
    loop(tmp_path, torch.compile(model, backend="eager") if compiled else model, captured)  # type: ignore[arg-type]
    assert [call.module for call in read_calls(tmp_path / "own")] == NAMES
    assert f"sdpa in 3 layers of 4 heads ({NAMES[0]} to {NAMES[2]}), written" in capsys.readouterr().err
    for tensors in (True, False):  # without them δ alone is left
        if not tensors:
            for file in (tmp_path / "own/captures/step-0000000").glob("layer-*"):
                file.unlink()
        rows = [line.split() for line in diagnosed(tmp_path / "own").splitlines() if line.startswith("|   ")]
        assert [(row[1], row[5]) for row in rows[1:] if row[3] == "1"] == [
            (str(layer), name) for layer, name in enumerate(NAMES, 1)
        ]


def test_names_are_those_of_the_models_author() -> None:
    inner = nn.Sequential()
    inner.module = nn.Linear(1, 1)  # a name that wrappers have, too
    names = {type(one).__name__: name for one, name in with_hooks(nn.DataParallel(inner)).items()}
    assert names == {"DataParallel": "", "Sequential": "", "Linear": "module"}


def test_a_part_that_the_loop_calls_has_its_name_and_so_has_the_next_after_an_interruption(tmp_path: Path) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if not number:
            watched.capture(sequences=0)
            hook = model.second.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                model(torch.randn(3, 12, 32))
            hook.remove()
        plain(model, number, watched)

    loop(tmp_path / "interrupted", step=step)
    assert [call.module for call in read_calls(tmp_path / "interrupted/own")] == ["first", "second"]

    def parts(model: nn.Module, number: int, watched: Watch) -> None:
        if not number:
            watched.capture(sequences=0)
        loss = model.second(model.first(torch.randn(3, 12, 32))).square().mean()
        loss.backward()
        watched.step(loss)

    loop(tmp_path / "parts", step=parts)
    assert [call.module for call in read_calls(tmp_path / "parts/own")] == ["first", "second"]
