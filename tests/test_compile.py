"""torch.compile takes the whole model as one graph, for every kind of variant."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import yaml
from torch._dynamo.utils import counters

import flashpoint
from flashpoint.drop_in import variant_of
from flashpoint.lab.config import Config, DataConfig, ModelConfig, TrainConfig
from flashpoint.lab.model import GPT
from flashpoint.lab.training.parallel import Ranks
from flashpoint.lab.training.step import OptimizerStep
from flashpoint.numerics import shared_graphs
from flashpoint.numerics.layout import constant_where_traced
from flashpoint.numerics.variant import AttentionVariant
from tests.conftest import REPOSITORY

CONFIG = ModelConfig(n_layer=2, n_head=2, d_model=32, context=24, vocab_size=31)
SELECTED = AttentionVariant(name="selected", center_keys=True, layers=(2,), heads=(1,), elsewhere=AttentionVariant())


NAMES = ("flash_bf16", "flash_centered", "flash_delta_pdp", "flash_exact_rowsum", "flash_independent_delta")
NAMES += ("flash_stochastic", "released_fixed", "sdpa", "standard")
VARIANTS = [
    AttentionVariant.from_dict(yaml.safe_load((REPOSITORY / f"configs/attn/{name}.yaml").read_text())) for name in NAMES
]
"""What an op returns and saves differs between these: another O for δ, centred keys, no op at all."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*VARIANTS, SELECTED], ids=lambda variant: variant.name)
def test_compiled_losses_and_gradients_equal_eager_ones(variant: AttentionVariant) -> None:
    config = CONFIG if variant is SELECTED else dataclasses.replace(CONFIG, n_layer=1)
    torch.compiler.reset()
    tokens = torch.randint(0, 31, (2, 24), generator=torch.Generator().manual_seed(0))
    seed_and_step = torch.tensor([1, 2])
    results = []
    for compiled in (False, True):
        model = GPT(config, variant, 0, z_loss=1e-4 if variant.name == "sdpa" else 0.0)
        forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(tokens, tokens.flip(1), seed_and_step)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for eager, compiled_one in zip(*results, strict=True):
        assert torch.equal(eager, compiled_one)


IN_TURN: list[tuple[str, dict[str, object]]] = [
    ("flash_bf16", {}),
    ("flash_exact_rowsum", {}),
    ("flash_bf16", {"layers": (2,), "heads": (1,), "elsewhere": variant_of("flash_exact_rowsum")}),
    ("flash_fixed", {}),
    ("flash_bf16", {"delta": "out_fp32"}),
    ("flash_bf16", {"shift_keys": "sequence"}),
    ("sdpa", {}),
]
"""The fourth saves an int8, the first three nothing. The fifth saves a float32, the sixth has operations in front, the
last calls PyTorch: graphs of their own."""


