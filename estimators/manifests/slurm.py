"""The batch script for Slurm, on HyperPod or elsewhere.

``srun`` runs one task on each node, which starts its processes as a pod does. HyperPod repeats the
step on replaced nodes (SageMaker developer guide, "SageMaker HyperPod auto-resume", read 2026-11).
"""

from __future__ import annotations

import shlex

from sm_train.entrypoints.common.checkpoint_layout import MARKER
from sm_train.entrypoints.common.node_description import (
    FAILED_AFTER_PROGRESS,
    RECORDS,
    STOPPED,
    NodeChannel,
)
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import (
    StageJob,
    mounted,
    start_command,
)

HYPERPOD_FOLDER = "/opt/sagemaker_cluster"
"""Exists on the nodes of HyperPod (awslabs/awsome-distributed-training, its batch scripts)."""

STOP_SECONDS = 120
"""Seconds before the time limit at which Slurm sends SIGTERM. A training job has as many."""


def batch_script(job: StageJob) -> str:
    """Return the batch script.

    Raises:
        ManifestError: the run file lacks a key of ``slurm``.
    """
    slurm = job.config.slurm
    if slurm.shared_folder is None:
        raise ManifestError(
            "slurm.shared_folder: not set; write a folder that all nodes share, such as "
            "/fsx/sm-train"
        )
    folder = f"{slurm.shared_folder.rstrip('/')}/{job.config.name}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(job, folder)),
        *(f"# {name}: {value}" for name, value in job.annotations.items()),
        "set -euo pipefail",
        *(f"module load {name}" for name in slurm.modules),
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in _variables(job, folder).items()),
        # Each node has the folders of a training job on its own disk.
        f"export SAGEMAKER_BASE_DIR={slurm.local_folder.rstrip('/')}/sm-train-$SLURM_JOB_ID",
        "",
        "# The code, fetched once for all nodes; another digest ends the job.",
        f"code={folder}/code/{job.bundle.sha256[:16]}",
        f"archive=$code/{ARCHIVE_NAME}",
        f'check() {{ echo "{job.bundle.sha256}  $archive" | sha256sum --check --quiet -; }}',
        'mkdir -p "$code"',
        "if ! check &>/dev/null; then",
        f'    aws s3 cp --only-show-errors {shlex.quote(job.code_uri)} "$archive"',
        "    check",
        "fi",
        "",
        "# HyperPod repeats the step on replaced nodes; only its srun has this option.",
        "resume=()",
        f"if [ -d {HYPERPOD_FOLDER} ]; then resume=(--auto-resume=1); fi",
        'begin=$(mktemp "$code/.begin-XXXXXX")',
        "status=0",
        f'{_srun(job)} bash -c {shlex.quote(_task(job))} start "$archive" || status=$?',
        *_start_again(f"{folder}/checkpoints/{job.stage.name}"),
    ]
    return "\n".join(lines) + "\n"


def _start_again(stage: str) -> list[str]:
    """Return the lines that queue the job again after a failure with progress, or a time limit.

    ``stage`` is its checkpoint folder. Slurm itself queues it after a preemption or the loss
    of a node. A stop on request ends with 0, and `scancel` leaves time. srun returns the highest
    exit code of its tasks, of which those that it kills may have another: what the nodes recorded
    counts.
    """
    progress, stopped = (f'"exit_code": {code}[,}}]' for code in (FAILED_AFTER_PROGRESS, STOPPED))
    return [
        "",
        "# Continue after a failure with a new checkpoint, and after a time limit.",
        "again=",
        'if [ "$status" -ne 0 ]; then',
        f'    found=$(find {stage}/{RECORDS} -name node.json -newer "$begin" 2>/dev/null || true)',
        f"    if grep -qE '{progress}' $found /dev/null; then again=progress; fi",
        f"    if [ \"$status\" -eq {STOPPED} ] || grep -qE '{stopped}' $found /dev/null; then",
        "        export SLURM_TIME_FORMAT=standard",
        '        end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e || true)',
        '        [ -z "$end" ] || end=$(date -d "$end" +%s 2>/dev/null || true)',
        f'        saved=$(find {stage} -name {MARKER} -newer "$begin" 2>/dev/null || true)',
        f'        [ -n "$saved" ] || [ "${{SLURM_RESTART_COUNT:-0}}" -lt {_RESTARTS} ] || end=',
        f'        if [ -n "$end" ] && [ $((end - $(date +%s))) -le {_LAST_SECONDS} ]; then',
        "            again=time",
        "        fi",
        "    fi",
        "fi",
        'rm -f "$begin"',
        'if [ -n "$again" ]; then',
        '    echo "sm-train: queued again ($again), restart ${SLURM_RESTART_COUNT:-0}"',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$status"',
    ]


