"""Record and replay on a CUDA device, compiled, through the command line."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import environment, train_command

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_replay_is_bitwise_and_another_attention_keeps_the_tape(text_file: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in environment().items() if name != "CUDA_VISIBLE_DEVICES"}

    def outcome(name: str, *arguments: str, tiny: bool) -> dict:
        command = train_command(*arguments, f"run_name={name}", tiny=tiny, text_file=text_file)
        subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=300)
        value: dict = json.loads((tmp_path / f"runs/{name}/outcome.json").read_text())
        return value

    original = outcome("original", "train.steps=40", tiny=True)
    again = outcome("again", "replay=original", tiny=False)
    other = outcome("other", "replay=original", "attn=flash_stochastic", tiny=False)
    launched_singly = outcome("singly", "replay=original", "train.cuda_graph=false", tiny=False)
    assert original["digest"] == again["digest"] == launched_singly["digest"]
    assert original["tape_digest"] == other["tape_digest"]
    assert original["digest"] != other["digest"]
