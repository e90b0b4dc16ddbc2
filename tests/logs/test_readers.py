"""Logs as their tools write them. Those in ``written/`` are of real trainings: Transformers 5.24, Lightning 2.6."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from flashpoint.errors import UserError
from flashpoint.logs.log import Log, Resume, read_log
from flashpoint.logs.text_lines import read_text_lines
from tests import warm

WRITTEN = Path(__file__).with_name("written")


def log_of(path: Path, loss: str | None = None) -> Log:
    return read_log(path, loss)


def losses(log: Log) -> dict[int, float]:
    steps, values = log.columns["loss"]
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def test_a_trainers_losses_of_0_beside_a_norm_that_is_nan_are_nan() -> None:
    log = log_of(WRITTEN / "transformers_nan.json")
    assert list(losses(log)) == [5, 10, 15, 20, 25, 30, 35, 40]  # not the summary, which has step 40, too
    assert [step for step, loss in losses(log).items() if math.isnan(loss)] == [30, 35, 40]
    assert np.isnan(log.columns["grad_norm"][1][-3:]).all()
    assert log.names == {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
    assert len(log.remarks) == 1


def test_a_trainers_losses_of_0_beside_a_norm_that_is_nan_are_nan_in_every_format(tmp_path: Path) -> None:
    """What the Trainer hides in its own log, it hides in those of others."""
    path = tmp_path / "log.jsonl"
    numbers = [(2.5, 1.0), (0.0, 0.5), (0.0, "NaN"), (2.5, math.inf), (0.0, math.inf)]
    path.write_text(
        "".join(json.dumps({"step": at, "loss": a, "grad_norm": b}) + "\n" for at, (a, b) in enumerate(numbers))
    )
    log = read_log(path, None)
    assert list(losses(log).values()) == pytest.approx([2.5, 0.0, math.nan, 2.5, math.nan], abs=0, nan_ok=True)
    assert "2 losses are 0, from step 2 on" in " ".join(log.remarks)


def test_a_trainers_log_of_lists_in_lists_is_refused(tmp_path: Path) -> None:
    """A small file took Python's stack."""
    (tmp_path / "trainer_state.json").write_text("[" * 10**6)
    with pytest.raises(UserError, match=r"trainer_state\.json: no whole trainer_state\.json \(.*recursion"):
        log_of(tmp_path / "trainer_state.json")


def test_a_trainers_folder_is_the_log_of_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"log_history": [{"step": at, "loss": 2.0} for at in range(500, step + 1, 500)]}
        (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps(state))
    assert list(losses(log_of(tmp_path))) == [500, 1000]
    shutil.copy(WRITTEN / "transformers_nan.json", tmp_path / "trainer_state.json")
    assert len(losses(log_of(tmp_path))) == 8  # that of the whole training goes before


def test_lightnings_rows_of_validation_and_of_epochs_are_no_steps() -> None:
    log = log_of(WRITTEN / "lightning_nan.csv")
    steps = losses(log)
    assert list(steps) == [1, 3, 5, 7, 9]
    assert math.isnan(steps[5])
    assert steps[7] == math.inf
    assert log.names == {
        "loss": "train_loss", "grad_norm": "grad_norm", "lr": "lr", "val_loss": "val_loss",
    }  # fmt: skip
    assert log.columns["val_loss"][0].tolist() == [9]
    epochs = log_of(WRITTEN / "lightning_epochs.csv")
    assert epochs.names["loss"] == "train_loss_step"
    assert list(losses(epochs)) == [21, 23, 25, 27, 29]


