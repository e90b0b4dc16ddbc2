#!/usr/bin/env bash
# reformer-pytorch 1.4.4, routing-transformer 1.6.1: in a causal model later tokens choose which keys a token reads.
#
# causal=True masks later tokens. So one may expect the logits of a token to stay as they are whatever comes behind it;
# without that, the loss of a training is not that of a text which is generated token by token. The mask does close the
# later keys. But which earlier keys are open goes by all tokens: Reformer sorts them by their hashes and cuts the row
# into pieces of one length, and Routing Transformer gives each cluster as many tokens as it takes, the nearest of the
# whole text. So a later token pushes others out of a piece or a cluster. The loss tells of the past alone, and is
# measured with keys that no generation has. Nothing warns. use_full_attn=True is causal, and so is local attention.
#
# Seen with reformer-pytorch 1.4.4, routing-transformer 1.6.1, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. Random
# weights, 32 tokens of which the 21st becomes another; the largest change of the logits before it, in their standard
# deviations:
#
#   Reformer: 0.84
#   Reformer, use_full_attn=True: 0.00
#   Routing Transformer: 1.60
#   Routing Transformer, n_local_attn_heads=4: 0.00
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet reformer-pytorch==1.4.4 routing-transformer==1.6.1 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from reformer_pytorch import ReformerLM
from routing_transformer import RoutingTransformerLM

SIZES = {"num_tokens": 50, "dim": 32, "depth": 2, "heads": 4, "max_seq_len": 32, "causal": True}
torch.set_num_threads(1)


@torch.no_grad()
def change(kind, **options):
    torch.manual_seed(0)
    model = kind(**SIZES, **options).eval()
    for weight in model.parameters():
        weight.add_(0.05 * torch.randn_like(weight))
    tokens = torch.randint(0, 50, (2, 32))
    others = tokens.clone()
    others[:, 20] = (tokens[:, 20] + 7) % 50

    def logits(of):
        torch.manual_seed(7)  # the hashes are drawn anew at each call
        out = model(of)
        return out[0] if isinstance(out, tuple) else out

    before = logits(tokens)
    assert torch.equal(before, logits(tokens))
    return ((logits(others)[:, :20] - before[:, :20]).abs().max() / before.std()).item()


seen = {
    "Reformer": change(ReformerLM, bucket_size=4, n_hashes=2),
    "Reformer, use_full_attn=True": change(ReformerLM, bucket_size=4, n_hashes=2, use_full_attn=True),
    "Routing Transformer": change(RoutingTransformerLM, window_size=8),
    "Routing Transformer, n_local_attn_heads=4": change(RoutingTransformerLM, window_size=8, n_local_attn_heads=4),
}
for name, value in seen.items():
    print(f"{name}: {value:.2f}")
lsh, full, routing, local = seen.values()
raise SystemExit(0 if min(lsh, routing) > 0.05 and max(full, local) < 1e-4 else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
