"""A probe of the user's own beside two steps of a small model, which must not see it: ``probed.py FILE.py:CLASS``."""

import json
import sys

import torch

from flashpoint.detector import ExplosionDetector
from flashpoint.errors import exit_in_one_line
from flashpoint.lab.config import Config, ModelConfig, ProbesConfig, TrainConfig
from flashpoint.lab.model import GPT
from flashpoint.lab.probes.runner import ProbeRunner
from flashpoint.lab.training.checkpoints import State
from flashpoint.runs import migrations
from flashpoint.schema import understood


def main(name: str) -> None:
    config, device = Config(), torch.device("cpu")
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=32, context=8, vocab_size=300), config.attn, 0)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    probes = ProbesConfig(attention=(name, "ties"), attention_interval=1)
    with exit_in_one_line():
        runner = ProbeRunner(probes, model, TrainConfig(batch_size=4), device, print)
    detector = ExplosionDetector(config.detector).state()
    for step in range(2):
        runner.before_step(step, torch.arange(36).view(4, 9), torch.tensor([0, step]))
        assert "tied_rows" in runner.after_step(step, last=False)
        tensors, plain = runner.state()
        state = {
            "step": step,
            "loss": 1.0,
            "chain": "",
            "detector": detector.model_dump(),
            "probes": plain.model_dump(),
        }
        read = understood(json.dumps(state), State, "state", migration=migrations.loop_state)
        runner.load_state(tensors, read.probes, "state")
    assert all(map(torch.equal, weights, model.parameters()))
    for failed in runner.failed:
        assert failed.error.isprintable()


if __name__ == "__main__":
    main(sys.argv[1])