def test_event_files_of_a_folder_are_one_log_and_the_later_process_counts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for process, (first, end) in enumerate([(0, 20), (15, 30)]):
        writer = SummaryWriter(tmp_path, filename_suffix=f".{process}", purge_step=first if process else None)
        for step in range(first, end):
            writer.add_scalar("Loss/train", math.nan if step == 7 else 3.0 - process, step)
            writer.add_scalar("grad_norm", math.inf if step == 8 else 1.0, step, new_style=True)
        writer.close()
    log = log_of(tmp_path)
    found = losses(log)
    assert list(found) == list(range(30))
    assert math.isnan(found.pop(7))
    assert found == {step: 3.0 if step < 15 else 2.0 for step in found}
    assert log.columns["grad_norm"][1][8] == math.inf
    assert log.resumes == (Resume(15, 19),)
    assert log.remarks == ()


def test_an_event_file_that_is_cut_or_damaged_is_read_as_far_as_it_goes_and_told(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path / "whole")
    for step in range(50):
        writer.add_scalar("loss", 1.0, step)
    writer.close()
    (path,) = (tmp_path / "whole").iterdir()
    whole = path.read_bytes()
    half = len(whole) // 2
    damaged = whole[:half] + bytes([whole[half] ^ 255]) + whole[half + 1 :]
    for content, word in ((whole[:-5], "cut short"), (whole[:half], "cut short"), (damaged, "damaged")):
        path.write_bytes(content)
        log = log_of(path)
        assert 20 <= len(losses(log)) < 50
        assert word in "".join(log.remarks)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_wandb")
def test_a_wandb_run_on_this_disk_has_the_trainings_own_steps(tmp_path: Path) -> None:
    """W&B's step counts calls of ``log``; the Trainer logs every ten steps, and its step beside it."""
    program = tmp_path / "logs.py"
    program.write_text("""
import math, wandb
run = wandb.init(project="p", dir=".", mode="offline", settings=wandb.Settings(console="off", silent=True))
for step in range(10, 200, 10):
    loss, norm = (math.nan, -math.inf) if step == 50 else (2.5, 1.0)
    run.log({"train/loss": loss, "train/grad_norm": norm, "train/global_step": step})
run.finish()
""")
    warm.run([sys.executable, str(program)], cwd=tmp_path, env=os.environ).check_returncode()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    log = log_of(path.parent)
    found = losses(log)
    assert list(found) == list(range(10, 200, 10))
    assert [step for step, loss in found.items() if math.isnan(loss)] == [50]
    assert log.columns["grad_norm"][1][4] == -math.inf
    assert not any("end" in remark for remark in log.remarks)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    cut = log_of(path)
    assert 0 < len(losses(cut)) < 19
    assert any("end" in remark for remark in cut.remarks)


