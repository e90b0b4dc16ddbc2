"""A GPT-2 or Llama of Transformers in a plain loop: watched, and with an attention that holds.

pip install transformers
python examples/transformers_gpt2.py                                       # PyTorch's attention
python examples/transformers_gpt2.py attention=flash_fixed                 # the drop-in
python examples/transformers_gpt2.py model=llama                           # grouped-query heads
"""

import sys
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import flashpoint
from flashpoint.huggingface import implementation

SETTINGS = {"attention": "sdpa", "model": "gpt2", "steps": "200", "layers": "2", "heads": "4", "width": "64",
            "context": "64", "batch": "8", "lr": "1e-3", "name": "transformers", "runs": "runs"}  # fmt: skip


def build(settings: dict[str, str], attention: str) -> Any:
    layers, heads, width, context = (int(settings[name]) for name in ("layers", "heads", "width", "context"))
    torch.manual_seed(0)
    if settings["model"] == "llama":
        config: Any = LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=context,
        )  # fmt: skip
        return LlamaForCausalLM._from_config(config, attn_implementation=attention)
    config = GPT2Config(
        vocab_size=256, n_embd=width, n_layer=layers, n_head=heads, n_positions=context, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel._from_config(config, attn_implementation=attention)


def train(text: bytes, attention: str, **changed: str) -> float:
    """Train on a text's bytes with an attention of Transformers; return the last loss."""
    settings = {**SETTINGS, **changed}
    context, batch, steps = (int(settings[name]) for name in ("context", "batch", "steps"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(settings, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(settings["lr"]), betas=(0.9, 0.95))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    order = torch.Generator().manual_seed(0)
    loss = torch.zeros(())
    with flashpoint.watch(model, name=settings["name"], runs_dir=settings["runs"], steps=steps) as watched:
        for step in range(steps):
            starts = torch.randint(len(data) - context, (batch,), generator=order)
            sequences = torch.stack([data[start : start + context] for start in starts]).to(device)
            if step == steps - 1:
                watched.capture()
            with torch.autocast(device, torch.bfloat16):
                loss = model(sequences, labels=sequences).loss
            loss.backward()
            watched.step(loss, sequences)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    return loss.item()


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    with open(given.pop("text", __file__), "rb") as file:
        content = file.read()
    chosen = given.pop("attention", "sdpa")
    chosen = "sdpa" if chosen == "sdpa" else implementation(chosen)
    print(f"loss {train(content, chosen, **given):.3f}")
