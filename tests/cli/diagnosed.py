"""Captured calls whose faults are known, and what ``flashpoint diagnose`` prints of them."""

import dataclasses
import json
from typing import Any

import torch
from click.testing import CliRunner

from flashpoint.cli.main import main
from flashpoint.diagnosis.call import AttentionCall
from flashpoint.diagnosis.faults import Fault, faulty_attention
from flashpoint.diagnosis.form import Form
from flashpoint.diagnosis.probe import results_of


def diagnose(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["diagnose", *arguments, "--format", "json"])
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def captured(fault: Fault, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad_out = (torch.randn(4, 2, 64, 16, generator=generator).to(dtype) for _ in range(4))
    call = AttentionCall(q, k, v, grad_out, Form(True, 0.25), 3, 9 + seed, "mine")
    function = faulty_attention(fault)
    found = results_of(lambda q, k, v, causal, scale: function(q, k, v, causal, scale), call)
    return dataclasses.replace(call, **vars(found))
