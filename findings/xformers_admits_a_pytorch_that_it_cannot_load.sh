#!/usr/bin/env bash
# xformers 0.0.35: its wheel asks for torch 2.10 or newer, but its extension loads with 2.10.0+cu128 alone.
#
# pip installs the wheel beside any PyTorch from 2.10 on, without a word. With another one than 2.10.0+cu128 the import
# warns that the extension cannot be loaded, and goes on. `python -m xformers.info` then still calls operators of the
# extension available, among them cutlassF-pt. With torch 2.11.0+cu130 on an H200 memory_efficient_attention raises
# NotImplementedError at the first call: "xFormers wasn't build with CUDA support", for cutlassF-pt, too.
#
# Seen with xformers 0.0.35, torch 2.13.0 (CPU build) and Python 3.11, 2026-11-29; the error with torch 2.11.0+cu130:
#
#   the wheel requires: torch>=2.10
#   the import says: xFormers can't load C++/CUDA extensions. xFormers was built for PyTorch 2.10.0+cu128
#   xformers.info says: memory_efficient_attention.cutlassF-pt available
#   the extension's operators are there: False
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/pip" install --quiet --no-deps xformers==0.0.35
cat > "$folder/program.py" <<'PY'
import importlib.metadata
import re
import subprocess
import sys

requires = [line for line in importlib.metadata.requires("xformers") if line.startswith("torch")]
print("the wheel requires:", *requires)
ran = subprocess.run([sys.executable, "-m", "xformers.info"], capture_output=True, text=True, check=True)
told = " ".join((ran.stdout + ran.stderr).split())
built = re.search(r"can't load C\+\+/CUDA extensions\. xFormers was built for: PyTorch (\S+)", told)
print("the import says: xFormers can't load C++/CUDA extensions. xFormers was built for PyTorch", built and built[1])
state = re.search(r"memory_efficient_attention\.cutlassF-pt: (\w+)", told)[1]
print("xformers.info says: memory_efficient_attention.cutlassF-pt", state)
probe = "import torch, xformers; print(hasattr(torch.ops.xformers, 'efficient_attention_forward_cutlass'))"
there = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split()[-1]
print("the extension's operators are there:", there)
same = requires == ["torch>=2.10"] and built and built[1] == "2.10.0+cu128" and state == "available" and there == "False"
raise SystemExit(0 if same else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py"
