import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported: each worker has a core

import flashpoint  # noqa: F401  before PyTorch, which reads what it sets
