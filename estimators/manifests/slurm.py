"""The batch script for Slurm, on HyperPod or elsewhere.

``srun`` runs one task on each node, which starts its processes as a pod does. HyperPod repeats the
step on replaced nodes (SageMaker developer guide, "SageMaker HyperPod auto-resume", read 2026-11).
"""

from __future__ import annotations

import re
import shlex
from importlib.resources import files

from sm_train.entrypoints.job_interface.checkpoint_layout import MARKER
from sm_train.entrypoints.job_interface.node_description import (
    FAILED_AFTER_PROGRESS,
    FLAGGED,
    NOT_SAVED,
    RECORDS,
    STOPPED,
    UNFIT_CLUSTER,
    NodeChannel,
)
from sm_train.estimators.bundle.bundle import ARCHIVE_NAME
from sm_train.estimators.config.platforms import SlurmSection
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import (
    START_MODULE,
    WATCH_MODULE,
    StageJob,
    is_watched,
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
    folder = run_folder(job.config)
    stage = f"{folder}/checkpoints/{job.stage.name}"
    local = f"{slurm.local_folder.rstrip('/')}/sm-train-$UID-{job.name}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(job, folder)),
        *(f"# {name}: {value}" for name, value in job.annotations.items()),
        "set -euo pipefail",
        *(f"module load {name}" for name in slurm.modules),
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in _variables(job, folder).items()),
        # Each node has the folders of a training job on its own disk. They are the run's: the next
        # attempt uses what they hold.
        f"export SAGEMAKER_BASE_DIR={local}",
        "",
        "# Each node fetches the code unless another has; another digest ends the job.",
        f"export code={code_folder(job.config, job.bundle.sha256)}",
        'mkdir -p "$code"',
        f"fetch={shlex.quote(_fetch(job))}",
        "",
        "# HyperPod repeats the step on replaced nodes; only its srun has this option.",
        "resume=()",
        f"if [ -d {HYPERPOD_FOLDER} ]; then resume=(--auto-resume=1); fi",
        *_watch(job),
        *_count_starts(stage, slurm.max_restarts),
        "status=0",
        f"{_task(job, START_MODULE)} || status=$?",
        *_start_again(stage, job.nodes, slurm.max_restarts, _stop_seconds(slurm)),
    ]
    return "\n".join(lines) + "\n"


def run_folder(config: RunConfig) -> str:
    """Return the run's folder, which all nodes share."""
    return f"{(config.slurm.shared_folder or '').rstrip('/')}/{config.name}"


def code_folder(config: RunConfig, sha256: str) -> str:
    """Return the folder of the bundle with a digest, which all nodes share."""
    return f"{run_folder(config)}/code/{sha256[:16]}"


def watch_entry(job: StageJob, script: str) -> str:
    """Return the entry of Slurm's crontab that watches the run from outside of its nodes.

    ``script`` is the batch script, of which a copy stays in the run's folder.
    """
    slurm = job.config.slurm
    kept = {
        name: value
        for name, value in slurm.options.items()
        if name in ("account", "partition", "qos") and isinstance(value, str)
    }
    options = {
        "job-name": f"{job.name}-watch",
        "ntasks": "1",
        "mem": "1G",
        "time": str(_WATCH_MINUTES),
        "open-mode": "append",
        "output": f"{run_folder(job.config)}/logs/%x.log",
        **kept,
    }
    words = " ".join(f"--{name}={value}" for name, value in options.items())
    return f"#SCRON {words}\n{slurm.watch_schedule} bash {script} watch"


_WATCH_MINUTES = 10
"""Time for one check, with the installation of packages."""


def _watch(job: StageJob) -> list[str]:
    """Return the lines that check the run once, as Slurm's crontab calls them."""
    if not is_watched(job.config, job.config.slurm.watch_schedule):
        return []
    return [
        "",
        'if [ "${1:-}" = watch ]; then',
        '    export SAGEMAKER_BASE_DIR="$SAGEMAKER_BASE_DIR-watch"',
        f"    exec {_task(job, WATCH_MODULE)}",
        "fi",
    ]


