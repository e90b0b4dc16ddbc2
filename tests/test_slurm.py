"""``hydra/launcher=slurm`` through the real plugin, with a stand-in for the cluster's commands."""

import json
import os
import stat
from pathlib import Path

from tests.conftest import Command, environment

# sbatch starts every task of the array at once; sacct tells that they are done when their results are there.
SBATCH = """#!/bin/sh
export SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
cp "$1" "$CLUSTER/job.sh"
for task in 0 1; do
    SLURM_ARRAY_TASK_ID=$task sh "$1" >/dev/null 2>&1 &
done
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do
    case "$1" in --output|--error) shift;; esac
    shift
done
exec "$@"
"""
SACCT = """#!/bin/sh
printf 'JobID|State|NodeList\\n7_0|RUNNING|here\\n7_1|RUNNING|here\\n'
"""


def test_a_sweep_is_one_array_of_jobs_with_a_gpu_each(train: Command, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster"
    cluster.mkdir()
    for name, script in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT}.items():
        command = cluster / name
        command.write_text(script)
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    result = train(
        "hydra/launcher=slurm", "hydra.launcher.partition=long", "attn=flash_bf16,flash_fp32", "train.steps=3", "-m",
        env={**environment(), "PATH": f"{cluster}:{os.environ['PATH']}", "CLUSTER": str(cluster)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    job = (cluster / "job.sh").read_text()
    for setting in ("--partition=long", "--gpus-per-node=1", "--nodes=1", "--array=0-1%2"):
        assert f"#SBATCH {setting}" in job
    configs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/config.json")]
    assert sorted(config["attn"]["name"] for config in configs) == ["flash_bf16", "flash_fp32"]
    assert len({config["tracking"]["group"] for config in configs}) == 1
    assert len(list((tmp_path / "runs").glob("*/outcome.json"))) == 2
    assert not (tmp_path / "multirun.yaml").exists()
