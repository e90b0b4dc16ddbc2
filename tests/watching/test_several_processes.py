"""Loops of several processes: the first one watches, and asks the others for nothing."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from flashpoint.cli.run_words import open_run
from flashpoint.watching.left_out import is_sharded
from flashpoint.watching.loop import Watch
from tests import releases, warm
from tests.conftest import environment
from tests.watching import sharded_loop
from tests.watching.loops import Pair, loop


def two_processes(folder: Path, *arguments: str) -> str:
    """What the first of them tells. They know their places without a variable, as those of ``mp.spawn``."""
    variables = {name: value for name, value in environment().items() if name != "RANK"}
    processes = [
        warm.Process([sys.executable, sharded_loop.__file__, rank, *arguments], cwd=folder, env=variables)
        for rank in "01"
    ]
    try:
        told = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
    assert [process.returncode for process in processes] == [0, 0], told
    return told[0]


@releases.shards_on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("how", ["fully_shard", "fully_shard of parts"])
def test_a_sharded_model_is_watched_by_the_first_process_alone(tmp_path: Path, how: str) -> None:
    told = two_processes(tmp_path, str(tmp_path / "store"), how)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["own"]
    run = open_run("own", tmp_path / "runs")
    assert run.verdict == "stable to 4"
    assert run.columns["loss"][0].tolist() == [0, 1, 2, 3]
    assert run.columns["grad_norm"][0].tolist() == [2, 3]  # which the loop handed over
    assert run.columns["row_sum_relative_bias"][0].tolist() == [0, 1, 3]
    assert told.count("the norm of sharded gradients is not measured") == 1
    assert told.count("weights are sharded: norms of W_Q and W_K are not logged") == 1
    assert "failed" not in told


def test_the_older_wrapper_shards_too() -> None:
    class Wrapped(FullyShardedDataParallel):
        """Without what its own beginning asks for: an accelerator."""

        def __init__(self) -> None:
            nn.Module.__init__(self)

    assert is_sharded(nn.Sequential(Pair(), Wrapped()))
    assert not is_sharded(nn.Sequential(Pair()))


class Alone(TorchDispatchMode):
    """Refuses whatever the other process would have to take part in."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # what it does with its parts comes here again
            return NotImplemented
        assert func.namespace not in ("c10d", "_c10d_functional"), f"{func} waits for the other process"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """This process and another one that is made up: nobody waits for it."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grad_norm", "aux"])
@pytest.mark.parametrize(("placement", "taken"), [(Replicate(), True), (Partial(), False), (Shard(0), False)])
def test_a_number_that_every_process_holds_is_read_and_a_part_of_one_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mesh: DeviceMesh,
    name: str,
    placement: Placement,
    taken: bool,
) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        loss.backward()
        part = torch.full((1,) if placement.is_shard() else (), 2.0 + number)
        given = DTensor.from_local(part, mesh, [placement], shape=torch.Size(part.shape), stride=part.stride())
        with Alone():
            watched.step(loss, **{name: given})  # type: ignore[arg-type]

    run = loop(tmp_path, step=step)
    assert run.columns["loss"][0].tolist() == [0, 1, 2, 3]
    told = capsys.readouterr().err
    assert told.count(f"{name} is a DTensor, of which each process holds a part: give {name}.full_tensor()") == (
        0 if taken else 1
    )
    if taken:
        assert run.columns[name][1].ravel().tolist() == [2.0, 3.0, 4.0, 5.0]
    else:
        assert name not in run.columns


@pytest.mark.slow
def test_an_attention_and_a_batch_that_are_shared_ask_the_other_process_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mesh: DeviceMesh
) -> None:
    class Shared(Pair):
        def forward(self, x: Tensor) -> Tensor:
            q = DTensor.from_local(self.first.out(x).unflatten(-1, (4, 8)).transpose(1, 2), mesh, [Shard(0)])
            with sdpa_kernel(SDPBackend.MATH):  # DTensors have no other one on a CPU
                return super().forward(x) + F.scaled_dot_product_attention(q, q, q).to_local().mean()

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        with Alone():
            watched.capture()
            loss = model(x).square().mean()
            loss.backward()
            watched.step(loss, DTensor.from_local(x, mesh, [Shard(1)]))
        batches.append(x)

    batches: list[Tensor] = []
    run = loop(tmp_path, Shared(), step)
    told = capsys.readouterr().err
    assert told.count("DTensors, of which each process holds a part") == 1
    assert "failed" not in told
    assert run.shape.n_layer == 2
    kept = torch.load(tmp_path / "own/captures/step-0000000/batch.pt")
    assert torch.equal(kept, batches[0])
    loop(tmp_path / "whole", step=lambda model, number, watched: plain_with(model, batches[number], watched))
    assert (tmp_path / "own/batches.csv").read_text() == (tmp_path / "whole/own/batches.csv").read_text()


def masked(q: Tensor, k: Tensor, v: Tensor, attn_mask: DTensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask.to_local())


@pytest.mark.slow
def test_a_mask_that_is_shared_is_not_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mesh: DeviceMesh
) -> None:
    mask = DTensor.from_local(torch.ones(12, 12, dtype=torch.bool), mesh, [Partial()])

    class Shared(Pair):
        def forward(self, x: Tensor) -> Tensor:
            q = self.first.out(x).unflatten(-1, (4, 8)).transpose(1, 2)
            return super().forward(x) + masked(q, q, q, attn_mask=mask).mean()

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        with Alone():
            plain_with(model, torch.randn(3, 12, 32), watched)

    run = loop(tmp_path, Shared(), step, functions=[f"{__name__}:masked"])
    assert f"{__name__}:masked: tensors are DTensors" in capsys.readouterr().err
    assert len(run.manifest.not_recorded) == 1


def plain_with(model: nn.Module, x: Tensor, watched: Watch) -> None:
    loss = model(x).square().mean()
    loss.backward()
    watched.step(loss, x)
