"""``sm_train.Job``: a run on SageMaker or on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sm_train
from sm_train.toolkit.records.training_job import STOPPED_TAG

from tests.conftest import Aws, Cli
from tests.support.finished_jobs import training_events
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.run_documents import run, stage
from tests.toolkit.api.run_support import account  # noqa: F401

REGION = "us-east-1"


@pytest.fixture
def fake(account: Aws) -> FakeSageMaker:  # noqa: F811
    return FakeSageMaker(account)


def started(**changes: object) -> sm_train.Job:
    return sm_train.Run.from_dict(run(**changes)).submit()


@pytest.mark.slow
@pytest.mark.integration
def test_status_logs_and_metrics_of_a_live_job(
    account: Aws,  # noqa: F811
    fake: FakeSageMaker,
    cli: Cli,
) -> None:
    job = started(stages=[stage("a"), stage("b")])
    fields = {"stage": "a", "steps_per_second": 2.0}
    fake.log_event(job.name, "step", step=100, loss=0.5, **fields)
    fake.log_event(job.name, "step", step=200, loss=None, ago=2.0, **fields)
    status = job.status()
    assert (status.run, status.stage, status.state) == ("demo", "a", "training")
    assert (status.stages[0].step, status.stages[0].max_steps) == (200, 1000)
    assert status.stages[0].remaining_seconds == pytest.approx(400)
    assert status.stages[1].state == "waiting"
    assert status.next_command == "sm-train watch demo"
    assert len(repr(status)) < 80
    assert "200 of 1,000" in status._repr_html_()
    assert list(status.to_frame()["name"]) == ["a", "b"]
    environment = account.environment | {"AWS_REGION": REGION}
    printed = cli("status", job.name, "--json", network="loopback", env=environment)
    document = json.loads(printed.stdout)
    assert document["stages"][0]["step"] == status.document["stages"][0]["step"]

    lines = list(job.logs())
    assert len(lines) == 2
    assert all(line.node == "algo-1" for line in lines)
    assert list(job.logs(since=lines[-1].time + 60)) == []
    assert [line.message for line in job.logs(node=2)] == []

    metrics = sm_train.Job("demo", REGION).metrics()
    assert metrics.column("step") == (100, 200)
    assert metrics.column("loss") == (0.5, None)
    assert metrics.last is not None
    assert metrics.last["job"] == job.name
    assert len(repr(metrics)) < 80
    assert list(metrics.to_frame()["step"]) == [100, 200]
    assert ">0.5<" in metrics._repr_html_()


@pytest.mark.integration
def test_stop_and_wait(fake: FakeSageMaker) -> None:
    job = started()
    assert job.stop() == "Stopping"
    fake.set_status(job.name, "Stopped")
    assert job.wait() == "Stopped"
    assert fake.tags(job.name)[STOPPED_TAG] == "user"


@pytest.mark.integration
def test_wait_raises_what_failed(fake: FakeSageMaker) -> None:
    job = started()
    fake.set_status(job.name, "Failed", reason="AlgorithmError: out of memory")
    with pytest.raises(sm_train.JobFailedError, match="AlgorithmError: out of memory") as caught:
        job.wait()
    assert caught.value.exit_code == 6


@pytest.mark.integration
def test_unknown_jobs_are_usage_errors(fake: FakeSageMaker) -> None:
    for call in ("status", "logs", "stop", "wait", "review"):
        with pytest.raises(sm_train.UsageError, match="nothing"):
            getattr(sm_train.Job("nothing", REGION), call)()


@pytest.mark.integration
def test_a_local_run_is_reviewed_and_diagnosed(tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "local-runs" / "demo"
    (folder / "256px").mkdir(parents=True)
    log = "".join(f"{event['message']}\n" for event in training_events())
    (folder / "256px" / "log.txt").write_text(log)
    job = sm_train.Job(str(folder))
    metrics = job.metrics()
    assert metrics.column("step") == (100, 200, 300, 400, 500)
    review = job.review()
    printed = json.loads(cli("review", folder, "--json").stdout)
    assert [verdict.code for verdict in review.jobs[0].verdicts] == [
        verdict["code"] for verdict in printed["jobs"][0]["verdicts"]
    ]
    assert len(repr(review)) < 160
    assert review.jobs[0].verdicts[0].question in review._repr_html_().replace("&#x27;", "'")
    diagnosis = job.diagnose()
    assert diagnosis.cause == json.loads(cli("diagnose", folder, "--json").stdout)["cause"]
    assert len(repr(diagnosis)) < 160
    assert "<table>" in diagnosis._repr_html_()
    for call in ("status", "logs", "stop", "wait"):
        with pytest.raises(sm_train.UsageError, match="holds no local run"):
            getattr(job, call)()


def test_diagnosis_shows_the_failing_rank(tmp_path: Path) -> None:
    log = tmp_path / "algo-1.log"
    log.write_text(
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
        "GPU 3 has a total capacity of 79.15 GiB of which 1.12 GiB is free.\n"
    )
    diagnosis = sm_train.Job(str(log)).diagnose()
    assert "memory" in diagnosis.title
    page = diagnosis._repr_html_()
    assert "rank 3" in page
    assert "Tried to allocate" in page
    with pytest.raises(sm_train.UsageError, match="is an address in S3"):
        sm_train.Job("s3://photos/logs").diagnose()
