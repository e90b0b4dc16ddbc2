"""A GPT-2 of Transformers with PyTorch's attention, and with the drop-in on the same batches.

Shape, optimiser and tokens are those of flashpoint's experiment=ignite, whose own GPT-2 explodes. What this one did on
H100s stands in docs/findings/appendix.md, "A real explosion"::

    pip install transformers
    python examples/explode_gpt2.py                                  # seed 0 exploded between 4,100 and 6,000
    flashpoint diagnose runs/explode-sdpa --step STEP                # of the early warning: a bias of δ in layer 2
    python examples/explode_gpt2.py attention=flash_unrounded_out    # the same batches; stable to step 12,000

And proof, by branches from its checkpoints::

    flashpoint localize runs/explode-sdpa --function examples/explode_gpt2.py:step \\
        --checkpoints 'runs/explode-sdpa/step-*.pt'
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel
from transformers.masking_utils import sdpa_mask

import flashpoint
from flashpoint.huggingface import implementation
from flashpoint.lab.config import DataConfig
from flashpoint.lab.data.batches import BatchOrder, gather_windows
from flashpoint.lab.data.prepare import prepare, with_available_source

SETTINGS = {"attention": "sdpa", "layers": "6", "heads": "4", "width": "256", "context": "2048", "batch": "8",
            "vocabulary": "8192", "lr": "2e-3", "beta2": "0.9", "warmup": "200", "steps": "20000", "seed": "0",
            "text": "",  # a file; otherwise the corpus of experiment=ignite
            "keep": "150",  # steps between checkpoints, of which the last twenty stay: localize starts from them
            "after": "200",  # steps to go on after an explosion
            "observe": "250", "runs": "runs"}  # fmt: skip


class Loop:
    """Model, optimiser, schedule and batches."""

    def __init__(self, settings: dict[str, str], attention: str) -> None:
        sizes = (int(settings[name]) for name in ("layers", "heads", "width", "context", "vocabulary", "batch"))
        layers, heads, width, self.context, vocabulary, batch = sizes
        self.settings, self.done, seed = settings, 0, int(settings["seed"])
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, n_positions=self.context,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        self.model: Any = GPT2LMHeadModel._from_config(config, attn_implementation=attention).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=float(settings["lr"]), betas=(0.9, float(settings["beta2"])), weight_decay=0.0
        )
        corpus = {"source": "text", "path": settings["text"]} if settings["text"] else {"max_bytes": 60_000_000}
        self.tokens = prepare(with_available_source(DataConfig(vocab_size=vocabulary, **corpus))).train
        self.order = BatchOrder(len(self.tokens), self.context, (1, 1, batch), seed)

    def step(self, watched: Any) -> Tensor:
        batch = gather_windows(self.tokens, self.order.windows(self.done)[0, 0], self.context).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.settings["lr"]) * min(1.0, (self.done + 1) / int(self.settings["warmup"]))
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(batch[:, :-1]).logits
        loss: Tensor = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        watched.step(loss, batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return loss

    def save(self, folder: Path) -> None:
        state = {"settings": self.settings, "done": self.done, "model": self.model.state_dict(),
                 "optimizer": self.optimizer.state_dict()}  # fmt: skip
        torch.save(state, folder / f"step-{self.done:06}.pt")
        for older in sorted(folder.glob("step-*.pt"))[:-20]:
            older.unlink()


def train(**changed: str) -> str:
    """Train until the steps are done, or some after an explosion; return the verdict."""
    settings = {**SETTINGS, **changed}
    name, steps, keep = settings["attention"], int(settings["steps"]), int(settings["keep"])
    loop = Loop(settings, name if name == "sdpa" else implementation(name))
    exploded_for = 0
    with flashpoint.watch(
        loop.model, name=f"explode-{name}", runs_dir=settings["runs"], steps=steps,
        warmup_steps=int(settings["warmup"]), interval=int(settings["observe"]), sequences=8,
    ) as watched:  # fmt: skip
        while loop.done < steps and exploded_for < int(settings["after"]):
            if loop.done % keep == 0 and watched.run is not None:
                loop.save(watched.run.folder.path)
            if loop.done == steps - 1:
                watched.capture()
            loss = loop.step(watched)
            if loop.done % 10 == 0:
                print(f"step {loop.done}: loss {loss.item():.3f}", flush=True)
            exploded_for += watched.verdict != "stable"
    return watched.verdict


def step(checkpoint: str, attention: Callable[[int], Callable[..., Tensor]], steps: int, watch: Any) -> None:
    """Train a branch for ``flashpoint localize``."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        return attention(module.layer_idx + 1)(q, k, v, is_causal=True, scale=scaling).transpose(1, 2), None

    AttentionInterface.register("branch", attend)
    AttentionMaskInterface.register("branch", sdpa_mask)
    state = torch.load(checkpoint)
    loop = Loop(state["settings"], "branch")
    loop.model.load_state_dict(state["model"])
    loop.optimizer.load_state_dict(state["optimizer"])
    loop.done = state["done"]
    with watch(loop.model) as watched:
        for _ in range(steps):
            loop.step(watched)


if __name__ == "__main__":
    print(train(**dict(argument.split("=", 1) for argument in sys.argv[1:])))
