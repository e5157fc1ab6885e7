"""A run's life from a laptop that knows nothing of it: status, stop, resume, watch, bad days."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sm_train.toolkit.records.training_job import STOPPED_TAG
from sm_train.toolkit.runs.watch.lambda_handler import handler

from tests.conftest import Aws, Cli, clean_environment
from tests.support.deadline import DEADLINE
from tests.support.fake_services import FakeResponse, fake_server
from tests.support.restricted_imports import RESTRICT_IMPORTS, lambda_packages
from tests.support.run_documents import stage
from tests.support.run_files import one_line, write_run
from tests.support.webhook_server import webhook_server
from tests.toolkit.runs import run_lifecycle_support
from tests.toolkit.runs.run_lifecycle_support import FIRST, SECOND, Laptop

laptop = run_lifecycle_support.laptop

LAMBDA_CALL = """
from sm_train.toolkit.runs.watch.lambda_handler import handler
handler({}, None)
"""


@pytest.mark.slow
def test_status_needs_only_the_runs_name(laptop: Laptop) -> None:
    """No file is given, and no state is kept on a laptop."""
    laptop.sagemaker.log_event(FIRST, "start", ago=400)
    laptop.sagemaker.log_event(FIRST, "step", step=400, steps_per_second=2.0, loss=0.5)
    laptop.sagemaker.checkpoint("256px", 300)
    document = laptop.json("status", "demo")
    [stage_status] = document["stages"]
    assert (document["state"], document["stage"]) == ("training", "256px")
    assert (stage_status["step"], stage_status["checkpoint_step"]) == (400, 300)
    assert stage_status["max_steps"] == 1000
    assert stage_status["remaining_seconds"] == pytest.approx(300)
    rate = 4 * 31.5641075 / 3600
    assert document["spent_usd"] == pytest.approx(600 * rate, rel=0.1)
    assert document["projected_usd"] == pytest.approx(900 * rate, rel=0.1)
    table = laptop("status", FIRST).stdout
    assert "training" in table
    assert "sm-train watch demo" in table
    assert max(map(len, table.splitlines())) <= 100
    [listed] = laptop.json("list")["runs"]
    assert (listed["run"], listed["job"], listed["jobs"]) == ("demo", FIRST, 1)


@pytest.mark.slow
def test_submit_rejects_a_stage_that_is_live_or_done(laptop: Laptop) -> None:
    rejected = laptop("submit", laptop.run_file, "--yes", code=2)
    assert f"{FIRST} is InProgress" in rejected.stderr
    assert laptop.sagemaker.names() == [FIRST]
    laptop.sagemaker.set_status(FIRST, "Completed")
    laptop.sagemaker.checkpoint("256px", 1000)
    assert "is done" in laptop("submit", laptop.run_file, "--yes", code=2).stderr


def test_resume_after_stop_uses_the_checkpoint_and_the_same_code(laptop: Laptop) -> None:
    assert "resume demo" in laptop("stop", "demo").stderr
    assert laptop.sagemaker.tags(FIRST)["sm-train:stopped-for"] == "user"
    laptop.sagemaker.set_status(FIRST, "Stopped")
    laptop.sagemaker.checkpoint("256px", 300)
    laptop.sagemaker.checkpoint("256px", 400, complete=False)
    watched = laptop.json("watch", "demo", "--once")
    assert watched["action"] == "end"
    [stage_status] = laptop.json("status", "demo")["stages"]
    assert stage_status["checkpoint_step"] == 300
    assert stage_status["incomplete_checkpoints"] == [
        {"folder": "step-00000400", "reason": "b.npz is missing"}
    ]
    laptop("resume", "demo", "--yes")
    first, second = laptop.aws.bodies("CreateTrainingJob")
    assert second["TrainingJobName"] == SECOND
    assert laptop.sagemaker.tags(SECOND)["sm-train:from-step"] == "300"
    changing = ("TrainingJobName", "Tags")
    assert {key: value for key, value in first.items() if key not in changing} == {
        key: value for key, value in second.items() if key not in changing
    }


@pytest.mark.slow
def test_resume_with_the_run_file_uses_its_new_settings(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "Stopped")
    run = write_run(laptop.folder, stages=[stage(max_steps=2000)])
    laptop("resume", run, "--yes")
    _, second = laptop.aws.bodies("CreateTrainingJob")
    assert second["TrainingJobName"] == SECOND
    assert laptop.json("status", "demo")["stages"][0]["max_steps"] == 2000


@pytest.mark.slow
def test_resume_of_a_one_node_stage_keeps_the_program_of_the_run(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    """SMDDP of the later stages decides on the image: alone, one node would get another one."""
    stages = [stage(instances=1), stage("512px", resolution=512, instances=4)]
    cluster = {"instance_type": "ml.p4de.24xlarge", "backend": "smddp"}
    laptop = Laptop(cli, aws, tmp_path, submit=False, stages=stages, cluster=cluster)
    laptop("submit", laptop.run_file, "--yes")
    laptop.sagemaker.set_status(FIRST, "Stopped")
    laptop.sagemaker.checkpoint("256px", 300)
    laptop("resume", laptop.run_file, "--stage", "256px", "--yes")
    laptop.sagemaker.set_status(SECOND, "Stopped")
    laptop("resume", "demo", "--yes")
    bodies = laptop.aws.bodies("CreateTrainingJob")
    images = [body["AlgorithmSpecification"]["TrainingImage"] for body in bodies]
    assert [body["TrainingJobName"] for body in bodies] == [FIRST, SECOND, f"{SECOND[:-1]}3"]
    assert len(set(images)) == 1
    assert "pytorch-training:2.5.1" in images[0]
    environments = [body["Environment"] for body in bodies]
    assert environments[0] == environments[1] == environments[2]


@pytest.mark.slow
def test_resume_asks_with_the_cost_of_the_remaining_steps(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "Stopped")
    laptop.sagemaker.checkpoint("256px", 900)
    question = laptop("resume", "demo", code=2).stderr
    assert "Resume 256px at step 900 of 1,000, $23.00 (the run: spent $" in question
    assert laptop.sagemaker.names() == [FIRST]


@pytest.mark.integration
def test_checkpoints_of_another_platform_are_continued_only_on_request(laptop: Laptop) -> None:
    """The stage went on as a Kubernetes job after its training job had failed."""
    laptop.sagemaker.set_status(FIRST, "Failed", reason="CapacityError: none", ended_ago=3600)
    laptop.sagemaker.checkpoint("256px", 300)
    laptop.sagemaker.checkpoint("256px", 400, platform="kubernetes")
    for command in (("resume", "demo"), ("resume", laptop.run_file), ("submit", laptop.run_file)):
        refused = laptop(*command, "--yes", code=2).stderr
        assert "a job on kubernetes wrote its newest checkpoint, of step 400" in refused
        assert "--take-over" in refused
    watched = laptop.json("watch", "demo", "--once", code=2)
    assert watched["action"] == "end"
    assert "a job on kubernetes" in watched["message"]
    assert laptop.sagemaker.names() == [FIRST]
    laptop("resume", "demo", "--yes", "--take-over")
    assert laptop.sagemaker.tags(SECOND)["sm-train:from-step"] == "400"
    # The user has said that the other job has ended: retries go on from there.
    laptop.sagemaker.set_status(SECOND, "Failed", reason="CapacityError: none", ended_ago=3600)
    assert laptop.json("watch", "demo", "--once", "--dry-run")["action"] == "start"


PROJECTION = re.compile(r"spent (\$[\d,.]+), remaining (\$[\d,.]+), total (\$[\d,.]+)")


@pytest.mark.integration
def test_every_command_projects_the_same_cost(laptop: Laptop) -> None:
    # The newest interval is twice as fast as the job has been so far.
    cluster = {"world_size": 32, "effective_batch_size": 512, "resolution": 256}
    laptop.sagemaker.log_event(FIRST, "start", ago=900, **cluster)
    sums = {"timed_steps": 500, "timed_seconds": 625.0, "waited_seconds": 125.0}
    laptop.sagemaker.log_event(FIRST, "step", step=600, steps_per_second=1.6, loss=0.5, **sums)
    laptop.sagemaker.checkpoint("256px", 500)
    # Its end is known, so that the seconds billed are the same for every command.
    laptop.sagemaker.set_status(FIRST, "Stopped", seconds=900, ended_ago=100)
    documents = {"status": laptop.json("status", "demo")}
    documents["actual"] = laptop.json("cost", laptop.run_file, "--actual")["total"]
    documents["review"] = laptop.json("review", "demo")["runs"]["demo"]
    documents["watch"] = laptop.json("watch", "demo", "--once", "--dry-run")
    spent = 900 * 4 * 31.5641075 / 3600
    for document in documents.values():
        assert document.get("spent_usd", document.get("billed_usd")) == pytest.approx(spent)
        assert document["projected_usd"] == pytest.approx(spent + document["remaining_usd"])
    remaining = {document["remaining_usd"] for document in documents.values()}
    assert len(remaining) == 1
    # 500 steps from the stored checkpoint at 0.8 it/s, and a start-up.
    assert remaining.pop() == pytest.approx((625 + 600) * spent / 900, rel=0.02)
    [stage_status] = documents["status"]["stages"]
    [job] = laptop.json("review", "demo")["jobs"]
    assert stage_status["steps_per_second"] == job["steps_per_second"] == 0.8
    assert documents["watch"]["data_wait_share"] == job["data_wait_share"] == 0.2
    texts = [
        laptop("status", "demo").stdout,
        laptop("review", "demo").stdout,
        laptop("cost", laptop.run_file, "--actual").stdout,
        laptop("resume", "demo", code=2).stderr,
        laptop("resume", laptop.run_file, code=2).stderr,
    ]
    shown = [PROJECTION.search(" ".join(text.split())) for text in texts]
    assert len({match and match.groups() for match in shown}) == 1, texts


@pytest.mark.slow
def test_resume_by_name_says_which_settings_it_uses(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "Stopped")
    laptop.sagemaker.checkpoint("256px", 900)
    same = laptop("resume", "demo", code=2).stderr
    assert f"as submitted with {FIRST}" in same
    assert "differs" not in same
    text = laptop.run_file.read_text()
    changed = text.replace("learning_rate: 0.0001", "learning_rate: 0.00005")
    assert changed != text
    laptop.run_file.write_text(changed)
    (laptop.folder / "other.yaml").write_text("name: [not, a, run]")
    asked = laptop("resume", "demo", code=2).stderr
    assert f"{laptop.run_file.name} differs from them; `sm-train resume" in asked
    assert re.search(r"stages\.256px\.learning_rate +0\.0001 → 5e-05", asked)
    assert "worst case" in asked
    assert "samples" in asked
    by_file = laptop("resume", laptop.run_file, code=2).stderr
    assert f"Changes since {FIRST}" in by_file


@pytest.mark.integration
@pytest.mark.parametrize(
    "status",
    [
        {"status": "Failed", "reason": "InternalServerError: We encountered an internal error."},
        {"status": "Failed", "reason": "CapacityError: Unable to provision requested ML compute."},
        {"status": "Stopped", "secondary": "MaxRuntimeExceeded"},
        {"status": "Stopped", "secondary": "MaxWaitTimeExceeded"},
        {"status": "Stopped", "secondary": "Interrupted"},
    ],
    ids=lambda status: status.get("secondary") or status["reason"].split(":")[0],
)
def test_infrastructure_failures_are_restarted(laptop: Laptop, status: dict[str, Any]) -> None:
    laptop.sagemaker.set_status(FIRST, **status, ended_ago=3600)
    laptop.sagemaker.checkpoint("256px", 300)
    assert laptop.json("watch", "demo", "--once", "--dry-run")["action"] == "start"
    assert laptop.sagemaker.names() == [FIRST]
    assert laptop.json("watch", "demo", "--once")["action"] == "start"
    assert laptop.sagemaker.names() == [FIRST, SECOND]
    assert laptop.json("watch", "demo", "--once")["action"] == "wait"


@pytest.mark.slow
def test_user_code_failure_is_not_restarted(laptop: Laptop) -> None:
    reason = "AlgorithmError: rank 3: OutOfMemoryError: CUDA out of memory."
    laptop.sagemaker.set_status(FIRST, "Failed", reason=reason, ended_ago=3600)
    document = laptop.json("watch", "demo", "--once", code=6)
    assert reason in document["message"]
    assert laptop.json("status", "demo")["next_command"] == f"sm-train diagnose {FIRST}"
    assert laptop.sagemaker.names() == [FIRST]


@pytest.mark.slow
def test_hardware_failure_found_in_the_log_is_restarted(
    laptop: Laptop,
) -> None:
    """SageMaker reports an AlgorithmError, since the process exited; the log shows the cause."""
    laptop.sagemaker.set_status(
        FIRST, "Failed", reason="AlgorithmError: ExecuteUserScriptError: ExitCode 1", ended_ago=3600
    )
    laptop.sagemaker.log_event(FIRST, "step", ago=3700, step=10)
    laptop.aws.client("logs").put_log_events(
        logGroupName="/aws/sagemaker/TrainingJobs",
        logStreamName=f"{FIRST}/algo-1-1",
        logEvents=[
            {
                "timestamp": int((time.time() - 3650) * 1000),
                "message": "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
            }
        ],
    )
    document = laptop.json("watch", "demo", "--once")
    assert document["action"] == "start"
    assert laptop.sagemaker.tags(SECOND)["sm-train:cause"] == "gpu-ecc"


def test_stalled_job_is_stopped_and_restarted(laptop: Laptop) -> None:
    """Heartbeats continue while training hangs: the step they report counts."""
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=4 * 3600)
    laptop.sagemaker.log_event(FIRST, "step", ago=4000, step=200, steps_per_second=1.0)
    laptop.sagemaker.log_event(FIRST, "heartbeat", ago=5, step=200, seconds_since_step=3995.0)
    assert laptop.json("watch", "demo", "--once", "--dry-run", code=8)["state"] == "stalled"
    assert laptop.aws.bodies("StopTrainingJob") == []
    assert laptop.json("watch", "demo", "--once", code=8)["action"] == "stop"
    assert laptop.sagemaker.tags(FIRST)["sm-train:stopped-for"] == "stall"
    laptop.sagemaker.set_status(FIRST, "Stopped", ended_ago=3600)
    assert laptop.json("watch", "demo", "--once")["action"] == "start"


@pytest.mark.slow
def test_job_that_sagemaker_restarts_for_hours_is_left_alone(laptop: Laptop) -> None:
    """Two hours without a log line, then a restore that has logged nothing yet."""
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=8 * 3600)
    laptop.sagemaker.log_event(FIRST, "step", ago=7300, step=200, steps_per_second=1.0)
    waiting = {"Interrupted": 7200.0, "Restarting": 7100.0, "Pending": 7000.0}
    for count in range(1, len(waiting) + 1):
        laptop.sagemaker.restart(FIRST, dict(list(waiting.items())[:count]))
        found = laptop.json("watch", "demo", "--once")
        assert (found["state"], found["action"]) == ("restarting", "wait")
        assert laptop.json("status", "demo")["state"] == "restarting"
    laptop.sagemaker.restart(FIRST, {"Starting": 400.0, "Downloading": 200.0, "Training": 120.0})
    assert laptop.json("watch", "demo", "--once")["state"] == "training"
    assert laptop.aws.bodies("StopTrainingJob") == []


@pytest.mark.slow
def test_job_that_does_not_stop_is_reported_with_its_cost(laptop: Laptop) -> None:
    """SageMaker should end it within minutes, and bills it until it does."""
    laptop.sagemaker.set_status(FIRST, "Stopping", seconds=3600, ended_ago=3500)
    assert laptop.json("status", "demo")["warnings"] == []
    laptop.sagemaker.set_status(FIRST, "Stopping", seconds=3600, ended_ago=25 * 3600)
    expected = (
        f"{FIRST} has been stopping for 1.04 days, which has cost $3,1",
        ": SageMaker bills it until it has ended; ask AWS Support to end it",
    )
    [warning] = laptop.json("status", "demo")["warnings"]
    assert (warning.startswith(expected[0]), warning.endswith(expected[1])) == (True, True)
    assert "WARNING: demo--256px-0001 has been stopping" in laptop("status", "demo").stdout
    watched = laptop.json("watch", "demo", "--once")
    assert watched["action"] == "wait"
    # The cost grows from one command to the next.
    assert watched["warning"].startswith(expected[0])


@pytest.mark.slow
def test_checkpoints_that_do_not_reach_s3_are_reported(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    """The job logs one every 50 steps, and S3 holds the first."""
    laptop = Laptop(cli, aws, tmp_path, checkpoint={"every_steps": 50})
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=7200)
    laptop.sagemaker.checkpoint("256px", 50)
    logged = {50 * number: 1720 - 90 * number for number in range(1, 20)}
    for step, ago in logged.items():
        laptop.sagemaker.log_event(FIRST, "step", ago=ago + 1, step=step, steps_per_second=0.55)
        laptop.sagemaker.log_event(FIRST, "checkpoint", ago=ago, step=step)
    view = laptop("watch", "demo", "--once").stderr
    assert re.search(r"step 950, \d+ s ago; stored: step 50", view)
    # Since the second checkpoint; a slow machine may take a while until here.
    warning = re.compile(
        r"storage holds step 50 while the job saved step 950, for (2[4-9]|3\d) min"
    )
    assert warning.search(" ".join(view.split()))
    document = laptop.json("watch", "demo", "--once")
    assert warning.match(document["warning"])
    lag = document["stages"][0]["storage_lag"]
    assert (lag["saved"], lag["stored"]) == (950, 50)
    assert lag["seconds"] >= 1450
    assert warning.search(" ".join(laptop("status", "demo").stdout.split()))

    # The newest checkpoint may be on its way, and one that became due lately, too.
    laptop.sagemaker.checkpoint("256px", 900)
    document = laptop.json("watch", "demo", "--once")
    assert (document["warning"], document["stages"][0]["storage_lag"]) == (None, None)
    laptop.sagemaker.checkpoint("256px", 950)
    assert "step 950, " in (view := laptop("watch", "demo", "--once").stderr)
    assert "ago; stored\n" in view


def test_a_checkpoint_an_hour_that_does_not_reach_s3_is_reported(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    """No event of a checkpoint is in the lines that are read: the heartbeat repeats them."""
    laptop = Laptop(cli, aws, tmp_path, checkpoint={"every_steps": 1000})
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=9 * 3600)
    laptop.sagemaker.checkpoint("256px", 1000)
    ages = {7000: 9600.0, 8000: 6000.0, 9000: 2400.0}
    heartbeat = {"step": 9600, "seconds_since_step": 1.0, "saves": [*ages.items()]}
    laptop.sagemaker.log_event(FIRST, "heartbeat", ago=5, unstored_seconds=25_200.0, **heartbeat)
    document = laptop.json("watch", "demo", "--once")
    warning = re.compile("storage holds step 1,000 while the job saved step 9,000, for 42[01] min")
    assert warning.match(document["warning"])
    assert document["seconds_since_checkpoint"] == pytest.approx(2405, abs=60)
    assert warning.search(" ".join(laptop("status", "demo").stdout.split()))
    assert re.search(
        r"step 9,000, 40 min ago; stored: step 1,000", laptop("watch", "demo", "--once").stderr
    )

    # The node's notes are wrong, or missing: the age of its saves remains.
    laptop.sagemaker.log_event(FIRST, "heartbeat", ago=3, unstored_seconds=None, **heartbeat)
    assert "for 160 min" in laptop.json("watch", "demo", "--once")["warning"]


def test_spent_budget_stops_the_job(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    laptop = Laptop(cli, aws, tmp_path, budget={"usd": 100})
    seconds = 100 / (4 * 31.5641075) * 3600 + 60
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=seconds)
    laptop.sagemaker.log_event(FIRST, "step", step=200, steps_per_second=1.0)
    assert laptop.json("watch", "demo", "--once", code=7)["action"] == "stop"
    assert len(aws.bodies("StopTrainingJob")) == 1
    laptop.sagemaker.set_status(FIRST, "Stopped", seconds=seconds)
    assert "budget" in laptop.json("watch", "demo", "--once", code=7)["message"]
    assert laptop.sagemaker.names() == [FIRST]


HOUR = 3600.0

SPOT_RUN: dict[str, Any] = {
    "cluster": {
        "instance_type": "ml.p4de.24xlarge",
        "capacity": "spot",
        "max_runtime": "5d",
        "max_wait": "10d",
    },
    "stages": [stage(max_steps=100_000, steps_per_second=2.0)],
}
ON_DEMAND_USD = 31.5641075


def cache_spot_price(laptop: Laptop, usd: float | None) -> None:
    """Store the spot price as `cost --refresh` does, or forget it."""
    cache = laptop.folder / "cache" / "sm-train" / "prices.json"
    laptop.environment["XDG_CACHE_HOME"] = str(laptop.folder / "cache")
    cache.unlink(missing_ok=True)
    if usd is None:
        return
    rows = [
        {
            "instance_type": "ml.p4de.24xlarge",
            "region": "us-east-1",
            "kind": kind,
            "usd_per_hour": str(amount),
            "status": "verified",
            "source": "AWS Price List",
            "date": "2026-11-20",
        }
        for kind, amount in (("on-demand", ON_DEMAND_USD), ("spot", usd))
    ]
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps({"version": 1, "rows": rows, "listed": {}}))


@pytest.mark.integration
def test_spot_run_that_was_accepted_is_not_stopped_by_its_own_budget(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    """At the on-demand price it had spent its budget after a third of its steps."""
    laptop = Laptop(cli, aws, tmp_path, budget={"usd": 600}, submit=False, **SPOT_RUN)
    cache_spot_price(laptop, 9.47)
    laptop("submit", laptop.run_file, "--yes")
    assert laptop.sagemaker.tags(FIRST)["sm-train:price"] == "us-east-1/ml.p4de.24xlarge/spot=9.47"
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=13 * HOUR)
    laptop.sagemaker.log_event(FIRST, "step", step=93_000, steps_per_second=2.0)
    for known in (9.47, None):  # the laptop that submitted it, and a machine without its prices
        cache_spot_price(laptop, known)
        document = laptop.json("watch", "demo", "--once")
        assert document["action"] == "wait"
        assert document["spent_usd"] == pytest.approx(13 * 4 * 9.47, rel=0.01)
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=16 * HOUR)
    assert laptop.json("watch", "demo", "--once", code=7)["action"] == "stop"


@pytest.mark.slow
def test_spot_run_without_a_price_counts_at_the_on_demand_price_as_its_plan_says(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    laptop = Laptop(cli, aws, tmp_path, budget={"usd": 600}, submit=False, **SPOT_RUN)
    cache_spot_price(laptop, None)
    plan = " ".join(laptop("submit", laptop.run_file, "--dry-run").stdout.split())
    assert "`watch` may stop the run after 4.8 h already" in plan
    assert "stops the run there" not in plan
    laptop("submit", laptop.run_file, "--yes")
    assert "sm-train:price" not in laptop.sagemaker.tags(FIRST)
    laptop.sagemaker.log_event(FIRST, "step", step=20_000, steps_per_second=2.0)
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=4.5 * HOUR)
    document = laptop.json("watch", "demo", "--once")
    assert (document["action"], document["spent_usd"]) == ("wait", None)
    assert "its upper end counts: at most $56" in document["warning"]
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=5 * HOUR)
    assert laptop.json("watch", "demo", "--once", code=7)["action"] == "stop"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("capacity", "phases"),
    [
        ("on-demand", {"Restarting": 12.0, "Starting": 11.9}),
        ("on-demand", {"Restarting": 12.0, "Pending": 11.0}),
        ("spot", {"Interrupted": 12.0, "Starting": 11.9}),
        ("spot", {"Interrupted": 12.0}),
    ],
)
def test_hours_in_which_sagemaker_waits_cost_nothing(
    cli: Cli, aws: Aws, tmp_path: Path, capacity: str, phases: dict[str, float]
) -> None:
    """A job trained for two hours and waits for instances since twelve."""
    cluster = SPOT_RUN["cluster"] if capacity == "spot" else {"instance_type": "ml.p4de.24xlarge"}
    laptop = Laptop(cli, aws, tmp_path, budget={"usd": 1000}, **SPOT_RUN | {"cluster": cluster})
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=14 * HOUR)
    laptop.sagemaker.restart(FIRST, {name: ago * HOUR for name, ago in phases.items()})
    laptop.sagemaker.log_event(FIRST, "step", step=14_000, steps_per_second=2.0, ago=12 * HOUR)
    document = laptop.json("watch", "demo", "--once")
    assert document["action"] == "wait"
    if capacity == "on-demand":
        assert document["spent_usd"] == pytest.approx(2 * 4 * ON_DEMAND_USD, rel=0.01)
    laptop.sagemaker.restart(FIRST, {"Downloading": HOUR, "Training": 0.9 * HOUR})
    laptop.sagemaker.log_event(FIRST, "step", step=15_000, steps_per_second=2.0)
    again = laptop.json("watch", "demo", "--once")
    if capacity == "on-demand":
        assert again["spent_usd"] == pytest.approx(3 * 4 * ON_DEMAND_USD, rel=0.01)


def warm_pool(status: str, retained: int | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a filter of a job's description: its instances are kept after its end."""
    pool: dict[str, Any] = {"Status": status}
    if retained is not None:
        pool["ResourceRetainedBillableTimeInSeconds"] = retained
    return lambda description: description | {"WarmPoolStatus": pool}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "retained", "seconds"),
    [("Available", None, 6 * 3600), ("Available", 60, 6 * 3600), ("Terminated", 1800, 1800)],
)
def test_a_warm_pool_counts_as_spent(
    laptop: Laptop, aws: Aws, status: str, retained: int | None, seconds: int
) -> None:
    """Its instances are billed as those of a job; one that waits is billed until now."""
    laptop.sagemaker.set_status(FIRST, "Completed", seconds=600, ended_ago=6 * 3600)
    aws.response_filters["DescribeTrainingJob"] = warm_pool(status, retained)
    spent = laptop.json("status", "demo")["spent_usd"]
    expected = (600 + seconds) / 3600 * 4 * 31.5641075
    assert spent == pytest.approx(expected, rel=0.01)
    actual = laptop.json("cost", laptop.run_file, "--actual")["total"]
    assert actual["billed_usd"] == pytest.approx(expected, rel=0.01)


