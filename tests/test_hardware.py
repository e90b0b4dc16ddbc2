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
from flashpoint.numerics import launch
from tests import warm
from tests.composed import composed_hardware
from tests.conftest import REPOSITORY, Command, environment

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

    def cuDeviceGetName(self, name: Any, _length: int, device: Any) -> int:
        name.value = (b"NVIDIA H200", b"NVIDIA A100-SXM4-80GB")[device.value]
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
    devices = ("auto", "cuda", "cpu")
    assert [hardware.default_experiment(device) for device in devices] == ["demo_gpu", "demo_gpu", "demo_cpu"]


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
    assert hardware.default_experiment("auto") == "demo_cpu"
    hardware.refuse_unusable_gpu("auto")


@pytest.mark.usefixtures("driver")
def test_the_driver_names_its_devices() -> None:
    assert hardware.cuda_device_names() == ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]


@pytest.mark.slow
def test_each_option_is_one_kind_of_gpu() -> None:
    gpus = {
        "a100": "NVIDIA A100-SXM4-80GB",
        "b200": "NVIDIA B200",
        "h100": "NVIDIA H100 80GB HBM3",
        "h200": "NVIDIA H200",
        "l40s": "NVIDIA L40S",
        "rtx4090": "NVIDIA GeForce RTX 4090",
    }
    options = {path.stem for path in (REPOSITORY / "configs/hardware").glob("*.yaml")}
    assert options == {*gpus, "any"}
    assert set(composed_hardware().values()) == {None}
    for option, name in gpus.items():
        wanted = composed_hardware(f"hardware={option}")
        assert [gpu for gpu in gpus.values() if hardware.is_named(gpu, wanted["gpu"])] == [name]
        assert wanted["gres"] == f"gpu:{option}:1"


@pytest.mark.slow
def test_a_machine_without_the_gpu_that_is_wanted_says_so_in_one_line(train: Command) -> None:
    result = train("hardware=h200", "hardware.partition=long")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: hardware.gpu=H200: here is no GPU; leave hardware out")


@pytest.mark.parametrize(
    ("capability", "chip", "pairs"), [((8, 6), "sm_86", False), ((9, 0), "sm_90", True), ((12, 0), "sm_120", True)]
)
def test_kernels_are_for_the_chip_of_the_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], chip: str, pairs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    hardware.chip_of.cache_clear()
    assert hardware.chip_of(torch.device("cuda")) == chip
    hardware.chip_of.cache_clear()
    assert (hardware.capability(chip) >= launch.PAIRS_FROM) == pairs


def test_other_chips_have_no_compute_capability() -> None:
    assert hardware.chip_of(torch.device("cpu")) is None
    assert [hardware.capability(chip) for chip in ("gfx942", None)] == [0, 0]


def train_beside_a_driver(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """``train.py`` beside a driver with two devices and a PyTorch without any."""
    (folder / "beside_a_driver.py").write_text(TRAIN)
    return warm.run([sys.executable, "beside_a_driver.py", *arguments], cwd=folder, env=environment())


@pytest.mark.slow
def test_train_takes_the_laptop_preset_for_a_cpu_and_refuses_to_fall_back_to_it(tmp_path: Path) -> None:
    laptops_text = "max_bytes: 8000000"
    assert laptops_text not in train_beside_a_driver(tmp_path, "-c", "job").stdout
    assert laptops_text in train_beside_a_driver(tmp_path, "train.device=cpu", "-c", "job").stdout
    result = train_beside_a_driver(tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: the driver shows a GPU")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("given", "seen"), [(None, ["0", "1"]), ("3,GPU-5,7", ["3", "GPU-5"]), (" 3, 5", ["3", "5"]), ("", [""])]
)
def test_a_gpu_is_named_as_the_caller_sees_it(
    monkeypatch: pytest.MonkeyPatch, given: str | None, seen: list[str]
) -> None:
    """Without a GPU to see, a process that is given one's name would compute on it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert hardware.visible_gpus(2) == seen
