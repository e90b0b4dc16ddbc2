"""The rules by which δ is made. ``NAME.py`` is the rule ``NAME`` of the choice ``delta``.

The kernels' branch of a rule is ``flashpoint_kernels/delta_rules/NAME.py``. A rule that is named here and has no file
there, or the other way round, fails at import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, assert_never, get_args

import flashpoint_kernels
from flashpoint.numerics.delta_rules import out, out_fp32, out_independent, p_dp
from flashpoint.numerics.delta_rules.rule import DeltaRule

DeltaName = Literal["out", "out_fp32", "p_dp", "out_independent"]


def rule_of(name: DeltaName) -> DeltaRule:
    """Return the rule of a name."""
    match name:
        case "out":
            return out.RULE
        case "out_fp32":
            return out_fp32.RULE
        case "p_dp":
            return p_dp.RULE
        case "out_independent":
            return out_independent.RULE
        case _:
            assert_never(name)


def require_same_rules(names: set[str], rules: Path, branches: Path) -> None:
    """Raise ``ImportError`` unless both folders have a file for each rule that is named, and for no other.

    Args:
        rules: folder of this package.
        branches: folder of the kernels' branches.
    """
    for folder in (rules, branches):
        files = {path.stem for path in folder.glob("*.py")} - {"__init__", "rule"}
        for name in sorted(names - files):
            raise ImportError(f"attn.delta={name}: {folder / name}.py is missing; write the rule's part there")
        for name in sorted(files - names):
            raise ImportError(
                f"{folder / name}.py: {name} is no rule of δ; add it to DeltaName and to rule_of in "
                f"{rules / '__init__.py'}"
            )


require_same_rules(
    set(get_args(DeltaName)), Path(__file__).parent, Path(flashpoint_kernels.__file__).parent / "delta_rules"
)
RULES: dict[DeltaName, DeltaRule] = {name: rule_of(name) for name in get_args(DeltaName)}
"""Every rule; to fill it fails if :func:`rule_of` forgets one."""
