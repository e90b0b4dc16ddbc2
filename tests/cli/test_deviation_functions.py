"""``flashpoint deviation FILE.py:FUNCTION``: a user's own attention as an engine, and what fails in it."""

from pathlib import Path

from tests.records import call, refusal, values

SMALL = ("--length", "16", "--head-size", "16", "--seeds", "3", "--device", "cpu")
OWN = """
import torch
def attention(q, k, v, is_causal):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
def without_gradient(q, k, v, is_causal):
    return attention(q, k, v, is_causal).detach()
def fails(q, k, v):
    return q
def too_long(q, k, v, is_causal):
    return torch.cat([q, q])
def without_v(q, k, v, is_causal):
    return q * k
def tells(q, k, v, is_causal):
    return "O"
def nothing(q, k, v, is_causal):
    q.detach().mul_(2)
def whole(q, k, v, is_causal):
    return q.long()
class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, how):
        ctx.how = how
        return q + k + v
    @staticmethod
    def backward(ctx, grad):
        if ctx.how == "halved":
            return grad[:1], grad, grad, None
        raise KeyError("lost") if ctx.how == "raising" else SystemExit(3)
def raising(q, k, v, is_causal):
    return Raising.apply(q, k, v, "raising")
def leaving(q, k, v, is_causal):
    return Raising.apply(q, k, v, "leaving")
def halved(q, k, v, is_causal):
    return Raising.apply(q, k, v, "halved")
constant = 3
"""


def test_a_function_of_the_users_own_is_an_engine(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = f"{tmp_path / 'own.py'}:"
    for mask in ("--causal", "--no-causal"):
        attention, math = (
            [{**row, "difference": ""} for row in values("deviation", engine, *SMALL, mask, "--precision", "fp32")]
            for engine in (f"{own}attention", "sdpa")
        )
        assert attention == math
        assert [row["of"] for row in attention] == ["O", "dQ", "dK", "dV"]
    assert [row["of"] for row in values("deviation", f"{own}without_gradient", *SMALL)] == ["O"]
    for name, told in (
        (
            "fails",
            "TypeError: fails() takes 3 positional arguments but 4 were given; it is called with q, k, v, is_causal",
        ),
        ("too_long", "returns bfloat16 [6, 1, 16, 16] for q of [3, 1, 16, 16]; return O of [3, 1, 16, 16], floating"),
        ("whole", "returns int64 [3, 1, 16, 16] for q of [3, 1, 16, 16]; return O of [3, 1, 16, 16], floating point"),
        ("without_v", "its backward pass fails: RuntimeError: The differentiated Tensor at index 2"),
        ("raising", f"its backward pass fails: {own}28: KeyError: 'lost'; ask for --of O alone"),
        ("leaving", f"its backward pass fails: {own}28: SystemExit: 3; ask for --of O alone"),
        ("halved", "its backward pass fails: RuntimeError: Function RaisingBackward returned an invalid gradient"),
        ("tells", "returns a str; return O [B, H, T, d] as a tensor"),
        ("nothing", "returns a NoneType; return O [B, H, T, d] as a tensor"),
        ("constant", "no function; give one that takes q, k, v and is_causal"),
        ("nowhere", "own.py has no nowhere; it has attention"),
    ):
        assert f"own.py:{name}: {told}" in refusal(call("deviation", f"{own}{name}", *SMALL))


def test_a_function_that_writes_to_its_arguments_changes_no_other_engine(tmp_path: Path) -> None:
    """In FP64 nothing is rounded, so that they could be the inputs themselves."""
    (tmp_path / "own.py").write_text("def writes(q, k, v, is_causal):\n    return q.mul_(2)\n")
    engines = (f"{tmp_path / 'own.py'}:writes", "baseline")
    found = values("deviation", *engines, *SMALL, "--precision", "fp64", "--of", "O")
    assert [row["largest"] for row in found if row["difference"] == "baseline − golden"] == [0]
