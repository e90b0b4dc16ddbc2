"""``hydra/launcher=slurm`` through the real plugin, with a stand-in for the cluster's commands."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Command, environment

pytestmark = pytest.mark.slow

# sbatch starts every task of the array at once, from a copy of the script, which submitit moves when sbatch has ended;
# the tasks' results tell when they are done.
SBATCH = """#!/bin/sh
export SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
cp "$1" "$CLUSTER/job.sh"
for task in 0 1; do
    SLURM_ARRAY_TASK_ID=$task sh "$CLUSTER/job.sh" >/dev/null 2>&1 &
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
# A job that is put back into the queue begins anew, under its number.
SCONTROL = """#!/bin/sh
SLURM_ARRAY_TASK_ID=${2#*_} sh "$CLUSTER/job.sh" >/dev/null 2>&1 &
"""
SACCT = """#!/bin/sh
printf 'JobID|State|NodeList\\n7_0|RUNNING|here\\n7_1|RUNNING|here\\n'
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """The folder of the commands."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name, script in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT, "scontrol": SCONTROL}.items():
        command = folder / name
        command.write_text(script)
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return folder


DRY = ("-m", "hydra/launcher=slurm", "hydra.launcher.partition=long", "hydra.launcher.dry_run=true", "train.steps=3")


def submit(train: Command, cluster: Path, *choices: str, steps: int = 3) -> "subprocess.CompletedProcess[str]":
    return train(
        "hydra/launcher=slurm", "hydra.launcher.partition=long", *choices, f"train.steps={steps}", "-m",
        env={**environment(), "PATH": f"{cluster}:{os.environ['PATH']}", "CLUSTER": str(cluster)},
    )  # fmt: skip


def test_a_sweep_is_one_array_of_jobs_with_a_gpu_each(train: Command, tmp_path: Path, cluster: Path) -> None:
    """A dry run, on a machine without the cluster's commands, prints before what the cluster gets."""
    shown = train(*DRY, "attn=flash_bf16,flash_fp32")
    assert shown.returncode == 0, shown.stderr
    (line,) = [line for line in shown.stderr.splitlines() if line.startswith("not submitted: ")]
    assert [job.split()[-1] for job in line.split(";")] == ["attn=flash_bf16", "attn=flash_fp32"]
    assert not list((tmp_path / "runs").glob("*/config.json"))
    result = submit(train, cluster, "attn=flash_bf16,flash_fp32")
    assert result.returncode == 0, result.stderr
    assert shown.stdout == (cluster / "job.sh").read_text() + "\n"
    job = (cluster / "job.sh").read_text()
    for setting in ("--partition=long", "--gpus-per-node=1", "--nodes=1", "--array=0-1%2"):
        assert f"#SBATCH {setting}" in job
    configs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/config.json")]
    assert sorted(config["attn"]["name"] for config in configs) == ["flash_bf16", "flash_fp32"]
    assert len({config["tracking"]["group"] for config in configs}) == 1
    assert len(list((tmp_path / "runs").glob("*/outcome.json"))) == 2
    assert not (tmp_path / "multirun.yaml").exists()


def test_each_hardware_of_a_sweep_is_a_script_of_its_own(train: Command) -> None:
    several = train(*DRY, "hardware=h100,any")
    assert several.stdout.count("#!/bin/bash") == 2
    assert several.stdout.count("#SBATCH --gres=gpu:h100:1") == several.stdout.count("#SBATCH --gpus-per-node=1") == 1
    assert "--array" not in several.stdout


def test_a_failed_job_is_told_in_one_line(train: Command, cluster: Path) -> None:
    result = submit(train, cluster, "attn.elsewhere=flash_fp32", "attn.layers=[9],[8]")  # the model has two
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "error: attn.layers=[9]: the model has layers 1 to 2"
    assert "Traceback" not in result.stderr


@pytest.mark.exhaustive
def test_a_job_that_is_put_back_into_the_queue_goes_on_with_its_run(
    train: Command, tmp_path: Path, cluster: Path
) -> None:
    """It began another run at step 0, and the one that it had begun stayed without an end."""
    preempt = """[ "$SLURM_ARRAY_TASK_ID$(ls "$CLUSTER/preempted")" = 0 ] && (
    until [ -e runs/*_flash_bf16_7_0/checkpoints/step-000000010.json ]; do sleep 0.05; done
    touch "$CLUSTER/preempted"
    kill -USR2 $$
) &
exec"""
    (cluster / "srun").write_text(SRUN.replace("exec", preempt))
    choices = ("attn=flash_bf16,flash_fp32", "checkpoints.interval=5")
    result = submit(train, cluster, *choices, steps=200)
    assert result.returncode == 0, result.stderr
    assert (cluster / "preempted").exists()
    outcomes = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/*/outcome.json")}
    assert len(outcomes) == len(list(tmp_path.glob("runs/*/config.json"))) == 2
    (name,) = (name for name in outcomes if "_flash_bf16_7_0" in name)
    assert json.loads((tmp_path / "runs" / name / "manifest.json").read_text())["resumed"]
    undisturbed = train("attn=flash_bf16", "train.steps=200", "run_name=undisturbed", "checkpoints.interval=5")
    assert f"digest={outcomes[name]['digest']} " in undisturbed.stdout