def _count_starts(stage: str, most: int) -> list[str]:
    """Return the lines that end a job which Slurm starts again and again without progress.

    ``stage`` is its checkpoint folder. The file holds how often the job has started since it stored
    a checkpoint, and its time is that of the newest start.
    """
    return [
        "",
        "# Starts of this job since it last stored a checkpoint.",
        f"mkdir -p {stage}/{RECORDS}",
        f"begin={stage}/{RECORDS}/.starts-$SLURM_JOB_ID",
        # A cluster may count its jobs from 1 again.
        '[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || rm -f "$begin"',
        "restarts() {",
        "    local saved",
        f'    saved=$(find {stage} -name {MARKER} -newer "$begin" 2>/dev/null || true)',
        '    if [ -n "$saved" ] || [ ! -s "$begin" ]; then echo 0; else cat "$begin"; fi',
        "}",
        f'if [ "$(restarts)" -gt {most} ]; then',
        f'    echo "sm-train: error: {most} restarts without a checkpoint (slurm.max_restarts)"',
        "    exit 1",
        "fi",
        'starts=$(($(restarts) + 1)); echo "$starts" >"$begin"',
    ]


def _start_again(stage: str, nodes: int, most: int, stop_seconds: int) -> list[str]:
    """Return the lines that queue the job again after a failure with progress, or a time limit.

    ``stage`` is its checkpoint folder. Slurm sends SIGTERM ``stop_seconds`` before the time limit,
    and up to a minute earlier (sbatch's manual, --signal). Slurm itself queues the job after a
    preemption or the loss of a node. A stop on request ends with 0, `scancel` leaves time, and a
    checkpoint that could not be stored ends the job. srun returns the highest exit code of its
    tasks, of which those that it kills may have another: what this job's nodes recorded counts.

    Nodes that the doctor has flagged are excluded, as long as the partition has enough others.
    """
    codes = (FAILED_AFTER_PROGRESS, STOPPED, NOT_SAVED, UNFIT_CLUSTER)
    progress, stopped, unsaved, unfit = (f'"exit_code": {code}[,}}]' for code in codes)
    return [
        "",
        "# Continue after a failure with a new checkpoint, after a time limit, and without nodes",
        "# that have been flagged.",
        "again=",
        f"flagged=$(cat {stage}/{FLAGGED} 2>/dev/null || true)",
        'if [ "$status" -ne 0 ]; then',
        f'    own=$(find {stage}/{RECORDS} -path "*-job$SLURM_JOB_ID-*" -name node.json \\',
        '        -newer "$begin" 2>/dev/null || true)',
        f"    if grep -qE '{progress}' $own /dev/null; then again=progress; fi",
        f"    if [ \"$status\" -eq {STOPPED} ] || grep -qE '{stopped}' $own /dev/null; then",
        "        export SLURM_TIME_FORMAT=standard",
        '        end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e || true)',
        '        [ -z "$end" ] || end=$(date -d "$end" +%s 2>/dev/null || true)',
        f'        if [ -n "$end" ] && [ $((end - $(date +%s))) -le {stop_seconds + 120} ]; then',
        "            again=time",
        "        fi",
        "    fi",
        f"    if [ -n \"$flagged\" ] && grep -qE '{unfit}' $own /dev/null; then again=unfit; fi",
        f"    if grep -qE '{unsaved}' $own /dev/null; then again=; fi",
        f'    if [ "$(restarts)" -gt {most} ]; then again=; fi',
        "fi",
        'if [ -n "$again" ]; then',
        '    echo "sm-train: queued again ($again), restart ${SLURM_RESTART_COUNT:-0}"',
        "    # Slurm also stops this script, and excludes nodes of jobs in the queue only.",
        "    trap '' TERM",
        "    for attempt in 1 2 3 4 5 6 7 8 9 10; do  # slurmctld may restart",
        '        if scontrol requeue "$SLURM_JOB_ID"; then break; fi',
        '        if [ "$attempt" -eq 10 ]; then exit "$status"; fi',
        "        sleep 30",
        "    done",
        "fi",
        'if [ -n "$again" ] && [ -n "$flagged" ]; then',
        "    usable=$(",
        '        sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format="%N %t" |',
        "        awk '$2 ~ /^(idle|alloc|mix|comp|plnd)[-~#+%]?$/ { print $1 }' |",
        "        sort --unique || true)",
        '    left=$(grep -v \'^$\' <<<"$usable" | grep -vxFc "$flagged" || true)',
        '    job=$(scontrol show job --oneliner "$SLURM_JOB_ID" || true)',
        "    present=$(sed -n 's/.* ExcNodeList=\\([^ ]*\\).*/\\1/p' <<<\"$job\")",
        "    # Nodes that the user demands stay.",
        f'    if [ "$left" -ge {nodes} ] && [[ "$job" == *" ReqNodeList=(null)"* ]]; then',
        '        excluded=$(paste --serial --delimiters=, <<<"$flagged")',
        '        [ -z "$present" ] || [ "$present" = "(null)" ] || excluded="$present,$excluded"',
        "        for attempt in 1 2 3 4 5; do",
        '            if scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$excluded"; then',
        '                echo "sm-train: without the flagged nodes" $flagged; break',
        "            fi",
        "            sleep 1",
        "        done",
        "    fi",
        "fi",
        'exit "$status"',
    ]


