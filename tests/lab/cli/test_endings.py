"""The lines with which a run ends: how, which heads grew, the page, and the command to type next."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flashpoint.lab.cli.endings import tell_of_run
from flashpoint.runs.chain import ChainWriter
from flashpoint.runs.folder import RunFolder
from tests.composed import composed
from tests.records import write_run

GIVEN = ["experiment=laptop", "attn=flash_bf16", "seed=1", "run_name=here"]


def made(
    path: Path,
    attention: str,
    *,
    losses: float = 2.0,
    of: Path | None = None,
    shape: Mapping[str, Any] | None = None,
    doubling: float = math.inf,
    **settings: Any,
) -> RunFolder:
    """A run of 1,700 steps, in which W_Q of layer 2, head 1 doubles every 250 steps if it explodes, at step 1,344.

    Args:
        doubling: after how many steps W_Q of layer 2, head 2 has doubled.
    """
    exploded = settings.get("onset") is not None
    parent = {"parent": {"run": str(of), "from_step": None}} if of else {}
    metrics: list[dict[str, Any]] = [{"step": 0, "loss": losses}]
    for step in range(0, 1700, 50):
        norms = [[1.0, 1.1], [2 ** (step / 250) if exploded else 1.2, 2 ** (step / doubling)]]
        metrics.append({"step": step, "w_q_spectral_norm": norms})
    write_run(
        path,
        composed(f"attn={attention}").attn.to_dict(),
        steps=1700,
        metrics=metrics,
        manifest=parent,
        config={"model": {"n_layer": 2, "n_head": 2, **(shape or {})}},
        **settings,
    )
    chain = ChainWriter(path / "chain.bin")
    for _ in range(1700):
        chain.append(losses, 1.0)
    chain.close()
    return RunFolder(path)


def told(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], *, of_sweep: bool = False, given: Sequence[str] = GIVEN
) -> list[str]:
    tell_of_run(folder, given, of_sweep=of_sweep)
    return capsys.readouterr().err.splitlines()


def test_an_explosion_names_its_heads_and_how_long_before_it_was_foretold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", "flash_bf16", onset=1344)
    run.report.path.mkdir()
    run.report.page.touch()
    # Twice its norm 500 steps before, and twice the median 1.05, from the first 500 steps on; 2 ** 5.2 at 1,300.
    assert told(run, capsys) == [
        "flash_bf16 exploded at 1,344",
        "W_Q of layer 2 grew in 500 steps: head 1 (×4.0, to 36.8); the early warning came at 500, 844 steps before",
        f"page: {run.report.page}",
        f"next: flashpoint train replay={run.path} attn=flash_fixed",
    ]
    assert [line.split()[0] for line in told(run, capsys, of_sweep=True)] == ["flash_bf16", "W_Q", "page:"]


@pytest.mark.parametrize(
    ("doubling", "heads"),
    [
        (251, "head 1 (×4.0, to 36.8) and head 2 (×4.0, to 36.2)"),  # 2 ** (1,300 / 251): half of four heads grow
        (400, "head 1 (×4.0, to 36.8)"),  # 2 ** (1,300 / 400) = 9.5, less than half of the other
    ],
)
def test_all_large_heads_of_a_small_model_that_grew_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], doubling: float, heads: str
) -> None:
    """Beside the median of four heads, of which two grow, none stood out: the line left their growth out."""
    run = made(tmp_path / "run", "flash_bf16", onset=1344, doubling=doubling)
    assert told(run, capsys)[1].startswith(f"W_Q of layer 2 grew in 500 steps: {heads}; ")


def test_the_next_command_of_a_run_that_held_is_another_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(made(tmp_path / "run", "flash_bf16"), capsys) == [
        "flash_bf16 held through 1,700",
        "next: flashpoint train experiment=laptop attn=flash_bf16 seed=2",
    ]


@pytest.mark.parametrize("key", ["resume", "replay"])
def test_what_goes_on_or_is_repeated_takes_no_other_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    run = made(tmp_path / "run", "flash_bf16")
    given = [f"{key}={tmp_path / 'gone'}", "train.steps=1700"]
    assert told(run, capsys, given=given)[-1] == f"next: flashpoint report {run.path}"


def test_where_the_fix_cannot_take_a_cap_the_next_command_looks_into_the_explosion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", "flex", onset=1344, shape={"score_cap": 30.0})
    assert told(run, capsys)[-1] == f"next: flashpoint diagnose {run.path}"


def test_where_the_fix_explodes_the_next_command_looks_into_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", "flash_fixed", onset=1344)
    assert told(run, capsys)[-1] == f"next: flashpoint diagnose {run.path}"


def test_a_replay_stands_beside_its_original(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last line named the first step of which the bits differ, which read as a failure."""
    original = made(tmp_path / "original", "flash_bf16", onset=1344)
    fixed = made(tmp_path / "fixed", "flash_fixed", losses=1.9, of=original.path)
    assert told(fixed, capsys) == [
        "same batches and initial weights: flash_bf16 exploded at 1,344, flash_fixed held through 1,700",
        f"next: flashpoint report {original.path} {fixed.path}",
    ]
    slower = made(tmp_path / "slower", "flash_bf16", losses=1.9, of=original.path, train={"lr": 0.1})
    line = f"same batches and initial weights: {original.path} exploded at 1,344, {slower.path} held through 1,700"
    assert told(slower, capsys)[0] == line


@pytest.mark.parametrize(
    ("losses", "line"),
    [(2.0, "equal to {}, bit for bit, over 1,700 steps"), (1.9, "differs from {} from step 0 on, first in its loss")],
)
def test_a_replay_with_the_same_settings_says_whether_it_has_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], losses: float, line: str
) -> None:
    original = made(tmp_path / "original", "flash_bf16", onset=1344)
    again = made(tmp_path / "again", "flash_bf16", losses=losses, of=original.path, onset=1344)
    assert told(again, capsys)[:2] == [line.format(original.path), "flash_bf16 exploded at 1,344"]


def test_a_run_whose_original_is_gone_ends_as_others_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run", "flash_fixed", of=tmp_path / "gone")
    assert told(run, capsys)[0] == "flash_fixed held through 1,700"
