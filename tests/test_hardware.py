"""The preset that is chosen before PyTorch is imported, and the device that PyTorch has then."""

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashpoint import hardware
from flashpoint.errors import UserError
from tests import warm
from tests.conftest import REPOSITORY, environment

TRAIN = f"""
import ctypes, runpy
from tests.test_hardware import Driver
ctypes.CDLL = lambda _: Driver()
runpy.run_path("{REPOSITORY / "train.py"}", run_name="__main__")
"""


class Driver:
    """CUDA's, with two devices."""

    def cuInit(self, _flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, _device: Any) -> int:
        size._obj.value = 8 << 30
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())


@pytest.mark.usefixtures("driver")
def test_the_preset_follows_the_driver_and_the_wish_for_a_cpu() -> None:
    assert hardware.cuda_devices() == 2
    assert [hardware.default_experiment(device) for device in ("auto", "cuda", "cpu")] == ["ignite", "ignite", "laptop"]


@pytest.mark.usefixtures("driver")
def test_a_gpu_that_pytorch_cannot_use_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES= before the command"):
        hardware.refuse_unusable_gpu("auto")
    hardware.refuse_unusable_gpu("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    hardware.refuse_unusable_gpu("auto")


def test_without_a_driver_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert hardware.default_experiment("auto") == "laptop"
    hardware.refuse_unusable_gpu("auto")


def train(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """``train.py`` beside a driver with two devices and a PyTorch without any."""
    (folder / "beside_a_driver.py").write_text(TRAIN)
    return warm.run([sys.executable, "beside_a_driver.py", *arguments], cwd=folder, env=environment())


@pytest.mark.slow
def test_train_takes_the_laptop_preset_for_a_cpu_and_refuses_to_fall_back_to_it(tmp_path: Path) -> None:
    laptops_text = "max_bytes: 8000000"
    assert laptops_text not in train(tmp_path, "-c", "job").stdout
    assert laptops_text in train(tmp_path, "train.device=cpu", "-c", "job").stdout
    result = train(tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: the driver shows a GPU")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