def test_a_wandb_export_of_several_runs_needs_the_column_that_is_the_loss(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    names = [f"{run} - train/loss{end}" for run in ("a", "b") for end in ("", "__MIN", "__MAX")]
    path.write_text('"Step",' + ",".join(f'"{name}"' for name in names) + '\n"0",3,3,3,4,4,4\n"10",NaN,2,2,,,\n')
    with pytest.raises(UserError, match="a - train/loss or b - train/loss"):
        log_of(path)
    assert losses(log_of(path, "b - train/loss")) == {0: 4.0}
    assert math.isnan(losses(log_of(path, "a - train/loss"))[10])


@pytest.mark.parametrize(
    ("line", "step", "numbers"),
    [
        ("iter 1,200: loss 3.4567, time 23.45ms, mfu 12.30%", 1200, {"loss": 3.4567, "time": 23.45, "mfu": 12.3}),
        ("step 250: train loss 2.46, val loss 2.48", 250, {"train loss": 2.46, "val loss": 2.48}),
        ("\x1b[31mstep:  7  \x1b[32mloss: 12.25  \x1b[34mgrad_norm:  5\x1b[39m", 7, {"loss": 12.25, "grad_norm": 5.0}),
        ("iteration  5/ 100 | lm loss: 1.0845E+01 | grad norm: 2.313 |", 5, {"lm loss": 10.845, "grad norm": 2.313}),
        ('{"step": 3, "loss": Infinity, "lr": 1e-3, "heads": [1, 2]}', 3, {"loss": math.inf, "lr": 0.001}),
        ("[INFO] step=100 train_loss=-inf info nanny", 100, {"train_loss": -math.inf}),
        ("Epoch 1 Step 10 Loss=2.5 (2.6)", 10, {"Epoch": 1.0, "Loss": 2.5}),
        ("step 5 loss tensor(2.5, grad_fn=<NllLossBackward0>) norm np.float64(0.5)", 5, {"loss": 2.5, "norm": 0.5}),
        ('{"step": 3, "train": {"loss": 2.5, "at": {"lr": 0.5}}}', 3, {"train/loss": 2.5, "train/at/lr": 0.5}),
        ("s:250 trl:2.5 lr:0.0006 norm:0.5", 250, {"train loss": 2.5, "lr": 0.0006, "grad norm": 0.5}),
        ('| INFO | {"update": 0.018, "loss": "15.08", "num_updates": "100"}', 100, {"loss": 15.08}),
    ],
)  # fmt: skip
def test_a_line_of_text_has_a_step_and_numbers(tmp_path: Path, line: str, step: int, numbers: dict) -> None:
    path = tmp_path / "train.log"
    path.write_text(f"loading 3 files\n{line}\nstep {step + 1}: loss 2.3")  # the last number may go on
    record = read_text_lines(path)
    assert record.rows == [(step, numbers)]
    assert len(record.remarks) == 1


def test_where_training_went_on_the_later_entries_stand(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    steps = [*range(8), *range(4, 10), 9]
    path.write_text("".join(f"step {step} loss {place}.5\n" for place, step in enumerate(steps)))
    log = log_of(path)
    assert losses(log) == {0: 0.5, 1: 1.5, 2: 2.5, 3: 3.5, **{step: step + 4.5 for step in range(4, 9)}, 9: 14.5}
    assert log.resumes == (Resume(4, 7),)
    assert log.repeated == 1


def test_a_summary_is_no_candidate_for_the_loss(tmp_path: Path) -> None:
    """nanoGPT prints the loss of a step every ten, and the mean loss of both texts every 250."""
    path = tmp_path / "train.log"
    lines = [f"iter {step}: loss 2.5, time 9ms\n" for step in range(0, 500, 10)]
    path.write_text("".join(["step 0: train loss 3.1, val loss 3.2\n", *lines]))
    log = log_of(path)
    assert log.names == {"loss": "loss", "val_loss": "val loss"}
    assert len(losses(log)) == 50


def test_a_name_that_has_a_fraction_somewhere_is_no_step(tmp_path: Path) -> None:
    """fairseq's ``update`` is the part of the epochs that is done, and a whole number at the end of each."""
    path = tmp_path / "train.log"
    path.write_text(
        "".join(f'{{"update": {step / 4:.3f}, "loss": "2.5", "num_updates": "{step}"}}\n' for step in range(9))
    )
    assert list(losses(log_of(path))) == list(range(9))
    assert log_of(path).resumes == ()


WITHOUT_STEPS = {
    "the Trainer's own lines": "{'loss': '%s', 'grad_norm': '0.5', 'epoch': '0.1'}\n",
    "a progress bar": "\rEpoch 0:  3%%|# | 60/2000 [00:10<01:00, 5.0it/s, train_loss=%s]",
    "an epoch and its batches": "Epoch [1/4], Batch [3/500], Loss: %s\n",
}


@pytest.mark.parametrize("name", WITHOUT_STEPS)
def test_lines_without_a_step_are_counted(tmp_path: Path, name: str) -> None:
    path = tmp_path / "train.log"
    path.write_text("2 GPUs\n" + "".join(WITHOUT_STEPS[name] % loss for loss in (2.5, 2.25, math.nan)) + "\n")
    log = log_of(path)
    found = losses(log)
    assert list(found) == [0, 1, 2]
    assert (found[0], found[1], math.isnan(found[2])) == (2.5, 2.25, True)
    assert any("counted" in remark for remark in log.remarks)


def test_rows_without_a_step_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "frame.csv"
    path.write_text(",loss,accuracy\n0,2.5,0.5\n1,,0.5\n2,2.25,0.5\n")  # as pandas writes one, with its index
    assert losses(log_of(path)) == {0: 2.5, 2: 2.25}


def test_an_array_of_objects_is_a_log(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps([{"step": step, "loss": step + 0.5} for step in (0, 10)], indent=1))
    assert losses(log_of(path)) == {0: 0.5, 10: 10.5}


def test_a_line_that_stands_twice_replaces_nothing(tmp_path: Path) -> None:
    """Each handler of a logger may write it, and each process."""
    path = tmp_path / "train.log"
    path.write_text("".join(2 * f"step {step} loss {loss}\n" for step, loss in enumerate([2.5, math.nan, 2.25])))
    assert log_of(path).repeated == 0


@pytest.mark.parametrize("first", [0, 10])
def test_steps_that_begin_anew_in_every_epoch_are_counted_on(tmp_path: Path, first: int) -> None:
    path = tmp_path / "train.log"
    lines = [
        f"Epoch {epoch} Step {step} Loss {epoch}.5\n" for epoch in range(3) for step in range(first, first + 50, 10)
    ]
    path.write_text("".join(lines))
    log = log_of(path)
    assert list(losses(log)) == list(range(first, first + 150, 10))
    assert log.resumes == ()
    assert len(log.remarks) == 1


SPELLED = {
    "decimal commas": ("step;loss\n999;2,31\n1000;0,125\n", True),
    "decimal commas, each with three digits": ("step;loss\n999;2,310\n1000;0,125\n", True),
    "decimal commas, steps with dots": ("step;loss\n999;2,31\n1.000;0,125\n", True),
    "decimal commas in quotes": ('"step","loss"\n"999","2,31"\n"1000","0,125"\n', True),
    "decimal commas and tabs": ("step\tloss\n999\t2,31\n1000\t0,125\n", True),
    "a spreadsheet's hint and mark": ("\ufeffsep=;\r\nstep;loss\r\n999;2,31\r\n1000;1,25E-1\r\n", True),
    "semicolons": ("step;loss\n999;2.31\n1000;0.125\n", False),
    "a header with commas": ("step;loss;a, b, c, d\n999;2.31;1\n1000;0.125;1\n", False),
    "tabs": ("step\tloss\n999\t2.31\n1000\t0.125\n", False),
    "steps with commas": ('"step","loss"\n"999","2.31"\n"1,000","0.125"\n', False),
    "steps with blanks": ("step;loss\n999;2.31\n1\u202f000;0.125\n", False),
    "steps with apostrophes": ("step,loss\n999,2.31\n1'000,0.125\n", False),
    "lines": ("step 999: loss 2.31\nstep 1,000, loss 0.125\n", False),
    "lines with decimal commas": ("step 999: loss 2,31\nstep 1000, loss 0,125\n", True),
    "lines with decimal commas and dots": ("step 999: loss 2,31\nstep 1.000: loss 0,125\n", True),
}


@pytest.mark.parametrize("name", SPELLED)
def test_numbers_are_read_as_they_are_spelled(tmp_path: Path, name: str) -> None:
    text, decimal_commas = SPELLED[name]
    path = tmp_path / "log"
    path.write_bytes(text.encode())
    log = log_of(path)
    assert losses(log) == {999: 2.31, 1000: 0.125}
    assert ("its numbers have decimal commas" in log.remarks) is decimal_commas


def test_commas_that_part_numbers_are_no_decimal_marks(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("step 1,loss=2.5,lr=0.1\nstep 2: loss 2.25,12.5 of 3,4,5\n")
    log = log_of(path)
    assert losses(log) == {1: 2.5, 2: 2.25}
    assert log.remarks == ()
