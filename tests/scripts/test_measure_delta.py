"""``scripts/evidence/measure_delta.py`` on a captured call, against FP64 by hand."""

import sys
from pathlib import Path

import pytest

from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.form import Form
from tests.numerics.oracle import exact_attention, run_reference
from tests.numerics.test_kernels import FROM_FILES
from tests.numerics.test_reference_fp64 import normal
from tests.scripts.loaded import script

SCRIPT = script("evidence/measure_delta")


def written(path: Path, is_causal: bool = True) -> Path:
    q, k, v, grad_out = (x.bfloat16() for x in normal(40, 16))
    call = AttentionCall(q, k, v, grad_out, Form(is_causal, 0.25), 3, 7, "own")
    call.write(path / "layer-3.safetensors")
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["measure_delta.py", *map(str, arguments)])
    SCRIPT.main()


def test_bias_and_noise_against_fp64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, written(tmp_path), "--attn", "flash_fp32", "flash_fixed", "--bits", "1", "4")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[4:]]
    assert [row[1] for row in rows] == [
        "`flash_fp32`",
        "`flash_fixed 1 bit`",
        "`flash_fixed 4 bits`",
    ]
    assert {row[0] for row in rows} == {f"{tmp_path.name} L3"}
    tensors = [x.bfloat16() for x in normal(40, 16)]
    found = run_reference(*tensors, FROM_FILES["flash_fp32"])  # type: ignore[arg-type]
    exact, grad_out = exact_attention(*tensors), tensors[3].double()  # type: ignore[arg-type]
    error = (grad_out * (found["out"].double() - exact["out"])).sum(-1)
    bound = grad_out.norm(dim=-1) * exact["out"].norm(dim=-1)
    assert float(rows[0][4].split(" ")[0]) == pytest.approx(float(error.sum() / bound.sum()), rel=0.06)
    noise = float((error.square().sum() / bound.square().sum()).sqrt())
    assert [float(row[5]) for row in rows[:1]] == pytest.approx([noise], rel=0.06)
    assert float(rows[2][3]) < float(rows[1][3]) < float(rows[0][3])
    error_of_q = float((found["grad_q"].double() - exact["grad_q"]).norm() / exact["grad_q"].norm())
    assert float(rows[0][6]) == pytest.approx(error_of_q, rel=0.01)


def test_other_masks_and_scales_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, written(tmp_path, is_causal=False))
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