def _stop_seconds(slurm: SlurmSection) -> int:
    """Return how long before the time limit Slurm sends SIGTERM."""
    found = re.search(r"@(\d+)$", str(slurm.options.get("signal", "")))
    return int(found[1]) if found else STOP_SECONDS


def default_minutes(config: RunConfig) -> int:
    """Return the time limit of a job without one in ``slurm.options``, in Slurm's minutes."""
    return -(-config.cluster.max_runtime // 60)


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
        "time": str(default_minutes(job.config)),
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
        image = shlex.quote(enroot_image(slurm.image or _image(job)))
        words += [f"--container-image={image}", f"--container-mounts={mounts}"]
    return " ".join(words)


def _image(job: StageJob) -> str:
    """Return the image of other platforms.

    Raises:
        ManifestError: there is none.
    """
    try:
        return job.image
    except ManifestError:
        raise ManifestError(
            "slurm.image: not set; write an image with PyTorch, or slurm.container: false to run "
            "slurm.python of the nodes"
        ) from None


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


def _fetch(job: StageJob) -> str:
    """Return the lines with which a node fetches the code; they need Python and boto3 only."""
    archive, uri = f"$code/{ARCHIVE_NAME}", shlex.quote(job.code_uri)
    source = files("sm_train.entrypoints.storage") / "fetch_object.py"
    program = source.read_text().rpartition('"""')[2].lstrip()
    return f"""
check() {{ echo "{job.bundle.sha256}  $1" | sha256sum --check --status -; }}
if ! check "{archive}" 2>/dev/null; then
    own="$SAGEMAKER_BASE_DIR/{ARCHIVE_NAME}" shared="{archive}.$SLURM_JOB_ID-$SLURM_PROCID"
    mkdir -p "$SAGEMAKER_BASE_DIR"
    {job.config.slurm.python} - {uri} "$own" <<"END" && check "$own" || {{
{program}END
        echo "sm-train: error: {archive} is not the code of this run: copy "{uri}" there" >&2
        exit 1
    }}
    cp "$own" "$shared" && mv -f "$shared" "{archive}"
fi
"""


def _task(job: StageJob, module: str) -> str:
    """Return the command that runs ``module`` of the bundle on each node."""
    code, archive = '"$SAGEMAKER_BASE_DIR/input/data/code"', f'"$code/{ARCHIVE_NAME}"'
    start = start_command(archive, code, job.config.slurm.python, module)
    return f'{_srun(job)} bash -c "$fetch"{shlex.quote(start)}'


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
