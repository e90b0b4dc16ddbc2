import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # some machines set it; then each process compiles the sources anew
sys.dont_write_bytecode = False

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported: each worker has a core

import flashpoint  # noqa: E402, F401  before PyTorch, which reads what it sets
