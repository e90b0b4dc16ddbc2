"""Rules of δ: a rule that one side forgets is refused, and what each is in one formula, by hand."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import flashpoint_kernels
from flashpoint.numerics import delta_rules, launch
from flashpoint.numerics.choices import Rounding
from flashpoint.numerics.compile_time import compile_time_choices
from flashpoint.numerics.delta_rules import RULES, DeltaName, require_same_rules
from flashpoint.numerics.effective import effective_choices
from flashpoint.numerics.variant import AttentionVariant
from flashpoint_kernels.choices import Choices
from tests.numerics.test_kernels import DEVICE

NAMES = set(get_args(DeltaName))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the folders of rules and of the kernels' branches."""
    kernels = Path(flashpoint_kernels.__file__).parent / "delta_rules"
    for folder, source in (("rules", Path(delta_rules.__file__).parent), ("branches", kernels)):
        shutil.copytree(source, tmp_path / folder)
    return tmp_path / "rules", tmp_path / "branches"


def test_every_rule_has_a_file_on_both_sides(folders: tuple[Path, Path]) -> None:
    assert set(RULES) == NAMES
    require_same_rules(NAMES, *folders)


@pytest.mark.parametrize("side", [0, 1])
def test_a_rule_that_a_side_lacks_or_does_not_name_is_refused_by_file(folders: tuple[Path, Path], side: int) -> None:
    file = folders[side] / "halved.py"
    with pytest.raises(ImportError, match=rf"{folders[0]}/halved\.py is missing"):
        require_same_rules({*NAMES, "halved"}, *folders)
    file.write_text("")
    with pytest.raises(ImportError, match=rf"{file}: halved is no rule of δ; add it to DeltaName"):
        require_same_rules(NAMES, *folders)
    with pytest.raises(ImportError, match=rf"{folders[1 - side]}/halved\.py is missing"):
        require_same_rules({*NAMES, "halved"}, *folders)


def test_a_rule_without_a_branch_in_the_kernel_is_computed_as_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was rowsum(dO∘O) of what was saved, without a word."""

    def unknown(*arguments: Any) -> Choices:
        return dataclasses.replace(compile_time_choices(*arguments), delta="halved")

    q = torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16, device=DEVICE)
    seed_and_step = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    saved = launch.flash_fwd(q, q, q, AttentionVariant(), layer=1, seed_and_step=seed_and_step)
    monkeypatch.setattr(launch, "compile_time_choices", unknown)
    with pytest.raises(Exception, match="this rule of delta has no branch"):  # in a layer that nobody else asks for
        launch.flash_bwd(q, q, q, q, *saved, AttentionVariant(), layer=77, seed_and_step=seed_and_step)


@dataclasses.dataclass
class Numbers:
    """One row of two features and two keys."""

    grad_out: Tensor
    out: Tensor
    saved_out: Tensor

    def row_sums(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([0.5]), torch.tensor([0.25])


@pytest.mark.parametrize(
    ("name", "delta"), [("out", 2 * 3 + 1 * 5), ("out_fp32", 2 * 7 - 1), ("out_independent", 2 * 7 - 1), ("p_dp", 0.5)]
)
def test_each_formula(name: DeltaName, delta: float) -> None:
    inputs = Numbers(torch.tensor([[2.0, 1.0]]), torch.tensor([[3.0, 5.0]]), torch.tensor([[7.0, -1.0]]))
    assert RULES[name].delta(inputs).tolist() == [delta]


def test_a_choice_of_one_rule_says_nothing_beside_another() -> None:
    assert "out_residual_bits" in effective_choices(AttentionVariant(delta="out_fp32", out_residual_bits=3))
    assert "out_residual_bits" not in effective_choices(AttentionVariant())
    with pytest.raises(ValueError, match=r"attn\.out_residual_bits=3: attn\.delta=p_dp does not read it; set attn"):
        AttentionVariant(delta="p_dp", out_residual_bits=3)


@pytest.mark.parametrize(
    "rounded",
    [
        {"denominator": Rounding("nearest", 7)},
        {"out_unnormalized": Rounding("nearest", 7), "out_unnormalized_when": "per_block"},
    ],
)
def test_a_residual_is_refused_beside_each_rounding_that_it_cannot_tell(rounded: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"attn\.out_residual_bits=3: only Ō and O may be rounded, once each; set"):
        AttentionVariant(delta="out_fp32", out_residual_bits=3, **rounded)
