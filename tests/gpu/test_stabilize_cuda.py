"""``flashpoint.stabilize`` on a GPU: PyTorch's kernels get FP16, compiled, in CUDA graphs and in parallel."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import flashpoint
from flashpoint.numerics import stabilizers
from flashpoint.numerics.stabilizers import in_fp16
from tests.conftest import environment

pytestmark = pytest.mark.gpu
SHAPE = (2, 8, 512, 64)
MODEL = nn.Linear(1, 1)
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    MODEL.to("cuda")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(heads_of_keys: int = 8, scale: float = 1.0) -> list[Tensor]:
    """Return q, k, v and dO in bfloat16; dO would vanish in FP16."""
    generator = torch.Generator("cuda").manual_seed(0)
    sequences, heads, *rest = SHAPE
    q, k, v, grad_out = (
        torch.randn(sequences, number, *rest, generator=generator, device="cuda")
        for number in (heads, heads_of_keys, heads_of_keys, heads)
    )
    return [(q * scale).bfloat16(), (k + 1).bfloat16(), v.bfloat16(), (grad_out * 1e-9).bfloat16()]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def passes(attend: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    *qkv, grad_out = given
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = attend(*leaves)
    return [x.clone() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad_out))]


def exact(given: list[Tensor]) -> list[Tensor]:
    *qkv, grad_out = (x.double() for x in given)
    q, k, v = (x.requires_grad_() for x in qkv)
    repeats = q.shape[1] // k.shape[1]
    later = torch.ones(SHAPE[2], SHAPE[2], device="cuda", dtype=torch.bool).triu(1)
    scores = (q @ k.repeat_interleave(repeats, 1).mT / math.sqrt(SHAPE[3])).masked_fill(later, -math.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(repeats, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]


def assert_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 2**-7


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_computes_in_fp16(backend: SDPBackend) -> None:
    """The same kernel called in FP16 by hand gives the same O. Of the gradients the sums are in no fixed order."""
    given = inputs()
    with sdpa_kernel(backend):
        by_hand = passes(lambda *qkv: in_fp16(causal, *qkv), given)
        with flashpoint.stabilize(MODEL) as told:
            found = passes(causal, given)
    assert told.clamped == 0
    assert_near(found, exact(given))
    assert_near(by_hand, exact(given))
    assert found[0].equal(by_hand[0])
    with sdpa_kernel(backend):
        assert not found[0].equal(passes(causal, given)[0])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    with flashpoint.stabilize(MODEL) as told:
        compiled = torch.compile(causal, mode=mode, fullgraph=True)
        for scale in (1.0, 1.0, 1.0, 1e6):  # a CUDA graph is recorded at the second call or later
            torch.compiler.cudagraph_mark_step_begin()
            found = passes(compiled, inputs(scale=scale))
            if scale == 1.0:
                assert_near(found, exact(inputs()))
        assert told.clamped == 1


def test_fewer_heads_of_keys_under_autocast() -> None:
    given = inputs(heads_of_keys=2)
    with flashpoint.stabilize(MODEL), torch.autocast("cuda", torch.bfloat16):
        found = passes(causal, [*(x.float() for x in given[:3]), given[3]])
    assert found[0].dtype == torch.bfloat16
    assert_near(found, exact(given))


class Mode(TorchDispatchMode):
    """Sees each operation, as one that traces does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_eager_mode_waits_for_nothing_and_has_the_bits_that_are_traced(scale: float) -> None:
    given = inputs(scale=scale)
    with flashpoint.stabilize(MODEL), sdpa_kernel(SDPBackend.MATH):
        passes(causal, given)  # constants are copied
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = passes(causal, given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with Mode():
            traced = passes(causal, given)
    for one, other in zip(eager, traced, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def projected(scale: float) -> list[Tensor]:
    """Return q, k and v as parts of one projection, and dO by token."""
    generator = torch.Generator("cuda").manual_seed(1)
    sequences, heads, tokens, d = SHAPE
    parts = torch.randn(sequences, tokens, 3, heads, d, generator=generator, device="cuda").bfloat16()
    q, k, v = parts.transpose(1, 3).unbind(2)
    grad_out = torch.randn(sequences, tokens, heads, d, generator=generator, device="cuda").bfloat16().transpose(1, 2)
    return [q / scale, k * scale, v, grad_out]


@pytest.mark.parametrize("size", [1.0, 1e-30, 0.0, math.inf, math.nan])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e6])
def test_kernels_change_no_bit_and_no_count(scale: float, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, grad_out = projected(scale)
    found, counted = [], []
    for by_kernels in (True, False):
        monkeypatch.setattr(stabilizers, "_is_on_gpu", lambda _, here=by_kernels: here)
        with flashpoint.stabilize(MODEL) as told, sdpa_kernel(SDPBackend.MATH):
            found.append(passes(causal, [q, k, v, grad_out * size]))
            counted.append((told.clamped, told.overflowed, told._beyond.calls, told._overflowed.calls))
    assert counted[0] == counted[1]
    for one, other in zip(*found, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_cuda_graph_counts_in_each_replay() -> None:
    q, k, v, _ = inputs(scale=1e6)
    with flashpoint.stabilize(MODEL) as told, torch.no_grad():
        wanted = causal(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = causal(q, k, v)
        for _ in range(3):
            graph.replay()
        assert told.clamped == 1 + 3
        assert out.equal(wanted)


RANKS = """
import json, os, sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
import flashpoint

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.cuda.set_device(rank % torch.cuda.device_count())

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192, bias=False)
    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().mean()

torch.manual_seed(0)
block = Block().cuda()
x = torch.randn(2 * dist.get_world_size(), 128, 64, device="cuda")
mine = x[2 * rank : 2 * rank + 2]
norms = {}
with flashpoint.stabilize(block) as told:
    for name, model in (("ddp", nn.parallel.DistributedDataParallel(block)), ("alone", block)):
        for mode in ("eager", "compiled"):
            torch._dynamo.reset()
            block.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                (torch.compile(model) if mode == "compiled" else model)(mine if name == "ddp" else x).backward()
            norms[f"{name} {mode}"] = block.qkv.weight.grad.clone()
if rank == 0:
    wanted = norms["alone eager"]
    far = {name: float((grad - wanted).norm() / wanted.norm()) for name, grad in norms.items()}
    print(json.dumps({"far": far, "clamped": told.clamped}))
dist.destroy_process_group()
"""


def test_data_parallel(tmp_path: Path) -> None:
    """Two ranks with half of the batch each have the gradient of the whole batch, compiled and not."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = {variable: value for variable, value in environment().items() if variable != "CUDA_VISIBLE_DEVICES"}
    printed = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout
    found = json.loads(printed.splitlines()[-1])
    assert set(found["far"]) == {"ddp eager", "ddp compiled", "alone eager", "alone compiled"}
    assert max(found["far"].values()) < 2**-7
    assert found["clamped"] == 0
