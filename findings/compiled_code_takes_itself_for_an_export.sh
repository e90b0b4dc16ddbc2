#!/usr/bin/env bash
# PyTorch 2.11.0: inside torch.compile, torch.compiler.is_exporting() is true, though nothing is exported.
#
# The function is there to tell an export from a compilation. Called by Python it does. But where torch.compile traces
# it, each compilation gets the answer of an export: Dynamo had one constant for all questions of this kind. A model
# that takes a portable path in exports, as one without custom kernels or with a fixed name, takes that path in training,
# too, as soon as it is compiled. Nothing warns. A function that Dynamo calls in place of tracing it, by
# torch.compiler.assume_constant_result, sees the truth.
#
# Seen with torch 2.11.0 and Python 3.11 on a CPU, 2026-11-30; torch 2.13.0 answers False when compiled:
#
#   eager: False, exported: True, compiled: True, compiled and not traced: False
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.11.0 numpy
cat > "$folder/program.py" <<'PY'
import torch


@torch.compiler.assume_constant_result
def asked():
    return torch.compiler.is_exporting()


class Model(torch.nn.Module):
    def forward(self, x):
        return x + torch.compiler.is_exporting()


class Asking(torch.nn.Module):
    def forward(self, x):
        return x + asked()


x = torch.zeros(1)
seen = {
    "eager": Model()(x),
    "exported": torch.export.export(Model(), (x,)).module()(x),
    "compiled": torch.compile(Model(), backend="eager", fullgraph=True)(x),
    "compiled and not traced": torch.compile(Asking(), backend="eager", fullgraph=True)(x),
}
seen = {name: bool(value) for name, value in seen.items()}
print(", ".join(f"{name}: {value}" for name, value in seen.items()))
raise SystemExit(0 if list(seen.values()) == [False, True, True, False] else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