@pytest.fixture
def deterministic() -> Iterator[None]:
    """On CUDA gradients are summed in another order each time without it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "name_of_device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_runs_of_one_process_share_a_graph_and_compute_what_is_uncompiled(
    monkeypatch: pytest.MonkeyPatch, name_of_device: str
) -> None:
    device = torch.device(name_of_device)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    stats = counters["stats"]
    compiled, steps = list[int](), list[tuple[OptimizerStep, tuple[int, list[float]]]]()
    for name, changes in IN_TURN:
        variant = dataclasses.replace(variant_of(name), **changes)  # type: ignore[arg-type]
        results = []
        for compiles in (False, True):
            train = TrainConfig(batch_size=2, compile=compiles)
            model = dataclasses.replace(CONFIG, vocab_size=257)
            config = Config(model=model, attn=variant, train=train, data=DataConfig(vocab_size=257))
            before = stats["unique_graphs"]
            step = OptimizerStep(GPT(model, variant, 0).to(device), config, device, Ranks())
            step.warm_up()
            if compiles:
                compiled.append(stats["unique_graphs"] - before)
            tokens = torch.randint(0, 31, (1, 2, 25), generator=torch.Generator().manual_seed(0))
            step(tokens, 1e-2)
            step(tokens, 1e-2)
            results.append((int(step.checksum()), step.result.tolist()))
        assert results[0] == results[1], name
        steps.append((step, results[1]))
    assert compiled == [1, 0, 0, 0, 1, 1, 1]
    for step, expected in (steps[0], steps[-1], steps[1], steps[3]):  # others have been called since
        step.restart(0)
        step(tokens, 1e-2)
        step(tokens, 1e-2)
        assert (int(step.checksum()), step.result.tolist()) == expected


@pytest.mark.slow
def test_a_compiled_step_shifts_keys_by_the_running_mean_of_the_uncompiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models share the graph, each with means of its own."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    shape = dataclasses.replace(CONFIG, vocab_size=257, shift_keys="running")
    results: dict[bool, list[tuple[int, list[float]]]] = {False: [], True: []}
    for compiles, seed in itertools.product((False, True), (0, 1)):
        train = TrainConfig(batch_size=4, micro_batch_size=2, compile=compiles)
        config = Config(model=shape, attn=AttentionVariant(), train=train, data=DataConfig(vocab_size=257))
        step = OptimizerStep(GPT(shape, config.attn, seed), config, torch.device("cpu"), Ranks())
        before = counters["stats"]["unique_graphs"]
        step.warm_up()
        assert counters["stats"]["unique_graphs"] - before == (compiles and not seed)
        tokens = torch.randint(0, 31, (2, 2, 25), generator=torch.Generator().manual_seed(seed))
        for _ in range(3):
            step(tokens, 1e-2)
        results[compiles].append((int(step.checksum()), step.result.tolist()))
    assert results[False] == results[True]


@pytest.mark.slow
def test_a_graph_of_the_users_own_keeps_its_variant_beside_those_that_models_share() -> None:
    """Also where it has the variant of the model that was called last."""
    torch.compiler.reset()
    compiled = functools.partial(torch.compile, backend="aot_eager")
    rows = torch.randn(3, 1, 2, 24, 16, generator=torch.Generator().manual_seed(0)).bfloat16()

    def grads(call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        q, k, v = (x.clone().requires_grad_() for x in rows)
        return torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashpoint.attention(q, k, v, variant="flash_bf16", is_causal=True)

    def train(name: str) -> None:
        variant, model = variant_of(name), dataclasses.replace(CONFIG, vocab_size=257)
        train = TrainConfig(batch_size=2, compile=True)
        config = Config(model=model, attn=variant, train=train, data=DataConfig(vocab_size=257))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", compiled)
            step = OptimizerStep(GPT(model, variant, 0), config, torch.device("cpu"), Ranks())
            step(torch.randint(0, 31, (1, 2, 25), generator=torch.Generator().manual_seed(0)), 1e-2)

    wanted = grads(attend)
    train("flash_bf16")
    own = compiled(attend)
    for _ in range(2):
        assert all(map(torch.equal, grads(own), wanted))
        train("flash_exact_rowsum")


class Times(torch.nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_models_that_differ_in_what_is_not_told_compile_anew_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with torch._dynamo.config.patch(recompile_limit=2):  # monkeypatch would leave it deleted
        for factor in (2, 3, 4):
            model = Times(factor)
            assert torch.equal(
                shared_graphs.compiled(model, AttentionVariant(), "the same")(torch.ones(2)), model(torch.ones(2))
            )


def test_a_constant_is_marked_as_pytorch_marks_it() -> None:
    """PyTorch's own decorator imports the compiler; what it sets is a private name that a release may change."""

    def named() -> int:
        return 1

    theirs = vars(torch.compiler.assume_constant_result(named)).copy()
    named.__dict__.clear()
    assert vars(constant_where_traced(named)) == theirs != {}
