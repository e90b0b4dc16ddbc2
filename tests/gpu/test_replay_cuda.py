"""Record and replay on a CUDA device, compiled, through the command line."""

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import environment, train_command

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("options", [(), ("optimizer=muon", "train.z_loss=1e-4"), ("model.shift_keys=running",)])
def test_replay_is_bitwise_and_another_attention_keeps_the_tape(
    options: Sequence[str], text_file: Path, tmp_path: Path
) -> None:
    env = {name: value for name, value in environment().items() if name != "CUDA_VISIBLE_DEVICES"}

    def outcome(name: str, *arguments: str, tiny: bool) -> dict:
        command = train_command(*arguments, f"run_name={name}", tiny=tiny, text_file=text_file)
        subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=300)
        value: dict = json.loads((tmp_path / f"runs/{name}/outcome.json").read_text())
        return value

    original = outcome("original", "train.steps=40", *options, tiny=True)
    again = outcome("again", "replay=original", tiny=False)
    other = outcome("other", "replay=original", "attn=flash_stochastic", tiny=False)
    outcome("not_a_kernel", "replay=original", "attn.block_k=48", tiny=False)  # its step is recorded, too
    launched_singly = outcome("singly", "replay=original", "train.cuda_graph=false", tiny=False)
    observed = outcome("observed", "replay=original", "probes.attention_interval=1", tiny=False)
    unobserved = ("probes.attention_interval=0", "probes.weights_interval=0")
    alone = outcome("alone", "replay=original", *unobserved, tiny=False)
    digests = {run["digest"] for run in (original, again, launched_singly, observed, alone)}
    assert len(digests) == 1
    assert original["tape_digest"] == other["tape_digest"]
    assert original["digest"] != other["digest"]


@pytest.mark.parametrize("setting", ["model.shift_keys=running", "optimizer=muon"])
def test_a_killed_run_resumes_to_the_same_digest_and_rewinds(setting: str, text_file: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in environment().items() if name != "CUDA_VISIBLE_DEVICES"}
    options = (setting, "train.steps=400", "checkpoints.interval=20", "train.checksum_interval=50")

    def command(*arguments: str, tiny: bool) -> list[str]:
        return train_command(*arguments, tiny=tiny, text_file=text_file)

    def finish(*arguments: str, tiny: bool = False) -> None:
        subprocess.run(command(*arguments, tiny=tiny), cwd=tmp_path, env=env, check=True, timeout=300)

    finish(*options, "run_name=whole", tiny=True)
    process = subprocess.Popen(command(*options, "run_name=killed", tiny=True), cwd=tmp_path, env=env)
    while len(list((tmp_path / "runs/killed/checkpoints").glob("*.json"))) < 3:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "runs/killed/outcome.json").exists()
    finish("resume=killed")
    finish("replay=whole", "from_step=215", "run_name=rewound")
    outcomes = [
        json.loads((tmp_path / f"runs/{name}/outcome.json").read_text()) for name in ("whole", "killed", "rewound")
    ]
    assert len({outcome["digest"] for outcome in outcomes}) == 1