@pytest.mark.integration
def test_a_budget_stop_ends_the_warm_pool(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    """The job has spent a fifth of the budget, and the pool that keeps its instances the rest."""
    laptop = Laptop(cli, aws, tmp_path, budget={"usd": 100})
    aws.responses["UpdateTrainingJob"] = lambda body: (200, {"TrainingJobArn": "arn"})
    laptop.sagemaker.log_event(FIRST, "step", step=200, steps_per_second=1.0)
    laptop.sagemaker.set_status(FIRST, "Stopped", seconds=600, ended_ago=3600)
    aws.response_filters["DescribeTrainingJob"] = warm_pool("Available", 3600)
    found = laptop.json("watch", "demo", "--once", "--dry-run", code=7)
    assert aws.bodies("UpdateTrainingJob") == []
    found = laptop.json("watch", "demo", "--once", code=7)
    assert f"ended the warm pool of {FIRST}" in found["message"]
    [body] = aws.bodies("UpdateTrainingJob")
    assert body == {
        "TrainingJobName": FIRST,
        "ResourceConfig": {"KeepAlivePeriodInSeconds": 0},
    }


@pytest.mark.parametrize("code", ["AccessDeniedException", "ThrottlingException"])
def test_job_is_stopped_although_its_tags_cannot_be_written(
    laptop: Laptop, cli: Cli, aws: Aws, code: str
) -> None:
    """The stop saves money; what is not recorded is reported."""
    laptop.aws.error_codes["AddTags"] = code
    stopped = laptop("stop", "demo", "--json")
    assert json.loads(stopped.stdout)["warning"] in stopped.stderr
    assert f"{FIRST} is stopped, but not the reason recorded (AddTags: " in stopped.stderr
    assert [body["TrainingJobName"] for body in aws.bodies("StopTrainingJob")] == [FIRST]
    names = [name for name, _ in aws.calls if name in ("StopTrainingJob", "AddTags")]
    assert names[0] == "StopTrainingJob"


def test_budget_stop_is_sent_while_tags_are_denied_and_stops_throttled(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    laptop = Laptop(cli, aws, tmp_path, budget={"usd": 1})
    laptop.sagemaker.log_event(FIRST, "step", step=200, steps_per_second=1.0)
    aws.error_codes["AddTags"] = "AccessDeniedException"
    stop, throttled = aws.responses["StopTrainingJob"], [1, 2, 3]

    def throttle(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if throttled:
            throttled.pop()
            return 400, {"__type": "ThrottlingException", "message": "Rate exceeded"}
        return stop(body)

    aws.responses["StopTrainingJob"] = throttle
    document = laptop.json("watch", "demo", "--once", code=7)
    assert document["action"] == "stop"
    assert "not the reason recorded" in document["message"]
    assert laptop.json("status", "demo")["state"] == "stopping"


@pytest.mark.slow
def test_stop_finds_the_job_that_a_watcher_starts_while_tags_are_denied(laptop: Laptop) -> None:
    reason = "InternalServerError: try again"
    laptop.sagemaker.set_status(FIRST, "Failed", reason=reason, ended_ago=3600)
    laptop.aws.error_codes["AddTags"] = "AccessDeniedException"
    error = laptop("stop", "demo", code=4).stderr
    assert "AddTags" in error
    del laptop.aws.error_codes["AddTags"]
    laptop("watch", "demo", "--once")
    laptop.aws.error_codes["AddTags"] = "AccessDeniedException"
    laptop("stop", "demo")
    assert [body["TrainingJobName"] for body in laptop.aws.bodies("StopTrainingJob")] == [SECOND]


@pytest.mark.integration
def test_results_that_are_not_stored_are_an_alert_and_never_a_stop(laptop: Laptop) -> None:
    with webhook_server() as alerts:
        laptop.environment["SM_TRAIN_WEBHOOK"] = alerts.address
        laptop.sagemaker.set_status(FIRST, "InProgress", "Uploading", ended_ago=6 * 3600 + 60)
        document = laptop.json("watch", "demo", "--once", code=8)
        assert "has been storing its results for 6.0 h" in document["message"]
        assert "alert sent: results take too long to be stored" in document["message"]
        [alert] = alerts.received
        assert (alert["level"], alert["stage"]) == ("critical", "256px")
        assert alert["command"].startswith("aws sagemaker stop-training-job")
        # A function polls again and again.
        laptop.sagemaker.set_status(FIRST, "InProgress", "Uploading", ended_ago=7 * 3600)
        laptop.json("watch", "demo", "--once", code=8)
        assert len(alerts.received) == 1
    assert laptop.aws.bodies("StopTrainingJob") == []


@pytest.mark.integration
def test_resume_keeps_auto_advance_unless_it_is_told_otherwise(laptop: Laptop) -> None:
    laptop.sagemaker.checkpoint("256px", 300)
    choices = [
        (("demo", "--auto-advance"), "on"),
        (("demo",), "on"),
        ((laptop.run_file,), "on"),
        (("demo", "--no-auto-advance"), None),
        (("demo",), None),
    ]
    for number, (arguments, expected) in enumerate(choices, start=1):
        laptop("stop", "demo")
        laptop.sagemaker.set_status(f"demo--256px-{number:04d}", "Stopped")
        laptop("resume", *arguments, "--yes")
        tags = laptop.sagemaker.tags(f"demo--256px-{number + 1:04d}")
        assert tags.get("sm-train:auto-advance") == expected, arguments


@pytest.mark.slow
def test_completed_job_without_results_is_not_done_and_no_stage_follows(
    cli: Cli, aws: Aws, tmp_path: Path
) -> None:
    """SageMaker completes a job whose checkpoints never reached S3."""
    laptop = Laptop(cli, aws, tmp_path, stages=[stage("a"), stage("b")])
    laptop.sagemaker.set_status("demo--a-0001", "Completed")
    tags = [{"Key": "sm-train:auto-advance", "Value": "on"}]
    [arn] = [
        job["TrainingJobArn"]
        for job in aws.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    ]
    aws.client("sagemaker").add_tags(ResourceArn=arn, Tags=tags)
    document = laptop.json("watch", "demo", "--once", code=6)
    assert (document["state"], document["action"]) == ("no-results", "end")
    assert (
        "demo--a-0001: ended without results: s3://ai-bucket/demo/checkpoints/a"
        in (document["message"])
    )
    assert laptop.sagemaker.names() == ["demo--a-0001"]
    assert "ended without results" in laptop("status", "demo").stdout
    laptop.sagemaker.checkpoint("a", 1000)
    assert laptop.json("watch", "demo", "--once")["action"] == "start"


@pytest.mark.slow
def test_auto_advance_starts_later_stages_until_a_pause(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    stages = [stage("a"), stage("b"), stage("c")]
    laptop = Laptop(cli, aws, tmp_path, stages=stages)
    laptop.sagemaker.set_status("demo--a-0001", "Completed")
    laptop.sagemaker.checkpoint("a", 1000)
    paused = laptop.json("watch", "demo", "--once")
    assert "paused before b" in paused["message"]
    laptop("resume", "demo", "--auto-advance", "--yes")
    laptop.sagemaker.set_status("demo--b-0001", "Completed")
    laptop.sagemaker.checkpoint("b", 1000)
    # The newest job is the one created last.
    assert laptop.json("watch", "demo", "--once")["action"] == "start"
    assert laptop.sagemaker.names() == ["demo--a-0001", "demo--b-0001", "demo--c-0001"]
    laptop("stop", "demo", "--after-stage")
    laptop.sagemaker.set_status("demo--c-0001", "Completed")
    laptop.sagemaker.checkpoint("c", 1000)
    assert laptop.json("status", "demo")["state"] == "done"
    assert laptop.json("watch", "demo", "--once")["message"] == "the run is done"


@pytest.mark.integration
def test_stop_between_a_failure_and_the_next_job_prevents_a_restart(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "Failed", reason="CapacityError: none", ended_ago=3600)
    laptop("stop", "demo")
    # Which of both is lost if the second cannot be written: a watcher would start the job again.
    [stopped, _] = [body["Tags"][0]["Key"] for body in laptop.aws.bodies("AddTags")[-2:]]
    assert stopped == STOPPED_TAG
    assert laptop.json("watch", "demo", "--once")["action"] == "end"
    assert laptop.sagemaker.names() == [FIRST]


@pytest.mark.integration
def test_concurrent_watchers_start_one_job(laptop: Laptop) -> None:
    """Real processes at the same time, on the same server."""
    laptop.sagemaker.set_status(FIRST, "Failed", reason="InternalServerError: x", ended_ago=3600)
    env = clean_environment(laptop.folder) | laptop.aws.environment
    watchers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sm_train.toolkit",
                "--region",
                "us-east-1",
                "watch",
                "demo",
                "--once",
            ],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    output = [watcher.communicate(timeout=DEADLINE)[1] for watcher in watchers]
    assert [watcher.returncode for watcher in watchers] == [0, 0, 0], output
    assert laptop.sagemaker.names() == [FIRST, SECOND], output
    assert len(laptop.aws.bodies("CreateTrainingJob")) == 2, output


@pytest.mark.integration
def test_job_whose_response_was_lost_counts_as_started(laptop: Laptop) -> None:
    """The job was created, the response failed, the client retries: its own job has the name."""
    laptop.sagemaker.set_status(FIRST, "Stopped")
    lost = []

    def reject_retry(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if body["TrainingJobName"] == SECOND and lost:
            return laptop.sagemaker._reject_duplicate(body)
        return None

    def drop_response(response: dict[str, Any]) -> dict[str, Any] | None:
        laptop.sagemaker._start(response)
        if response["TrainingJobArn"].endswith(SECOND) and not lost:
            lost.append(response)
            return None
        return response

    laptop.aws.responses["CreateTrainingJob"] = reject_retry
    laptop.aws.response_filters["CreateTrainingJob"] = drop_response
    run_file = write_run(laptop.folder)
    assert f"Started {SECOND}" in laptop("resume", run_file, "--yes").stderr
    assert lost
    assert laptop.sagemaker.names() == [FIRST, SECOND]


def test_claim_of_a_killed_process_expires(laptop: Laptop) -> None:
    """Its claim is in the bucket, but there is no job: others wait until the claim expires."""
    laptop.sagemaker.set_status(FIRST, "Stopped")
    s3 = laptop.aws.client("s3")
    claimed = s3.get_object(Bucket="ai-bucket", Key=f"demo/jobs/{FIRST}.json")["Body"].read()
    s3.put_object(Bucket="ai-bucket", Key=f"demo/jobs/{SECOND}.json", Body=claimed)
    assert (
        "another process has been starting it" in laptop("resume", "demo", "--yes", code=2).stderr
    )
    laptop.aws.make_older("ai-bucket", f"demo/jobs/{SECOND}.json", 3600)
    laptop("resume", "demo", "--yes")
    assert laptop.sagemaker.names() == [FIRST, SECOND]


def test_job_name_of_a_foreign_job_is_skipped(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "Stopped")
    body = laptop.aws.bodies("CreateTrainingJob")[0]
    plain = {key: value for key, value in body.items() if key != "Tags"}
    laptop.aws.client("sagemaker").create_training_job(**plain | {"TrainingJobName": SECOND})
    laptop("resume", "demo", "--yes")
    assert laptop.sagemaker.names()[-1] == "demo--256px-0003"


@pytest.mark.integration
def test_unknown_status_counts_as_live(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "Contemplating", "Deeply")
    assert "Contemplating" in laptop("submit", laptop.run_file, "--yes", code=2).stderr
    assert laptop.json("watch", "demo", "--once")["action"] == "wait"
    assert "Contemplating (Deeply)" in laptop("status", "demo").stdout


def test_expired_credentials_name_the_fix(laptop: Laptop) -> None:
    laptop.aws.error_codes["ListTrainingJobs"] = "ExpiredTokenException"
    assert "sign in again" in laptop("watch", "demo", code=4).stderr


@pytest.mark.parametrize(
    ("error_code", "exit_code"),
    [("AccessDeniedException", 4), ("ThrottlingException", 5), ("RequestTimeTooSkewed", 4)],
)
def test_aws_error_is_one_line_with_its_exit_code(
    laptop: Laptop, error_code: str, exit_code: int
) -> None:
    laptop.aws.error_codes["ListTrainingJobs"] = error_code
    message = laptop("status", "demo", code=exit_code).stderr
    assert f"ListTrainingJobs: AWS returned {error_code}" in message
    assert ("clock" in message) == (error_code == "RequestTimeTooSkewed")


@pytest.mark.integration
def test_throttling_delays_a_watch_without_ending_it(laptop: Laptop) -> None:
    laptop.sagemaker.log_event(FIRST, "step", step=1000)
    calls = []

    def throttle(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        calls.append(body)
        if len(calls) < 6:
            return 400, {"__type": "ThrottlingException", "message": "Rate exceeded"}
        laptop.sagemaker.set_status(FIRST, "Completed")
        laptop.sagemaker.checkpoint("256px", 1000)
        return None

    laptop.aws.responses["DescribeTrainingJob"] = throttle
    assert "the run is done" in laptop("watch", "demo", "--interval", "1s").stderr


def test_s3_throttling_is_one_line(laptop: Laptop) -> None:
    slow_down = (
        b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    )
    with fake_server(lambda request: FakeResponse(503, slow_down)) as s3:
        laptop.environment["AWS_ENDPOINT_URL_S3"] = s3.url
        assert "AWS returned SlowDown" in laptop("status", laptop.run_file, code=5).stderr
        assert len(s3.requests) > 1


def test_wrong_local_clock_causes_no_stall(laptop: Laptop) -> None:
    """The age of events is measured by AWS's clock."""
    laptop.sagemaker.log_event(FIRST, "step", step=400, ago=60, steps_per_second=1.0)
    program = (
        "import sys, time; import sm_train.toolkit.cli as c; real = time.time\n"
        "time.time = lambda: real() + 7200\nc.main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--region", "us-east-1", "status", "demo", "--json"],
        env=clean_environment(laptop.folder) | laptop.aws.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["stages"][0]["seconds_since_activity"] == pytest.approx(
        60, abs=45
    )


@pytest.mark.parametrize("status", ["Completed", "Stopping"])
def test_stop_of_a_job_that_has_just_ended_succeeds(laptop: Laptop, status: str) -> None:
    """It ends, or another laptop stops it, between the description and the request to stop it."""
    laptop.sagemaker.before_stop = lambda name: laptop.sagemaker.set_status(name, status)
    stopped = laptop.json("stop", "demo")
    assert stopped["status"] == status
    assert len(laptop.aws.bodies("StopTrainingJob")) == 1


@pytest.mark.integration
def test_watch_survives_a_job_that_ends_before_it_is_stopped(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=4 * 3600)
    laptop.sagemaker.log_event(FIRST, "step", ago=4000, step=200, steps_per_second=1.0)
    laptop.sagemaker.before_stop = lambda name: laptop.sagemaker.set_status(
        name, "Failed", reason="InternalServerError: x", ended_ago=3600
    )
    assert laptop.json("watch", "demo", "--once", code=8)["action"] == "stop"
    assert laptop.json("watch", "demo", "--once")["action"] == "start"
    assert laptop.sagemaker.names() == [FIRST, SECOND]


@pytest.mark.integration
def test_a_watcher_leaves_the_reason_of_a_user_who_stops_at_the_same_time(laptop: Laptop) -> None:
    """Its own reason would start another job."""
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=4 * 3600)
    laptop.sagemaker.log_event(FIRST, "step", ago=4000, step=200, steps_per_second=1.0)
    client = laptop.aws.client("sagemaker")
    arn = client.describe_training_job(TrainingJobName=FIRST)["TrainingJobArn"]
    tags = [{"Key": "sm-train:stopped-for", "Value": "user"}]
    laptop.sagemaker.before_stop = lambda name: client.add_tags(ResourceArn=arn, Tags=tags)
    assert laptop.json("watch", "demo", "--once", code=8)["action"] == "stop"
    assert laptop.sagemaker.tags(FIRST)["sm-train:stopped-for"] == "user"
    laptop.sagemaker.set_status(FIRST, "Stopped", ended_ago=3600)
    assert laptop.json("watch", "demo", "--once")["action"] == "end"


@pytest.mark.integration
def test_a_stop_that_aws_fails_is_repeated_until_it_is_known_whether_the_job_runs(
    laptop: Laptop,
) -> None:
    answers: list[dict[str, Any]] = []
    stops = laptop.aws.responses["StopTrainingJob"]

    def fail(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        answers.append(body)
        if len(answers) > most:
            return stops(body)
        return 500, {"__type": "InternalFailure", "message": "try later"}

    laptop.aws.responses["StopTrainingJob"] = fail
    most = 10_000
    message = one_line(laptop("stop", "demo", code=1).stderr)
    assert "StopTrainingJob: AWS returned InternalFailure" in message
    assert f"{FIRST} still runs and costs $126.26 an hour" in message
    command = f"aws sagemaker stop-training-job --training-job-name {FIRST} --region us-east-1"
    assert message.endswith(command)

    answers.clear()
    most = 3
    assert laptop.json("stop", "demo")["status"] == "Stopping"


def test_rejected_stop_of_a_live_job_is_an_error(laptop: Laptop) -> None:
    laptop.aws.error_codes["StopTrainingJob"] = "ValidationException"
    message = laptop("stop", "demo", code=3).stderr
    assert "StopTrainingJob: AWS returned ValidationException" in message


@pytest.mark.integration
def test_stop_works_while_the_job_restarts(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "InProgress", "Restarting")
    laptop("stop", "demo")
    assert len(laptop.aws.bodies("StopTrainingJob")) == 1
    laptop("stop", "demo")
    assert len(laptop.aws.bodies("StopTrainingJob")) == 1


@pytest.mark.slow
def test_resume_with_only_incomplete_checkpoints_starts_at_step_0(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "Stopped")
    laptop.sagemaker.checkpoint("256px", 100, complete=False)
    laptop.sagemaker.checkpoint("256px", 200, complete=False)
    table = laptop("status", "demo").stdout
    assert table.count("b.npz is missing") == 2
    laptop("resume", "demo", "--yes")
    assert laptop.sagemaker.tags(SECOND)["sm-train:from-step"] == "0"


def test_lambda_handler_polls_like_watch(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop.sagemaker.set_status(FIRST, "Failed", reason="CapacityError: none", ended_ago=3600)
    for name, value in laptop.aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("SM_TRAIN_RUNS", "demo, nonsense")
    with pytest.raises(RuntimeError, match="nonsense"):
        handler({}, None)
    assert laptop.sagemaker.names() == [FIRST, SECOND]
    monkeypatch.setenv("SM_TRAIN_RUNS", "demo")
    assert handler({}, None)["demo"]["action"] == "wait"


@pytest.mark.slow
def test_lambda_image_installs_all_imported_packages(laptop: Laptop) -> None:
    """Only the packages of its Dockerfile can be imported here."""
    packages = lambda_packages(laptop("template", "watch-lambda-image").stdout)
    env = {"AWS_REGION": "us-east-1", "SM_TRAIN_RUNS": "demo"}
    done = subprocess.run(
        [sys.executable, "-c", RESTRICT_IMPORTS + LAMBDA_CALL, " ".join(packages)],
        env=clean_environment(laptop.folder) | laptop.aws.environment | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["demo"]["action"] == "wait"


@pytest.mark.slow
def test_lambda_template_passes_cfn_lint(laptop: Laptop) -> None:
    template = laptop.folder / "template.yaml"
    template.write_text(laptop("template", "watch-lambda", str(laptop.run_file)).stdout)
    linted = subprocess.run(
        [Path(sys.executable).parent / "cfn-lint", template],
        capture_output=True,
        text=True,
        check=False,
    )
    assert linted.returncode == 0, linted.stdout


def test_unknown_run_is_an_error(laptop: Laptop) -> None:
    message = laptop("status", "nonsense", code=2).stderr
    assert "nonsense: neither a run file here nor a run or job" in message


@pytest.mark.integration
def test_logs_merge_all_nodes_by_time_and_hide_event_lines(
    laptop: Laptop,
) -> None:
    laptop.sagemaker.log_event(FIRST, "step", step=1)
    logs = laptop.aws.client("logs")
    group = "/aws/sagemaker/TrainingJobs"
    logs.create_log_stream(logGroupName=group, logStreamName=f"{FIRST}/algo-2-1")
    now = int(time.time() * 1000)
    for stream, text, at in (("algo-1-1", "second", 2), ("algo-2-1", "first", 1)):
        logs.put_log_events(
            logGroupName=group,
            logStreamName=f"{FIRST}/{stream}",
            logEvents=[{"timestamp": now - 10_000 + at, "message": text}],
        )
    assert laptop("logs", "demo").stdout.splitlines() == ["algo-2 | first", "algo-1 | second"]
    assert laptop("logs", FIRST, "--node", "2").stdout == "algo-2 | first\n"
    assert "SMT {" in laptop("logs", "demo", "--raw").stdout
    laptop.sagemaker.set_status(FIRST, "Completed")
    assert laptop("logs", "demo", "--follow").stdout.count("first") == 1


@pytest.mark.integration
def test_a_run_resumes_without_the_right_to_read_its_logs(laptop: Laptop) -> None:
    """Its jobs and checkpoints decide; the speed of its jobs is unknown then."""
    laptop.sagemaker.set_status(FIRST, "Stopped")
    laptop.sagemaker.log_event(FIRST, "start", ago=400)
    laptop.sagemaker.checkpoint("256px", 300)
    for operation in ("FilterLogEvents", "DescribeLogStreams", "GetLogEvents"):
        laptop.aws.error_codes[operation] = "AccessDeniedException"
    assert "their logs cannot be read" in laptop("resume", "demo", "--yes").stderr
    assert laptop.sagemaker.names() == [FIRST, SECOND]
