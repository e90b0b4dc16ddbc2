"""Names of variants: a file's, with what differs from it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flashpoint.errors import UserError
from flashpoint.numerics.named import resolved
from flashpoint.numerics.variant import ROUNDING_POINTS, AttentionVariant
from tests.conftest import REPOSITORY

VARIANTS = REPOSITORY / "configs/attn"
FILES = sorted(VARIANTS.glob("*.yaml"))


def named(name: str, **choices: Any) -> str:
    return resolved({**filed(name), **choices}, VARIANTS).name


def filed(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = yaml.safe_load((VARIANTS / f"{name}.yaml").read_text())
    return fields


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_holds_the_variant_of_its_name(file: Path) -> None:
    assert named(file.stem) == file.stem


@pytest.mark.parametrize(
    ("name", "choices", "told"),
    [
        ("flash_fixed_paper", {"beta": 2.0}, "flash_fixed_paper beta=2.0"),
        ("flash_fp32", {"out": {"mode": "none"}, "block_k": 32}, "flash_fp32 out=none block_k=32"),
        (
            "flash_fp32_out",
            {"layers": [2], "elsewhere": "flash_bf16"},
            "flash_fp32_out layers=[2] elsewhere=flash_bf16",
        ),
        ("flash_bf16", {"out_unnormalized": {"mode": "nearest", "bits": 1}}, "flash_bf16"),  # its title says so
        ("flash_bf16", {"delta_error": {"kind": "bias", "size": 0.1}}, "flash_bf16"),
    ],
)
def test_choices_that_are_not_the_files_are_told(name: str, choices: dict, told: str) -> None:
    assert named(name, **choices) == told


def test_a_name_without_a_file_stays() -> None:
    assert resolved({**filed("flash_bf16"), "name": "mine"}, VARIANTS).name == "mine"


def test_a_stored_name_is_told_anew() -> None:
    stored = resolved({"name": "flash_fp32", "out": {"mode": "none"}}, VARIANTS).to_dict()
    assert resolved(stored, VARIANTS).to_dict() == stored
    assert resolved({**stored, "out": {"mode": "nearest"}}, VARIANTS).name == "flash_fp32"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", sorted(VARIANTS.parent.glob("experiment/*.yaml")), ids=lambda path: path.stem)
def test_the_formats_of_an_experiment_stand_beside_each_attention_and_in_the_title_of_ours(experiment: Path) -> None:
    formats = yaml.safe_load(experiment.read_text()).get("attn", {})
    for name in (file.stem for file in FILES):
        parts = {point: {**filed(name).get(point, {}), **bits} for point, bits in formats.items()}
        variant = resolved({**filed(name), **parts}, VARIANTS)
        assert (variant.title == name) == (variant.kernel != "flash" or not _coarse(variant))


def _coarse(variant: AttentionVariant) -> bool:
    roundings = [getattr(variant, point) for point in ROUNDING_POINTS]
    return any(rounding.mode != "none" and rounding.bits != 7 for rounding in roundings)


def test_elsewhere_takes_the_formats_and_is_named() -> None:
    variant = resolved(
        {**filed("flash_exact_rowsum"), "out_unnormalized": {"mode": "nearest", "bits": 1}, "layers": [1],
         "elsewhere": "flash_bf16"}, VARIANTS,
    )  # fmt: skip
    assert variant.elsewhere is not None
    assert variant.elsewhere.out_unnormalized.bits == 1
    assert variant.title.endswith("elsewhere=flash_bf16, Ō of 1 mantissa bit")  # of both, once
    unrounded = resolved(
        {"name": "flash_fp32", "out_unnormalized": {"bits": 1}, "layers": [1], "elsewhere": "flash_bf16"}, VARIANTS
    )
    assert unrounded.title == "flash_fp32 layers=[1] elsewhere=flash_bf16, Ō of 1 mantissa bit"
    production = resolved({**filed("sdpa"), "out": {"bits": 1}, "layers": [1], "elsewhere": "flash_bf16"}, VARIANTS)
    assert production.title == "sdpa layers=[1] elsewhere=flash_bf16, O of 1 mantissa bit"
    with pytest.raises(
        UserError,
        match=r"attn\.elsewhere=flash_b16: no such variant; did you mean flash_bf16\?$",
    ):
        resolved({"name": "x", "layers": [1], "elsewhere": "flash_b16"}, VARIANTS)
