"""A watched loop on a GPU: a step that is not observed never waits for it, and what is recorded is what was there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flashpoint.watching.latest_batches import sums
from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair, loop

pytestmark = pytest.mark.gpu
INTERVAL, STEPS = 5, 32
WARM = 3 * INTERVAL
"""Steps in which kernels are loaded and memory is allocated, which may wait."""
CYCLES = 1 << 28
"""For which the GPU is kept busy: more than 0.1 s, and a step of the watch takes some milliseconds."""


def test_a_step_that_is_not_observed_does_not_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    batches = [torch.randn(3, 12, 32, device="cuda") for _ in range(STEPS)]
    losses: list[Tensor] = []

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(batches[number]).square().mean()
        loss.backward()
        losses.append(loss.detach().clone())
        if number < WARM:
            watched.step(loss, batches[number], doubled=2 * loss)  # type: ignore[arg-type]
            return
        if number == WARM:
            capsys.readouterr()  # what the first steps tell
        doubled = 2 * loss
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        asleep = torch.cuda.current_stream().record_event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            watched.step(loss, batches[number], doubled=doubled)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not asleep.query(), f"step {number} waited"

    options = {"log_interval": INTERVAL, "weights_interval": INTERVAL, "interval": 1000}
    run = loop(tmp_path, Pair().cuda(), step, steps=STEPS, **options)
    assert capsys.readouterr().err == ""  # where a wait is refused, a line says so
    read = [float(loss) for loss in losses]
    assert run.columns["loss"][1].tolist() == read
    assert run.columns["doubled"][1].tolist() == [2 * loss for loss in read]
    due = list(range(INTERVAL - 1, STEPS, INTERVAL))
    assert all(run.columns[name][0].tolist() == due for name in ("grad_norm", "w_q_spectral_norm", "w_k_spectral_norm"))
    rows = (tmp_path / "own/batches.csv").read_text().splitlines()
    assert rows == [f"{number},{sums(batch.cpu()).fingerprint():016x}" for number, batch in enumerate(batches)]


def test_a_loss_that_is_no_number_is_judged_when_it_is_read_and_its_batch_is_kept(tmp_path: Path) -> None:
    batches: list[Tensor] = []
    verdicts: list[str] = []

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        batches.append(torch.randn(3, 12, 32, device="cuda"))
        loss = model(batches[-1]).square().mean()
        loss.backward()
        watched.step(loss * float("nan") if number >= 2 * INTERVAL else loss, batches[-1])
        verdicts.append(watched.verdict)

    run = loop(tmp_path, Pair().cuda(), step, steps=STEPS, log_interval=INTERVAL, interval=1000)
    assert run.verdict == f"nonfinite at {2 * INTERVAL}"
    assert verdicts.index("nonfinite") >= 2 * INTERVAL
    kept = torch.load(tmp_path / f"own/captures/step-{2 * INTERVAL:07}/batch.pt")
    assert torch.equal(kept, batches[2 * INTERVAL].cpu())
