"""Runs on a real Slurm cluster, with the batch script of `manifest`.

The node's program is a stand-in that ends as the real one does, with its record.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from sm_train.entrypoints.clusters.node_record import NodeRecord
from sm_train.entrypoints.job_interface.node_description import (
    FAILED_AFTER_PROGRESS,
    FLAGGED,
    NOT_SAVED,
    RECORDS,
    STOPPED,
    UNFIT_CLUSTER,
)
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.manifest import build_manifest
from sm_train.toolkit.submit.run_bundle import bundle_of

from tests.support.cluster.slurm_cluster import Slurm, keep_code
from tests.support.run_documents import config, stage

STAGE = "256px"
PROGRAM = f"""
record=$2/algo-$SLURM_PROCID-job$SLURM_JOB_ID-$(date +%s%N)
mkdir -p $record
echo "restart ${{SLURM_RESTART_COUNT:-0}} on $SLURMD_NODENAME"
finish() {{ echo "{{\\"exit_code\\": $1, \\"x\\": 0}}" >$record/node.json; exit $1; }}
trap 'finish {STOPPED}' TERM
wait_for_a_signal() {{ while true; do sleep 0.2; done; }}
restarted=${{SLURM_RESTART_COUNT:-0}}
case $1 in
    progress) [ $restarted = 0 ] || finish 0
              sleep 2; [ $SLURM_PROCID = 1 ] || finish {FAILED_AFTER_PROGRESS}; wait_for_a_signal ;;
    error) sleep 1; [ $SLURM_PROCID = 1 ] || finish 1; wait_for_a_signal ;;
    unsaved) sleep 1; [ $SLURM_PROCID = 1 ] || finish {NOT_SAVED}; finish {STOPPED} ;;
    unfit) [ $restarted = 0 ] || finish 0
           sleep 1; echo gpu-0 >$2/{FLAGGED.rpartition("/")[2]}; finish {UNFIT_CLUSTER} ;;
    again) wait_for_a_signal ;;
    *) [ $restarted = 0 ] || finish 0; wait_for_a_signal ;;
esac
"""


def run_of(slurm: Slurm, name: str, *, budget: float | None = None, **section: Any) -> RunConfig:
    return config(
        **({} if budget is None else {"budget": {"usd": budget}}),
        name=name,
        stages=[stage(STAGE, instances=2)],
        cluster={"instance_type": "ml.g5.xlarge"},
        slurm={
            "shared_folder": str(slurm.folder / "shared"),
            "local_folder": str(slurm.folder / "disk"),
            # The nodes have one processor each.
            "options": {"exclusive": False},
            "container": False,
            "python": sys.executable,
            **section,
        },
    )


def records(slurm: Slurm, name: str) -> Path:
    return slurm.folder / "shared" / name / "checkpoints" / STAGE / RECORDS


def script(
    slurm: Slurm, name: str, behavior: str, *, then_real: bool = False, **section: Any
) -> Path:
    """Return the batch script of a run whose nodes behave so.

    With ``then_real``, a restart runs what the manifest names. ``section`` has keys of ``slurm``.
    """
    run = run_of(slurm, name, **section)
    bundle = bundle_of(run, Path())
    text = build_manifest(run, run.stages[0], "slurm", bundle, region="us-east-1", file=None).text
    (slurm.folder / "shared" / name / "logs").mkdir(parents=True)
    keep_code(slurm.folder / "shared" / name, bundle)
    program = slurm.folder / "shared" / "program.sh"
    program.write_text(PROGRAM)
    task = shlex.join(["exec", "bash", str(program), behavior, str(records(slurm, name))])
    condition = "[ ${SLURM_RESTART_COUNT:-0} != 0 ] || " if then_real else ""
    # In place of the real program, after the real code has been fetched and unpacked.
    text, replaced = re.subn(
        r"exec (\S+ -m sm_train\.entrypoints\.clusters\.start)' \|\|",
        lambda match: f"{{ {condition}{task}; }}; exec {match[1]}' ||",
        text,
    )
    assert replaced == 1
    path = slurm.folder / "shared" / f"{name}.sbatch"
    path.write_text(text)
    return path


def store(slurm: Slurm, name: str, job: str, **fields: Any) -> None:
    """Store a record of the first node of a run's job, as its first process does."""
    now, ran = time.time(), fields.pop("ran", 60.0)
    run = {"run": name, "stage": fields.pop("stage", STAGE), "platform": "slurm", "job_id": job}
    node = {"node": "algo-1", "nodes": 2, "host": "gpu-0", "machine": "gpu-0"}
    times = {"started": now - ran, "seen": now, "ran": ran}
    record = NodeRecord(instance_type="ml.g5.xlarge", **run, **node, **times, **fields)
    folder = records(slurm, name).parent
    (folder / record.folder).mkdir(parents=True)
    (folder / record.file).write_bytes(record.to_json())


def submit(slurm: Slurm, path: Path, *options: str) -> str:
    """Submit a batch script; return the job's number."""
    return slurm.run(shlex.join(["sbatch", "--parsable", *options, str(path)]))


def log(slurm: Slurm, name: str, job: str = "*") -> str:
    """Return what the jobs of a run wrote, or the one with the number ``job``."""
    folder = slurm.folder / "shared" / name / "logs"
    return "".join(path.read_text() for path in folder.glob(f"*-{job}.log"))
