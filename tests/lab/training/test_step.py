"""What a step says it did is what it did."""

import dataclasses
import functools
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from flashpoint.lab.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from flashpoint.lab.model import GPT
from flashpoint.lab.probes.observation import launch_kernels
from flashpoint.lab.training import step as step_module
from flashpoint.lab.training.parallel import Ranks
from flashpoint.lab.training.step import OptimizerStep
from flashpoint.numerics.variant import AttentionVariant

MODEL = ModelConfig(n_layer=1, n_head=1, d_model=16, context=8, vocab_size=300)


def test_loss_gradient_norm_and_update_norm() -> None:
    train = TrainConfig(batch_size=4, micro_batch_size=2, grad_clip=0.5)
    config = Config(model=MODEL, data=DataConfig(vocab_size=300), train=train)
    model = GPT(MODEL, AttentionVariant(), 0)
    step = OptimizerStep(model, config, torch.device("cpu"), Ranks())
    batch = torch.randint(0, 300, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    before = [parameter.detach().double().numpy().copy() for parameter in model.parameters()]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [model(part[:, :-1], part[:, 1:], step.seed_and_step).item() for part in batch]
    step(batch, 1e-2)
    loss, grad_norm, update_norm = step.result.tolist()
    moved = [
        parameter.detach().double().numpy() - old for parameter, old in zip(model.parameters(), before, strict=True)
    ]
    assert loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert update_norm == pytest.approx(np.sqrt(sum((part**2).sum() for part in moved)), rel=1e-4)
    clipped = [parameter.grad.double().norm().item() for parameter in model.parameters() if parameter.grad is not None]
    assert grad_norm > 0.5
    assert np.sqrt(np.square(clipped).sum()) == pytest.approx(0.5, rel=1e-4)


def test_the_shift_of_the_keys_is_their_running_mean_and_knows_training_alone() -> None:
    """Against means of W_K x in FP64: 0.9 of the one before, 0.1 of a step's, over all of its micro-batches."""
    shape = dataclasses.replace(MODEL, n_layer=2, n_head=2, n_kv_head=1, d_model=32, shift_keys="running")
    config = Config(
        model=shape, data=DataConfig(vocab_size=300), train=TrainConfig(batch_size=4, micro_batch_size=2, lr=1e-2)
    )
    model = GPT(shape, AttentionVariant(kernel="sdpa"), 0)
    step = OptimizerStep(model, config, torch.device("cpu"), Ranks())
    batches = torch.randint(0, 300, (3, 2, 2, 9), generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(2, 16, dtype=torch.float64)
    for batch in batches:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):  # as a validation or a probe does
            model(batch[0][:, 1:], batch[0][:, :-1], step.seed_and_step)
        for layer, block in enumerate(model.blocks):
            w_k = block.attention.weights[1][0].detach().double()
            inputs = list[Tensor]()
            with (
                block.attention_norm.register_forward_hook(lambda _module, _inputs, x, inputs=inputs: inputs.append(x)),
                torch.no_grad(),
                torch.autocast("cpu", dtype=torch.bfloat16),
            ):
                for part in batch:
                    model(part[:, :-1], part[:, 1:], step.seed_and_step)
            keys = torch.cat(inputs).double() @ w_k.T
            expected[layer] = 0.9 * expected[layer] + 0.1 * keys.mean((0, 1))
        step(batch, 1e-2)
        for layer in range(2):
            kept = step.state()[f"model/blocks.{layer}.attention.qkv.key_mean"]
            assert (kept - expected[layer]).abs().max() < 1e-5 * expected[layer].abs().max()
    ends = step.checksum()
    step.restart(0)
    for batch in batches:
        step(batch, 1e-2)  # and no validation
    assert step.checksum() == ends
    assert {name: tuple(form.shape) for name, form in step.forms().items()} == {
        name: tuple(tensor.shape) for name, tensor in step.state().items()
    }


def first_step(optimizer: OptimizerConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of a first step, and what it added to the weights in units of the learning rate, both in FP64."""
    model_config = dataclasses.replace(MODEL, d_model=32)
    train = TrainConfig(batch_size=4, grad_clip=0, weight_decay=0.5)
    config = Config(model=model_config, data=DataConfig(vocab_size=300), train=train, optimizer=optimizer)
    model = GPT(model_config, AttentionVariant(), 0)
    step = OptimizerStep(model, config, torch.device("cpu"), Ranks())
    before = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    step(torch.randint(0, 300, (1, 4, 9), generator=torch.Generator().manual_seed(0)), 1e-2)
    gradients, added = {}, {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.double()
        added[name] = (parameter.detach().double() - before[name]) / 1e-2
        if parameter.dim() > 1:
            added[name] += 0.5 * before[name]  # the decay
    return gradients, added


def test_muon_moves_each_matrix_of_the_layers_along_the_orthogonal_part_of_its_gradient() -> None:
    """With a gradient U S Vᵀ by −0.2 √(rows or columns) U S' Vᵀ, S' near 1: Newton–Schulz in BF16 has 0.7 to 1.2."""
    gradients, added = first_step(OptimizerConfig(name="muon"))
    qkv = "blocks.0.attention.qkv.weight"
    matrices = {name: (gradients[name], added[name]) for name in added if name.startswith("blocks.") and name != qkv}
    matrices = {name: pair for name, pair in matrices.items() if pair[0].dim() > 1}
    for number, pair in enumerate(zip(gradients[qkv].chunk(3), added[qkv].chunk(3), strict=True)):
        matrices[f"{qkv} {number}"] = pair
    assert len(matrices) == 6
    for name, (gradient, moved) in matrices.items():
        left, sizes, right = torch.linalg.svd(gradient, full_matrices=False)
        large = int((sizes > 0.05 * sizes[0]).sum())  # smaller ones are not yet near 1
        turned = left.T @ moved @ right.T / (-0.2 * max(moved.shape) ** 0.5)
        assert ((turned.diagonal()[:large] > 0.6) & (turned.diagonal()[:large] < 1.3)).all(), name
        assert (turned - turned.diagonal().diag()).norm() < 0.2 * turned.norm(), name


def test_muons_steps_are_those_of_pytorchs_at_each_rate() -> None:
    """The rate lies on the device, and PyTorch's Muon takes one of the host's."""
    train = TrainConfig(batch_size=4, weight_decay=0.5)
    config = Config(
        model=MODEL, data=DataConfig(vocab_size=300), train=train, optimizer=OptimizerConfig(name="muon", momentum=0.8)
    )
    model = GPT(MODEL, AttentionVariant(), 0)
    step = OptimizerStep(model, config, torch.device("cpu"), Ranks())
    weights = [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith(("projection.weight", "expand.weight"))
    ]
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    muon = torch.optim.Muon(copies, weight_decay=0.5, momentum=0.8, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(0)
    for rate in (1e-2, 3e-2, 0.0, 2e-2):
        step(torch.randint(0, 300, (1, 4, 9), generator=generator), rate)
        for weight, copy in zip(weights, copies, strict=True):
            assert weight.grad is not None
            copy.grad = weight.grad.clone()
        muon.param_groups[0]["lr"] = rate
        muon.step()
        for weight, copy in zip(weights, copies, strict=True):
            assert (weight - copy).abs().max() < 1e-6 * copy.abs().max()
    assert len(weights) == 3


def test_beside_muon_embeddings_and_gains_are_adamws() -> None:
    (_, with_muon), (_, with_adamw) = first_step(OptimizerConfig(name="muon")), first_step(OptimizerConfig())
    others = [name for name, moved in with_muon.items() if not name.startswith("blocks.") or moved.dim() == 1]
    assert len(others) == 5
    assert all(torch.equal(with_muon[name], with_adamw[name]) for name in others)


def test_modules_are_called_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """While PyTorch's compiler traces a pattern, it takes calls of modules in every thread for those of the pattern."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(step_module, "kernels_for", lambda *_, **__: True)  # as on a GPU
    config = Config(model=MODEL, data=DataConfig(vocab_size=300), train=TrainConfig(batch_size=2, compile=True))
    step = OptimizerStep(GPT(MODEL, AttentionVariant(), 0), config, torch.device("cpu"), Ranks())
    threads = set()
    with register_module_forward_pre_hook(lambda *_: threads.add(threading.current_thread())):
        step.warm_up()
    assert threads == {threading.main_thread()}


def test_kernels_are_compiled_while_pytorchs_compiler_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, met = threading.Event(), list[bool]()

    def compiled(model: GPT, *_: object) -> GPT:
        met.append(begun.wait(60))
        return model

    monkeypatch.setattr(OptimizerStep, "_compile_kernels", lambda *_: begun.set())
    monkeypatch.setattr(step_module, "_compiled", compiled)
    config = Config(model=MODEL, data=DataConfig(vocab_size=300), train=TrainConfig(batch_size=2, compile=True))
    OptimizerStep(GPT(MODEL, AttentionVariant(), 0), config, torch.device("cpu"), Ranks()).warm_up()
    assert met == [True]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_warming_up_changes_nothing(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(step_module, "kernels_for", lambda *_, **__: True)
    launched = list[AttentionVariant]()

    def launches(variant: AttentionVariant, like: Tensor, seed_and_step: Tensor) -> None:
        launch_kernels(variant, like, seed_and_step)
        launched.append(variant)

    monkeypatch.setattr(step_module, "launch_kernels", launches)
    config = Config(model=MODEL, data=DataConfig(vocab_size=300), train=TrainConfig(batch_size=2, compile=True))
    batch = torch.randint(0, 300, (1, 2, 9), generator=torch.Generator().manual_seed(0))
    results = []
    for warm in (False, True):
        step = OptimizerStep(GPT(MODEL, AttentionVariant(), 0), config, torch.device("cpu"), Ranks())
        if warm:
            step.warm_up()
        step(batch, 1e-2)
        results.append([step.result.clone(), *(tensor.clone() for tensor in step.state().values())])
    assert all(torch.equal(cold, warmed) for cold, warmed in zip(*results, strict=True))
    assert launched == [AttentionVariant()]
