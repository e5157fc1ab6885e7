"""The batch script of `manifest` on a real Slurm: what is started again, and what ends."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator

import pytest
from sm_train.entrypoints.job_interface.node_description import STOPPED

from tests.conftest import Cli
from tests.support.cluster.slurm_cluster import NODES, Slurm, slurm_cluster
from tests.support.cluster.slurm_runs import log, records, run_of, script, store, submit

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def test_a_time_limit_and_a_failure_with_progress_continue_and_an_error_ends(
    slurm: Slurm,
) -> None:
    # Slurm sends SIGTERM up to a minute early.
    limited = submit(slurm, script(slurm, "limited", "waits"), "--time=3", "--nodes=1")

    failing = submit(slurm, script(slurm, "failing", "progress"))
    slurm.wait_for_job(failing, JobState="PENDING", Restarts="1")
    assert "queued again (progress), restart 0" in log(slurm, "failing")
    slurm.start_soon(failing)
    slurm.wait_for_job(failing, JobState="COMPLETED", Restarts="1")

    wrong = submit(slurm, script(slurm, "wrong", "error"))
    slurm.wait_for_job(wrong, JobState="FAILED", Restarts="0")
    assert "queued again" not in log(slurm, "wrong")

    unsaved = submit(slurm, script(slurm, "unsaved", "unsaved"))
    slurm.wait_for_job(unsaved, JobState="FAILED", Restarts="0")
    assert "queued again" not in log(slurm, "unsaved")

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
    slurm.wait_for("its steps", lambda: log(slurm, "twice", second).count("restart 0 on") == 2)
    # `stop` of the manifest: SIGTERM with time left. Slurm signals only steps that have started.
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


def test_a_lost_node_is_replaced_and_so_is_one_that_the_doctor_flagged(slurm: Slurm) -> None:
    number = submit(slurm, script(slurm, "lost", "waits"))
    slurm.wait_for("its nodes", lambda: log(slurm, "lost").count("restart 0 on gpu-") == 2)
    slurm.lose(NODES[1])
    slurm.wait_for_job(number, JobState="PENDING", Restarts="1")
    slurm.start_soon(number)
    slurm.wait_for_job(number, JobState="COMPLETED", Restarts="1")
    assert re.findall("restart 1 on (\\S+)", log(slurm, "lost")) in (
        [NODES[0], NODES[2]],
        [NODES[2], NODES[0]],
    )
    slurm.repair(NODES[1])

    number = submit(slurm, script(slurm, "flagged", "unfit"))
    slurm.wait_for_job(number, JobState="PENDING", Restarts="1", ExcNodeList=NODES[0])
    assert f"without the flagged nodes {NODES[0]}" in log(slurm, "flagged")
    slurm.start_soon(number)
    slurm.wait_for_job(number, JobState="COMPLETED", Restarts="1")
    # Where too few nodes would be left, none is excluded: the job would wait for ever.
    slurm.run(f"scontrol update nodename={NODES[2]} state=drain reason=test")
    number = submit(slurm, script(slurm, "few", "unfit"))
    slurm.wait_for_job(number, JobState="PENDING", Restarts="1", ExcNodeList="(null)")
    slurm.run(f"scancel {number}")
    slurm.run(f"scontrol update nodename={NODES[2]} state=resume")


def test_a_job_that_makes_no_progress_is_started_again_a_number_of_times(slurm: Slurm) -> None:
    number = submit(slurm, script(slurm, "fruitless", "again", max_restarts=1))
    slurm.wait_for("its start", lambda: log(slurm, "fruitless").count("restart 0 on") == 2)
    for restarts in ("1", "2"):
        slurm.run(f"scontrol requeue {number}")
        slurm.wait_for_job(number, JobState="PENDING", Restarts=restarts)
        slurm.start_soon(number)
        if restarts == "1":
            slurm.wait_for("a restart", lambda: log(slurm, "fruitless").count("restart 1 on") == 2)
    slurm.wait_for_job(number, JobState="FAILED", Restarts="2")
    assert "error: 1 restarts without a checkpoint (slurm.max_restarts)" in log(slurm, "fruitless")


def test_a_stop_in_the_queue_holds(cli: Cli, slurm: Slurm) -> None:
    number = submit(slurm, script(slurm, "stopped", "waits", then_real=True))
    slurm.wait_for("its start", lambda: log(slurm, "stopped").count("restart 0 on") == 2)
    slurm.run(f"scontrol requeue {number}")
    slurm.wait_for_job(number, JobState="PENDING", Restarts="1")
    folder = records(slurm, "stopped")
    for path in folder.glob("algo-*"):  # of the stand-in
        shutil.rmtree(path)
    commands = {"cancel": "scancel --name=stopped-256px --state=PENDING"}
    store(slurm, "stopped", number, state="ended", exit_code=STOPPED, commands=commands)
    document = run_of(slurm, "stopped").model_dump_json(exclude_unset=True)
    (folder / "run.json").write_text(document)
    stopped = cli("stop", folder.parents[1], "--json")
    assert stopped.returncode == 0, stopped.stderr
    warning = json.loads(stopped.stdout)["warning"]
    assert f"a job may still wait in the platform's queue: `{commands['cancel']}`" in warning
    slurm.start_soon(number)
    slurm.wait_for_job(number, JobState="COMPLETED", Restarts="1")
    assert log(slurm, "stopped").count("sm-train stop asks for a stop") == 2
