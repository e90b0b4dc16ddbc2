"""The drop-in attention as models call it: layers and heads, devices, transforms, checkpoints, copies, exports."""

import copy
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashpoint.drop_in import attention, variant_of
from flashpoint.numerics.choices import STOCHASTIC, DeltaError
from flashpoint.numerics.production import PRODUCTION
from flashpoint.numerics.variant import AttentionVariant
from tests import releases, warm
from tests.conftest import REPOSITORY, environment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STOCHASTIC_OUT = AttentionVariant(name="stochastic", out=STOCHASTIC)


def qkv(dtype: torch.dtype = torch.bfloat16, heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 20, 16, generator=generator).to(dtype).to(DEVICE) for _ in range(3)]


@pytest.mark.parametrize("name", [*PRODUCTION, "flex_fixed", "fa4_fixed"])
def test_an_attention_that_cannot_run_on_a_cpu_is_one_line(name: str) -> None:
    q, k, v = (x.cpu().requires_grad_() for x in qkv())
    if name in ("sdpa", "sdpa_math", "sdpa_flash"):  # PyTorch computes these on a CPU
        attention(q, k, v, variant=name).sum().backward()
        return
    with pytest.raises(ValueError, match=rf"^variant={name}: (trains on a GPU alone|needs \S+); .*variant='sdpa'$"):
        attention(q, k, v, variant=name)


def key_of(step: int) -> Tensor:
    return torch.tensor([3, step], device=DEVICE)


SDPA = AttentionVariant(name="sdpa", kernel="sdpa")
BY_LAYER = {
    "others": AttentionVariant(name="of_layer_2", layers=(2,), elsewhere=SDPA),
    "selected": dataclasses.replace(SDPA, layers=(1, 3), elsewhere=AttentionVariant(name="of_layer_2")),
}


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=releases.traces_attention)])
@pytest.mark.parametrize("which", BY_LAYER)
def test_a_layer_that_pytorchs_attention_is_to_compute_is_computed_by_it(which: str, compiles: bool) -> None:
    """In FP32, whose O this package's attention would round to BF16."""

    def call(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return attention(q, k, v, is_causal=True, variant=BY_LAYER[which], layer=layer)

    function = torch.compile(call, fullgraph=True, backend="eager") if compiles else call
    inputs = qkv(torch.float32)
    by_pytorch = F.scaled_dot_product_attention(*inputs, is_causal=True)
    by_package = attention(*inputs, is_causal=True, variant=AttentionVariant())
    assert not torch.equal(by_pytorch, by_package)
    for layer, expected in ((1, by_pytorch), (2, by_package), (3, by_pytorch)):
        assert torch.equal(function(*inputs, layer), expected)


@pytest.mark.parametrize(
    ("selection", "layer", "told"),
    [
        ({"heads": (5,)}, 1, r"selects heads \[5\]: query has heads 1 to 2"),
        ({"heads": (1, 3, 4)}, 1, r"selects heads \[3, 4\]"),
        ({"layers": (1, 2), "heads": ((1,), (2, 3))}, 2, r"selects heads \[3\]"),
        ({"layers": (2,), "heads": (5,)}, 0, r"layer=0: give one from 1"),
    ],
)
def test_heads_that_the_query_does_not_have_are_one_clear_error(selection: dict, layer: int, told: str) -> None:
    variant = AttentionVariant(name="some", **selection, elsewhere=AttentionVariant())
    with pytest.raises(ValueError, match=told):
        attention(*qkv(), variant=variant, layer=layer)


def test_inputs_that_are_no_tensors_or_that_autocast_casts_are_one_clear_error() -> None:
    q, k, v = qkv(torch.float32)
    with pytest.raises(TypeError, match="are ndarray, Tensor, Tensor: give tensors"):
        attention(q.numpy(), k, v, variant="flash_fixed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float16, to which autocast casts them"), torch.autocast("cpu", torch.float16):
        attention(q, k, v, variant="flash_fixed")


def test_heads_of_another_layer_are_no_error() -> None:
    variant = AttentionVariant(layers=(1, 2), heads=((1,), (2, 3)), elsewhere=AttentionVariant())
    for layer in (1, 3):
        assert torch.equal(attention(*qkv(), variant=variant, layer=layer), attention(*qkv(), variant="flash_fp32"))


@pytest.mark.parametrize("elsewhere", ["query", "key", "seed_and_step"])
def test_tensors_on_two_devices_are_one_clear_error(elsewhere: str) -> None:
    """A kernel would read the other one's address."""
    arguments = {**dict(zip(("query", "key", "value"), qkv(), strict=True)), "seed_and_step": key_of(0)}
    arguments[elsewhere] = arguments[elsewhere].to("meta")
    with pytest.raises(ValueError, match=r"are on .*give one device|seed_and_step is on meta: give it on"):
        attention(**arguments, variant=STOCHASTIC_OUT)  # type: ignore[arg-type]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_error_of_delta_that_changes_with_the_step_asks_for_the_step(elsewhere: bool) -> None:
    """It stayed at its first factor."""
    changing = AttentionVariant(
        name="changing", delta_error=DeltaError(kind="bias", size=1.0, trajectory=((0.0, 1.0),))
    )
    variant = AttentionVariant(name="of_head_2", heads=(2,), elsewhere=changing) if elsewhere else changing
    with pytest.raises(ValueError, match="goes with the step; pass seed_and_step"):
        attention(*qkv(), variant=variant)
    of_steps = [
        grads(lambda *qkv: attention(*qkv, variant=variant, seed_and_step=key_of(step)), qkv())[0]  # noqa: B023
        for step in (0, 249, 250)
    ]
    assert torch.equal(of_steps[0], of_steps[1])
    assert not torch.equal(of_steps[1], of_steps[2])


def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v).float().square().sum()


