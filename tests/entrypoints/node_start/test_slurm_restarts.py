"""The batch script of `manifest` on a real Slurm: what is started again, and what ends.

The node's program is a stand-in that ends as the real one does, with its record.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from sm_train.entrypoints.common.node_description import FAILED_AFTER_PROGRESS, RECORDS, STOPPED
from sm_train.estimators.manifests.manifest import build_manifest
from sm_train.toolkit.submit.run_bundle import bundle_of

from tests.support.cluster.slurm_cluster import Slurm, slurm_cluster
from tests.support.run_documents import config, stage

pytestmark = pytest.mark.integration

STAGE = "256px"
PROGRAM = f"""
record=$2/algo-$SLURM_PROCID-job$SLURM_JOB_ID-$(date +%s%N)
mkdir -p $record
echo "restart ${{SLURM_RESTART_COUNT:-0}} on $(hostname)"
finish() {{ echo "{{\\"exit_code\\": $1, \\"x\\": 0}}" >$record/node.json; exit $1; }}
trap 'finish {STOPPED}' TERM
wait_for_a_signal() {{ while true; do sleep 0.2; done; }}
restarted=${{SLURM_RESTART_COUNT:-0}}
case $1 in
    progress) [ $restarted = 0 ] || finish 0
              sleep 2; [ $SLURM_PROCID = 1 ] || finish {FAILED_AFTER_PROGRESS}; wait_for_a_signal ;;
    error) sleep 1; [ $SLURM_PROCID = 1 ] || finish 1; wait_for_a_signal ;;
    *) [ $restarted = 0 ] || finish 0; wait_for_a_signal ;;
esac
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def script(slurm: Slurm, name: str, behavior: str) -> Path:
    """Return the batch script of a run whose nodes behave so."""
    run = config(
        name=name,
        stages=[stage(STAGE, instances=2)],
        cluster={"instance_type": "ml.g5.xlarge"},
        slurm={
            "shared_folder": str(slurm.folder / "shared"),
            "local_folder": str(slurm.folder / "disk"),
            # The nodes have one processor each.
            "options": {"exclusive": False},
            "container": False,
            "python": "python3",
        },
    )
    text = build_manifest(
        run, run.stages[0], "slurm", bundle_of(run, Path()), region="us-east-1", file=None
    ).text
    (slurm.folder / "shared" / name / "logs").mkdir(parents=True)
    program = slurm.folder / "shared" / "program.sh"
    program.write_text(PROGRAM)
    records = slurm.folder / "shared" / name / "checkpoints" / STAGE / RECORDS
    task = shlex.join(["bash", str(program), behavior, str(records)])
    text, replaced = re.subn(r" bash -c '.*' start \"\$archive\" \|\|", f" {task} ||", text)
    assert replaced == 1
    text, replaced = re.subn(r"if ! check &>/dev/null; then", "if false; then", text)
    assert replaced == 1
    path = slurm.folder / "shared" / f"{name}.sbatch"
    path.write_text(text)
    return path


def submit(slurm: Slurm, path: Path, *options: str) -> str:
    """Submit a batch script; return the job's number."""
    return slurm.run(shlex.join(["sbatch", "--parsable", *options, str(path)]))


def log(slurm: Slurm, name: str) -> str:
    return "".join(path.read_text() for path in (slurm.folder / "shared" / name / "logs").iterdir())


def test_a_time_limit_and_a_failure_with_progress_continue_and_an_error_ends(
    slurm: Slurm,
) -> None:
    failing = submit(slurm, script(slurm, "failing", "progress"))
    slurm.wait_for_job(failing, JobState="PENDING", Restarts="1")
    assert "queued again (progress), restart 0" in log(slurm, "failing")
    slurm.start_soon(failing)
    slurm.wait_for_job(failing, JobState="COMPLETED", Restarts="1")

    wrong = submit(slurm, script(slurm, "wrong", "error"))
    slurm.wait_for_job(wrong, JobState="FAILED", Restarts="0")
    assert "queued again" not in log(slurm, "wrong")

    # Slurm sends SIGTERM up to a minute early.
    limited = submit(slurm, script(slurm, "limited", "waits"), "--time=3")
    slurm.wait_for_job(limited, JobState="PENDING", Restarts="1")
    assert "queued again (time), restart 0" in log(slurm, "limited")
    slurm.start_soon(limited)
    slurm.wait_for_job(limited, JobState="COMPLETED", Restarts="1")


def test_a_second_job_waits_and_scancel_ends_the_first(slurm: Slurm) -> None:
    path = script(slurm, "twice", "waits")
    first, second = submit(slurm, path), submit(slurm, path)
    slurm.wait_for_job(first, JobState="RUNNING")
    slurm.wait_for_job(second, JobState="PENDING", Reason="Dependency")
    slurm.run(f"scancel {first}")
    slurm.wait_for_job(first, JobState="CANCELLED", Restarts="0")
    slurm.wait_for_job(second, JobState="RUNNING")
    # `stop` of the manifest: SIGTERM with time left.
    slurm.run("scancel --name=twice-256px --signal=TERM")
    slurm.wait_for_job(second, JobState="FAILED", Restarts="0")
    assert "queued again" not in log(slurm, "twice")


def test_a_preempted_job_is_queued_again_by_slurm(slurm: Slurm) -> None:
    low = submit(slurm, script(slurm, "preempted", "waits"), "--nodes=2")
    slurm.wait_for_job(low, JobState="RUNNING")
    high = submit(slurm, script(slurm, "urgent", "waits"), "--partition=urgent")
    slurm.wait_for_job(low, JobState="PENDING", Restarts="1")
    slurm.wait_for_job(high, JobState="RUNNING")
    slurm.run(f"scancel {high}")
    slurm.start_soon(low)
    slurm.wait_for_job(low, JobState="COMPLETED", Restarts="1")
