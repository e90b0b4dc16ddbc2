"""Probes beside a training in TF32: their products are FP32, and the training's bits are as without them."""

import json
import subprocess
from pathlib import Path

import pytest

from flashpoint.runs.metrics import read_metrics
from tests.conftest import environment, train_command

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PRODUCT = """
import torch
from flashpoint.lab.probes.attention import Probe

class Product(Probe):
    def measure(self, seen):
        a = torch.full((256, 256), 1 + 2**-20, device=seen.x.device)
        error = (a @ torch.eye(256, device=a.device) - a).abs().max()
        return {"product_error": error.expand(seen.w_q.shape[:2])}
"""
"""TF32 has 10 bits of a number's mantissa, and would lose the last one of these."""


def test_the_products_of_probes_are_fp32_beside_a_training_in_tf32(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PRODUCT)
    env = {name: value for name, value in environment().items() if name != "CUDA_VISIBLE_DEVICES"}
    digests = []
    for precision, interval in (("tf32", 0), ("tf32", 1), ("fp32", 1)):
        options = "attn=sdpa", f"train.precision={precision}", f"probes.attention_interval={interval}"
        name, probes = f"{precision}_{interval}", f"probes.attention=[deviation,{tmp_path}/own.py:Product]"
        command = train_command(*options, probes, f"run_name={name}", tiny=True, text_file=text_file)
        subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=300)
        digests.append(json.loads((tmp_path / f"runs/{name}/outcome.json").read_text())["digest"])
        named = json.loads((tmp_path / f"runs/{name}/manifest.json").read_text())["environment"]["sdpa"]
        assert "Flash" not in named  # that takes 16 bits
    without, observed, in_fp32 = digests
    assert without == observed != in_fp32
    assert (read_metrics(tmp_path / "runs/tf32_1/metrics.jsonl")["product_error"][1] == 0).all()
