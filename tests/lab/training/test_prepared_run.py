"""What a run is made of: data beside the compilation."""

import contextlib
import multiprocessing
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
import torch

from flashpoint.errors import UserError
from flashpoint.lab.config import Config, DataConfig, ModelConfig, TrainConfig
from flashpoint.lab.data import prepare
from flashpoint.lab.data.prepare import preparing
from flashpoint.lab.training import plan
from flashpoint.lab.training.parallel import Ranks
from flashpoint.lab.training.prepared_run import PreparedRun, prepare_run
from flashpoint.lab.training.step import OptimizerStep


def built(text_file: Path, root: Path, monkeypatch: pytest.MonkeyPatch, *, begun: bool = False) -> PreparedRun:
    """A prepared run that compiles its model, whose data were perhaps begun before. The compilation is left out."""
    monkeypatch.setattr(plan, "fix_numerics", lambda *_: None)  # which outlasts the test
    monkeypatch.setattr(OptimizerStep, "warm_up", lambda _: None)
    config = Config(
        runs_dir=str(root / "runs"),
        model=ModelConfig(n_layer=1, n_head=1, d_model=16, context=16, vocab_size=300),
        data=DataConfig(source="text", path=str(text_file), root=str(root), vocab_size=300, val_fraction=0.1),
        train=TrainConfig(batch_size=2, device="cpu", compile=True),
    )
    early = preparing(config.data, fallback=True, beside=True) if begun else contextlib.nullcontext()
    with early as data:
        prepared = prepare_run(plan.settle(config, None, Ranks(), torch.device("cpu")), data)
        assert not multiprocessing.active_children()  # while the run may go on for days
    return prepared


@pytest.mark.slow
@pytest.mark.parametrize("begun", [False, True])
def test_while_the_model_compiles_another_process_prepares_the_data(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    def here(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(prepare, "load_tokenizer", here)
    prepared = built(text_file, tmp_path, monkeypatch, begun=begun)
    assert len(prepared.tokens.train) > 0
    again = built(text_file, tmp_path, monkeypatch)  # which finds them
    assert again.tokens.fingerprint == prepared.tokens.fingerprint


@pytest.mark.slow
def test_what_the_other_process_refuses_is_told_as_ever(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: .*; choose a data\.root that can be written$"):
        built(text_file, tmp_path / "file", monkeypatch)


def test_another_process_that_dies_is_told_in_one_line(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = SpawnProcess.start

    def killed(process: SpawnProcess) -> None:
        start(process)
        process.kill()

    monkeypatch.setattr(SpawnProcess, "start", killed)
    with pytest.raises(UserError, match="the process that prepared the data died"):
        built(text_file, tmp_path, monkeypatch)