_RESTARTS = 3
"""How often a job continues after a time limit in which it stored no checkpoint."""

_LAST_SECONDS = 2 * STOP_SECONDS
"""Time that is left at most when a job has saved its checkpoint because of its time limit. Slurm
sends the signal up to a minute early (sbatch's manual, --signal)."""


def _options(job: StageJob, folder: str) -> list[str]:
    options: dict[str, str | bool] = {
        "job-name": job.name,
        # A second job of this name and user waits for the end of the first.
        "dependency": "singleton",
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "gres": f"gpu:{job.instance.accelerators}",
        "exclusive": True,
        # Where memory is a resource, exclusive nodes grant none of it.
        "mem": "0",
        "requeue": True,
        "time": str(-(-job.config.cluster.max_runtime // 60)),
        "signal": f"TERM@{STOP_SECONDS}",
        "open-mode": "append",
        "output": f"{folder}/logs/%x-%j.log",
        **job.config.slurm.options,
    }
    return [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if value is not False
    ]


def _srun(job: StageJob) -> str:
    slurm = job.config.slurm
    # One task has all processors of its node; srun does not take their number from sbatch.
    words = ["srun", '"${resume[@]}"', "--label", "--kill-on-bad-exit=1", "--cpu-bind=none"]
    words.append("${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}")
    if slurm.container:
        folders = dict.fromkeys(
            folder
            for folder in (slurm.shared_folder, slurm.local_folder, slurm.data_folder)
            if folder
        )
        mounts = ",".join(f"{folder}:{folder}" for folder in folders)
        image = shlex.quote(enroot_image(slurm.image or job.image))
        words += [f"--container-image={image}", f"--container-mounts={mounts}"]
    return " ".join(words)


def enroot_image(image: str) -> str:
    """Return an image as enroot reads it: REGISTRY#NAME:TAG, or the path of a squash file.

    Without the separator, enroot asks Docker Hub for an image of this long name (NVIDIA/enroot,
    doc/cmd/import.md).
    """
    registry, slash, name = image.partition("/")
    is_registry = "." in registry or ":" in registry or registry == "localhost"
    if image.startswith("/") or "#" in image or not slash or not is_registry:
        return image
    return f"{registry}#{name}"


def _task(job: StageJob) -> str:
    """Return what each node runs; ``$1`` is the archive."""
    return start_command('"$1"', '"$SAGEMAKER_BASE_DIR/input/data/code"', job.config.slurm.python)


def _variables(job: StageJob, folder: str) -> dict[str, str]:
    checkpoints = f"{folder}/checkpoints"
    return job.variables(_channels(job, checkpoints), f"{checkpoints}/{job.stage.name}")


def _channels(job: StageJob, checkpoints: str) -> list[NodeChannel]:
    slurm = job.config.slurm
    data, previous = job.channels()
    if slurm.data == "shared":
        # The run file's own check requires both.
        assert slurm.data_folder is not None
        assert slurm.data_s3 is not None
        data = mounted(data, slurm.data_folder, slurm.data_s3, "slurm.data_s3")
    return [*data, *job.in_shared_checkpoints(previous, checkpoints)]