@pytest.mark.parametrize(
    "transformed",
    [
        lambda *qkv: torch.func.grad(loss)(*qkv),
        lambda *qkv: torch.func.vjp(loss, *qkv),
        lambda *qkv: torch.func.vmap(attention)(*(x[:, None] for x in qkv)),
        lambda *qkv: torch.func.vmap(torch.func.grad(loss))(*(x[:, None] for x in qkv)),
    ],
    ids=["grad", "vjp", "vmap", "grad_of_each"],
)
def test_transforms_of_torch_func_are_one_clear_error(transformed: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"no transforms of torch\.func .*; call backward\(\), or choose"):
        transformed(*qkv())


def grads(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    function(*leaves).float().square().sum().backward()
    return [x.grad for x in leaves if x.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_in_the_backward_pass_has_the_same_bits(reentrant: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True, variant=STOCHASTIC_OUT, seed_and_step=key_of(7))

    again = grads(lambda *qkv: checkpoint(call, *qkv, use_reentrant=reentrant), qkv())
    for one, other in zip(again, grads(call, qkv()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some_inputs_are_those_of_all(wanted: tuple[int, ...]) -> None:
    every = grads(attention, qkv())
    inputs = [x.requires_grad_(number in wanted) for number, x in enumerate(qkv())]
    attention(*inputs).float().square().sum().backward()
    for number, (x, expected) in enumerate(zip(inputs, every, strict=True)):
        assert torch.equal(x.grad, expected) if number in wanted else x.grad is None


def test_under_autocast_gradients_have_the_dtype_of_the_inputs_and_bf16_values() -> None:
    def call(*qkv: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return attention(*qkv, is_causal=True)

    expected = grads(lambda *qkv: attention(*qkv, is_causal=True), qkv())
    for one, other in zip(grads(call, [x.float() for x in qkv()]), expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())


@pytest.mark.parametrize("variant", ["flash_exact_rowsum", "flash_centered", "released"])
def test_strides_and_storage_of_the_inputs_change_no_bit(variant: str) -> None:
    """Slices of one projection, a broadcast head, and rows that are not contiguous."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True, variant=variant)

    packed = torch.randn(2, 20, 3, 2, 16, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    sliced = list(packed.permute(2, 0, 3, 1, 4).unbind(0))
    broadcast = [x[:, :1].expand(-1, 2, -1, -1) for x in sliced]
    columns = [x.mT.contiguous().mT for x in sliced]
    for views in (sliced, broadcast, columns):
        copies = [x.contiguous() for x in views]
        assert torch.equal(call(*views), call(*copies))
        leaves = [[x.detach().requires_grad_() for x in some] for some in (views, copies)]
        found = [torch.autograd.grad(call(*some).float().square().sum(), some) for some in leaves]
        assert all(map(torch.equal, *found))


class Layer(nn.Module):
    """A user's attention, which holds its variant."""

    def __init__(self, variant: AttentionVariant) -> None:
        super().__init__()
        self.qkv, self.variant = nn.Linear(32, 96), variant

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)  # [3, B, H, T, d]
        return attention(*heads.unbind(0), is_causal=True, variant=self.variant)


def test_a_copy_of_a_model_computes_the_same() -> None:
    torch.manual_seed(0)
    layer = Layer(variant_of("flash_centered")).to(DEVICE)
    copied = copy.deepcopy(layer)
    assert copied.variant == layer.variant
    x = torch.randn(2, 20, 32, device=DEVICE)
    outs = [one(x) for one in (layer, copied)]
    assert torch.equal(*outs)
    for out in outs:
        out.square().sum().backward()
    assert torch.equal(layer.qkv.weight.grad, copied.qkv.weight.grad)


def test_without_gradients_it_computes_the_same() -> None:
    out = attention(*(x.requires_grad_() for x in qkv()), is_causal=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(attention(*qkv(), is_causal=True), out)


@pytest.mark.parametrize("row", [0, 7])
def test_what_is_not_a_number_stays_in_the_rows_that_see_it(row: int) -> None:
    for place in range(2):  # of q and of k
        inputs = qkv()
        inputs[place][0, 0, row, 3] = torch.nan
        spoilt = attention(*inputs, is_causal=True).isnan().any(-1).cpu()
        expected = torch.zeros(2, 2, 20, dtype=torch.bool)
        expected[0, 0, row : (row + 1 if place == 0 else None)] = True
        assert torch.equal(spoilt, expected)


LOADED = """
import sys, torch
from flashpoint.drop_in import attention
inputs, expected = torch.load(sys.argv[1] + "/tensors.pt")
attention(*inputs, variant="flash_delta_fp32"), attention(*inputs, variant="flash_exact_rowsum")
found = torch.export.load(sys.argv[1] + "/program.pt2").module()(*inputs)
assert torch.equal(found, expected)
"""


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=releases.traces_attention)])
def test_an_exported_program_computes_its_variant_in_another_process(tmp_path: Path, strict: bool) -> None:
    """In which another variant was the first whose results have this form."""

    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, is_causal=True, variant="released")

    inputs = tuple(x.cpu() for x in qkv())
    torch.export.save(torch.export.export(Model(), inputs, strict=strict), tmp_path / "program.pt2")
    expected = Model()(*inputs)
    assert not torch.equal(expected, attention(*inputs, is_causal=True))
    torch.save((inputs, expected), tmp_path / "tensors.pt")
    (script := tmp_path / "loaded.py").write_text(LOADED)
    result = warm.run([sys.executable, str(script), str(tmp_path)], env=environment(), timeout=120, cwd=REPOSITORY)
    assert result.returncode == 0, result.stderr
