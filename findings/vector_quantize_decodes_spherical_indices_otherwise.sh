#!/usr/bin/env bash
# vector-quantize-pytorch 1.32.0: a spherical ResidualLFQ decodes its own indices to other vectors than it trained on.
#
# A quantiser gives the quantised vector, on which the decoder is trained, and its indices, which are stored, or which
# a transformer learns to write. get_output_from_indices makes the vector of them. So one may expect the same vector
# up to rounding, as ResidualVQ, ResidualFSQ and ResidualLFQ give it. With spherical=True, binary spherical
# quantisation, a code is brought to the unit sphere in the forward pass. The table that decodes indices is not: with
# n bits each of its codes is sqrt(n) times as long, in every layer. The losses of the training are right, and a
# decoder gets vectors of another length from stored indices than it was trained on. Nothing warns. LFQ alone,
# spherical or not, agrees.
#
# Seen with vector-quantize-pytorch 1.32.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. 2 x 64 normal vectors
# of 8 numbers: by how much the decoded vector differs from the quantised one, as a share of the latter's norm; and
# how often as long it is:
#
#   ResidualVQ: 0.00, 1.00 times as long
#   ResidualFSQ: 0.00, 1.00 times as long
#   ResidualLFQ: 0.00, 1.00 times as long
#   LFQ, spherical: 0.00, 1.00 times as long
#   ResidualLFQ, spherical: 1.83, 2.83 times as long
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet vector-quantize-pytorch==1.32.0 torch==2.13.0 numpy
cat > "$folder/program.py" <<'PY'
import torch
from vector_quantize_pytorch import LFQ, ResidualFSQ, ResidualLFQ, ResidualVQ

torch.set_num_threads(1)
DIM = 8
QUANTISERS = {
    "ResidualVQ": lambda: ResidualVQ(dim=DIM, num_quantizers=3, codebook_size=64),
    "ResidualFSQ": lambda: ResidualFSQ(dim=DIM, num_quantizers=3, levels=[8, 5, 5]),
    "ResidualLFQ": lambda: ResidualLFQ(dim=DIM, num_quantizers=3, codebook_size=256),
    "LFQ, spherical": lambda: LFQ(dim=DIM, codebook_size=256, spherical=True),
    "ResidualLFQ, spherical": lambda: ResidualLFQ(dim=DIM, num_quantizers=3, codebook_size=256, spherical=True),
}
seen = {}
for name, make in QUANTISERS.items():
    torch.manual_seed(0)
    quantiser = make().eval()
    with torch.no_grad():
        quantised, indices = quantiser(torch.randn(2, 64, DIM))[:2]
        decode = quantiser.indices_to_codes if isinstance(quantiser, LFQ) else quantiser.get_output_from_indices
        decoded = decode(indices)
    error = float((decoded - quantised).norm() / quantised.norm())
    length = float(decoded.norm() / quantised.norm())
    seen[name] = error, length
    print(f"{name}: {error:.2f}, {length:.2f} times as long")
right = all(error < 1e-5 for error, _ in list(seen.values())[:4])
wrong = abs(seen["ResidualLFQ, spherical"][1] - DIM**0.5) < 0.05
raise SystemExit(0 if right and wrong else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
