"""What a run is said to need: a lower bound of what was measured, and exact where it can be."""

import dataclasses
import math
import shutil
import types

import pytest
import torch

from flashpoint.errors import UserError
from flashpoint.lab.config import OptimizerConfig
from flashpoint.lab.model import GPT
from flashpoint.lab.training import admission
from flashpoint.lab.training.parallel import Ranks
from flashpoint.lab.training.run_size import RunSize, total
from flashpoint.lab.training.step import OptimizerStep
from tests.composed import configured

GIB = 2**30
H200, CARD_OF_8_GIB = 139.8 * GIB, 7.6 * GIB  # as the driver tells them
# Configuration, and the largest memory_gib that runs of it on an H200 recorded (runs/reference).
MEASURED = {
    ("experiment=ignite",): 6.30664,
    ("experiment=ignite", "model.context=1024", "train.batch_size=16"): 3.76562,
    ("experiment=ignite", "model.context=512", "train.batch_size=64", "probes.sequences=4"): 6.56640625,
    ("experiment=gpt2_124m", "train.batch_size=32", "train.steps=600"): 23.599609375,
    ("experiment=gpt2_124m", "train.batch_size=64", "probes.sequences=4"): 59.4199,
}


@pytest.mark.parametrize("overrides", MEASURED, ids=" ".join)
def test_what_a_gpu_run_needs_is_below_what_it_took(overrides: tuple[str, ...]) -> None:
    needed = total(RunSize.of_config(configured(*overrides), "cuda").memory("cuda")) / GIB
    assert 0.25 * MEASURED[overrides] < needed < MEASURED[overrides]


def test_the_presets_fit_the_machines_they_are_for() -> None:
    laptop, ignite, gpt2 = (configured(f"experiment={name}") for name in ("laptop", "ignite", "gpt2_124m"))
    assert total(RunSize.of_config(laptop, "cpu").memory("cpu")) < GIB / 2
    assert total(RunSize.of_config(ignite, "cuda").memory("cuda")) < CARD_OF_8_GIB
    assert total(RunSize.of_config(gpt2, "cuda").memory("cuda")) < H200
    assert total(RunSize.of_config(gpt2, "cuda").host_memory()) < 4 * GIB
    assert all(total(RunSize.of_config(config, "cpu").disk()) < 40 * GIB for config in (laptop, ignite, gpt2))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("n_kv_head", "other"), [(1, "qk_norm=true"), (3, "qk_norm=false"), (1, "shift_keys=running")])
def test_parameters_and_what_a_checkpoint_holds_are_counted_exactly(family: str, n_kv_head: int, other: str) -> None:
    if family == "llama" and "shift" in other:
        return  # refused
    shape = ("model.n_layer=3", "model.d_model=96", "model.n_head=3", "model.context=40")
    layers = (f"model.family={family}", f"model.n_kv_head={n_kv_head}", f"model.{other}")
    config = configured("experiment=laptop", "probes.attention=[]", *shape, *layers)
    model = GPT(config.model, config.attn, 0)
    for optimizer in (OptimizerConfig(), OptimizerConfig(name="muon")):
        config = dataclasses.replace(config, optimizer=optimizer)
        needed = RunSize.of_config(config, "cpu")
        assert needed.parameters == sum(parameter.numel() for parameter in model.parameters())
        forms = OptimizerStep(model, config, torch.device("cpu"), Ranks()).forms().values()
        sizes = [math.prod(form.shape) * (8 if form.dtype == torch.int64 else 4) for form in forms]
        assert needed.state_bytes == sum(sizes)


@pytest.mark.parametrize(("free", "told", "key", "value"), [
    (GIB // 64, "give checkpoints.interval=0 for none", "interval", 0),
    (2 * GIB, "lower checkpoints.budget_gib=4.0 to 1 or less", "budget_gib", 1),
])  # fmt: skip
def test_a_budget_that_is_told_is_one_that_is_taken(
    free: int, told: str, key: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to be lowered to 0 or less, which was refused for three checkpoints."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))
    config = configured("experiment=laptop", "model.d_model=256", "checkpoints.interval=1")
    with pytest.raises(UserError, match=rf"for checkpoints: {told}$"):
        admission.admit(config)
    admission.admit(dataclasses.replace(config, checkpoints=dataclasses.replace(config.checkpoints, **{key: value})))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.batch_size=1048576", "train.micro_batch_size"),
        ("train.batch_size=1099511627776", "train.batch_size"),
        ("model.n_layer=1000000", "model.n_layer"),
        ("model.context=1048576", "model.context"),
        ("train.log_interval=99999999999", "train.log_interval"),
        ("train.steps=99999999999999", "train.steps"),
    ],
)
def test_a_run_that_is_refused_for_its_size_fits_with_the_value_that_is_told(
    override: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = 50 * GIB if key == "train.steps" else 2**80
    monkeypatch.setattr(admission, "memory", lambda: 8 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=disk))
    config = configured("experiment=laptop", "checkpoints.interval=0", "probes.attention_interval=0", override)
    with pytest.raises(UserError, match=rf"needs at least .+ GiB of .+: lower {key}=[\d,]+ to [\d,]+ or less") as error:
        admission.admit(config)
    most = int(str(error.value).split(" to ")[-1].split(" or ")[0].replace(",", ""))
    section, name = key.split(".")
    lowered = {name: 1 << (most.bit_length() - 1) if name == "micro_batch_size" else most}  # a divisor of the batch
    if name == "batch_size":
        lowered["micro_batch_size"] = 1
    admission.admit(dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **lowered)}))


def test_a_branch_needs_disk_for_what_it_writes_itself() -> None:
    """It was refused for the snapshots and checkpoints of the steps before it, too."""
    every = ("experiment=laptop", "checkpoints.interval=10", "checkpoints.weights_interval=5", "train.steps=1005")
    branch = dataclasses.replace(configured(*every), replay="original", from_step=998)
    needed = RunSize.of_config(branch, "cpu")
    assert needed.disk()["snapshots of the weights"] == 2 * 4 * needed.parameters  # after 1,000 and 1,005 steps
    assert needed.disk()["checkpoints"] == needed.checkpoint_bytes  # after 1,000 steps
    whole = RunSize.of_config(configured(*every), "cpu")
    assert needed.disk()["the tape"] == whole.disk()["the tape"]  # that of the steps before is copied
