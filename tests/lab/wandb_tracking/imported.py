"""What W&B imports as a run begins, logs and ends: once, in the server that `tests.warm` forks from."""

# ruff: noqa: F401
import atexit
import os
import shutil

os.environ["WANDB_ERROR_REPORTING"] = "false"  # read as it is imported

import opentelemetry.exporter.otlp.proto.http.metric_exporter
import pandas
import requests
import wandb.apis.public
import wandb.cli.cli
import wandb.sdk.artifacts._internal_artifact
import wandb.sdk.launch.inputs.internal
import wandb.sdk.lib.gitlib
from wandb.sdk.data_types._private import MEDIA_TMP

import flashpoint.lab.wandb_tracking.client

# Folders that W&B makes as it is imported: the first fork that ends is not to remove them for all.
_SERVER = os.getpid()


def _remove(folder: str) -> None:
    if os.getpid() == _SERVER:
        shutil.rmtree(folder)


for made in (MEDIA_TMP, wandb.Artifact._TMP_DIR):
    atexit.unregister(made.cleanup)
    made._finalizer.detach()  # type: ignore[attr-defined]
    atexit.register(_remove, made.name)
