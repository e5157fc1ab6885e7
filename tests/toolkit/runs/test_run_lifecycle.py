"""A run's life from a laptop that knows nothing of it: status, stop, resume, watch, bad days."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.backends import get_backend
from sm_train.estimators.bundle.bundle import build_bundle, run_document
from sm_train.estimators.config.load import load_run
from sm_train.estimators.config.naming import staging_uri
from sm_train.estimators.request.launcher import launch_plan
from sm_train.estimators.request.training import training_request
from sm_train.toolkit.jobs.launch_record import LaunchRecord
from sm_train.toolkit.runs.remediation import StartJob
from sm_train.toolkit.runs.resolve import Run
from sm_train.toolkit.submit.relocation import job_launch
from sm_train.toolkit.submit.start_job import start_next_job
from sm_train.toolkit.watch.lambda_handler import handler

from tests.conftest import Aws, Cli, clean_environment
from tests.support.fake_services import Answer, serving
from tests.support.job_lifecycle import Lives
from tests.support.restricted_imports import ONLY
from tests.support.run_documents import stage
from tests.support.run_files import write_run

SHARDS = {f"shards/{index}.tar": b"x" for index in range(4)} | {"index.parquet": b"x"}
FUNCTION = """
from sm_train.toolkit.watch.lambda_handler import handler
handler({}, None)
"""
FIRST, SECOND = "demo--256px-0001", "demo--256px-0002"


class Laptop:
    """A laptop with a run file, whose first job is started as `submit` leaves it."""

    def __init__(self, cli: Cli, aws: Aws, folder: Path, **changes: Any) -> None:
        self.cli, self.aws, self.folder = cli, aws, folder
        self.environment = {
            **aws.environment,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",
        }
        self.lives = Lives(aws)
        aws.make_bucket("my-bucket", **SHARDS)
        self.run_file = write_run(folder, **changes)
        config = load_run(self.run_file)
        first = config.stages[0]
        staged = staging_uri(config, first, "us-east-1", datetime(2026, 11, 20))
        requests = {
            one.name: training_request(
                config,
                one,
                launch_plan(config, one, "own:1"),
                build_bundle(config, None),
                region="us-east-1",
                staged=staged,
            )
            for one in config.stages
        }
        record = LaunchRecord(run_document(config), requests)
        session = boto3.Session("testing", "testing", region_name="us-east-1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", aws.url)
            start = StartJob(first.name, 1, 0, "submit", "", auto_advance=False)
            run = Run("demo", "us-east-1", "my-bucket", config, record)
            start_next_job(session, job_launch(run, start))

    def __call__(self, *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = self.cli(*arguments, network="loopback", env=self.environment)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    def json(self, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self(*arguments, "--json", code=code).stdout)
        return document


@pytest.fixture
def laptop(cli: Cli, aws: Aws, tmp_path: Path) -> Laptop:
    return Laptop(cli, aws, tmp_path)


def test_another_laptop_sees_where_the_run_is(laptop: Laptop) -> None:
    """By the run's name alone: there is no file, and nothing is kept on a laptop."""
    laptop.lives.say(FIRST, "start", ago=400)
    laptop.lives.say(FIRST, "step", step=400, steps_per_second=2.0, loss=0.5)
    laptop.lives.checkpoint("256px", 300)
    document = laptop.json("status", "demo")
    [seen] = document["stages"]
    assert (document["state"], document["stage"]) == ("training", "256px")
    assert (seen["step"], seen["checkpoint_step"], seen["max_steps"]) == (400, 300, 1000)
    assert seen["remaining_seconds"] == pytest.approx(300)
    rate = 4 * 31.5641075 / 3600
    assert document["spent_usd"] == pytest.approx(600 * rate, rel=0.02)
    assert document["projected_usd"] == pytest.approx(900 * rate, rel=0.02)
    shown = laptop("status", FIRST).stdout
    assert "training" in shown
    assert "sm-train watch demo" in shown
    assert max(map(len, shown.splitlines())) <= 100
    [listed] = laptop.json("list")["runs"]
    assert (listed["run"], listed["job"], listed["jobs"]) == ("demo", FIRST, 1)


def test_a_stage_has_one_job_at_a_time(laptop: Laptop) -> None:
    refused = laptop("submit", laptop.run_file, "--yes", code=2)
    assert f"{FIRST} is InProgress" in refused.stderr
    assert laptop.lives.names() == [FIRST]
    laptop.lives.tell(FIRST, "Completed")
    assert "is done" in laptop("submit", laptop.run_file, "--yes", code=2).stderr


def test_stop_then_resume_goes_on_from_the_checkpoint_with_the_same_code(laptop: Laptop) -> None:
    assert "resume demo" in laptop("stop", "demo").stderr
    assert laptop.lives.tags(FIRST)["sm-train:stopped-for"] == "user"
    laptop.lives.tell(FIRST, "Stopped")
    laptop.lives.checkpoint("256px", 300)
    laptop.lives.checkpoint("256px", 400, whole=False)
    watched = laptop.json("watch", "demo", "--once")
    assert watched["action"] == "end"
    [seen] = laptop.json("status", "demo")["stages"]
    assert seen["checkpoint_step"] == 300
    assert seen["incomplete_checkpoints"] == [
        {"folder": "step-00000400", "reason": "b.npz is missing"}
    ]
    laptop("resume", "demo", "--yes")
    first, second = laptop.aws.bodies("CreateTrainingJob")
    assert second["TrainingJobName"] == SECOND
    assert laptop.lives.tags(SECOND)["sm-train:from-step"] == "300"
    left_out = ("TrainingJobName", "Tags")
    assert {key: value for key, value in first.items() if key not in left_out} == {
        key: value for key, value in second.items() if key not in left_out
    }


def test_resume_by_the_file_takes_its_new_settings(laptop: Laptop) -> None:
    laptop.lives.tell(FIRST, "Stopped")
    run = write_run(laptop.folder, stages=[stage(max_steps=2000)])
    laptop("resume", run, "--yes")
    _, second = laptop.aws.bodies("CreateTrainingJob")
    assert second["TrainingJobName"] == SECOND
    assert laptop.json("status", "demo")["stages"][0]["max_steps"] == 2000


def test_resume_asks_with_the_dollars_of_what_is_left(laptop: Laptop) -> None:
    laptop.lives.tell(FIRST, "Stopped")
    laptop.lives.checkpoint("256px", 900)
    asked = laptop("resume", "demo", code=2).stderr
    assert "at step 900 of 1,000 for $" in asked
    assert laptop.lives.names() == [FIRST]


@pytest.mark.parametrize(
    "fate",
    [
        {"status": "Failed", "reason": "InternalServerError: We encountered an internal error."},
        {"status": "Failed", "reason": "CapacityError: Unable to provision requested ML compute."},
        {"status": "Stopped", "secondary": "MaxRuntimeExceeded"},
        {"status": "Stopped", "secondary": "MaxWaitTimeExceeded"},
        {"status": "Stopped", "secondary": "Interrupted"},
    ],
    ids=lambda fate: fate.get("secondary") or fate["reason"].split(":")[0],
)
def test_what_the_cloud_did_is_followed_by_another_job(
    laptop: Laptop, fate: dict[str, Any]
) -> None:
    laptop.lives.tell(FIRST, **fate, ended_ago=3600)
    laptop.lives.checkpoint("256px", 300)
    assert laptop.json("watch", "demo", "--once", "--dry-run")["action"] == "start"
    assert laptop.lives.names() == [FIRST]
    assert laptop.json("watch", "demo", "--once")["action"] == "start"
    assert laptop.lives.names() == [FIRST, SECOND]
    assert laptop.json("watch", "demo", "--once")["action"] == "wait"


def test_the_programs_own_error_is_not_repeated(laptop: Laptop) -> None:
    reason = "AlgorithmError: rank 3: OutOfMemoryError: CUDA out of memory."
    laptop.lives.tell(FIRST, "Failed", reason=reason, ended_ago=3600)
    seen = laptop.json("watch", "demo", "--once", code=6)
    assert reason in seen["message"]
    assert laptop.json("status", "demo")["next_command"] == f"sm-train diagnose {FIRST}"
    assert laptop.lives.names() == [FIRST]


def test_what_the_log_says_of_broken_hardware_is_followed_by_another_job(
    laptop: Laptop,
) -> None:
    """SageMaker calls it the program's error, since the program ended; its log knows better."""
    laptop.lives.tell(
        FIRST, "Failed", reason="AlgorithmError: ExecuteUserScriptError: ExitCode 1", ended_ago=3600
    )
    laptop.lives.say(FIRST, "step", ago=3700, step=10)
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
    seen = laptop.json("watch", "demo", "--once")
    assert seen["action"] == "start"
    assert laptop.lives.tags(SECOND)["sm-train:cause"] == "gpu-ecc"


def test_a_silent_job_is_ended_and_followed(laptop: Laptop) -> None:
    """Heartbeats go on while training hangs: the step that they tell of counts."""
    laptop.lives.say(FIRST, "step", ago=4000, step=200, steps_per_second=1.0)
    laptop.lives.say(FIRST, "heartbeat", ago=5, step=200, seconds_since_step=3995.0)
    assert laptop.json("watch", "demo", "--once", "--dry-run", code=8)["state"] == "stalled"
    assert laptop.aws.bodies("StopTrainingJob") == []
    assert laptop.json("watch", "demo", "--once", code=8)["action"] == "stop"
    assert laptop.lives.tags(FIRST)["sm-train:stopped-for"] == "stall"
    laptop.lives.tell(FIRST, "Stopped", ended_ago=3600)
    assert laptop.json("watch", "demo", "--once")["action"] == "start"


def test_a_spent_budget_ends_the_job_with_a_checkpoint(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    laptop = Laptop(cli, aws, tmp_path, budget={"usd": 100})
    laptop.lives.tell(FIRST, "InProgress", "Training", seconds=100 / (4 * 31.5641075) * 3600 + 60)
    laptop.lives.say(FIRST, "step", step=200, steps_per_second=1.0)
    assert laptop.json("watch", "demo", "--once", code=7)["action"] == "stop"
    assert len(aws.bodies("StopTrainingJob")) == 1
    laptop.lives.tell(FIRST, "Stopped", seconds=100 / (4 * 31.5641075) * 3600 + 60)
    assert "budget" in laptop.json("watch", "demo", "--once", code=7)["message"]
    assert laptop.lives.names() == [FIRST]


def test_stages_follow_one_another_until_a_pause(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    stages = [stage("a"), stage("b"), stage("c")]
    laptop = Laptop(cli, aws, tmp_path, stages=stages)
    laptop.lives.tell("demo--a-0001", "Completed")
    paused = laptop.json("watch", "demo", "--once")
    assert "paused before b" in paused["message"]
    laptop("resume", "demo", "--auto-advance", "--yes")
    laptop.lives.tell("demo--b-0001", "Completed")
    # Each is the newest of the run by its time of creation.
    assert laptop.json("watch", "demo", "--once")["action"] == "start"
    assert laptop.lives.names() == ["demo--a-0001", "demo--b-0001", "demo--c-0001"]
    laptop("stop", "demo", "--after-stage")
    laptop.lives.tell("demo--c-0001", "Completed")
    assert laptop.json("status", "demo")["state"] == "done"
    assert laptop.json("watch", "demo", "--once")["message"] == "the run is done"


def test_a_stop_between_a_failure_and_the_next_job_is_kept(laptop: Laptop) -> None:
    laptop.lives.tell(FIRST, "Failed", reason="CapacityError: none", ended_ago=3600)
    laptop("stop", "demo")
    assert laptop.json("watch", "demo", "--once")["action"] == "end"
    assert laptop.lives.names() == [FIRST]


def test_two_watchers_make_one_job(laptop: Laptop) -> None:
    """Real processes at the same time, on the same server."""
    laptop.lives.tell(FIRST, "Failed", reason="InternalServerError: x", ended_ago=3600)
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
    said = [watcher.communicate(timeout=120)[1] for watcher in watchers]
    assert [watcher.returncode for watcher in watchers] == [0, 0, 0], said
    assert laptop.lives.names() == [FIRST, SECOND], said
    assert len(laptop.aws.bodies("CreateTrainingJob")) == 2, said


def test_an_accepted_job_whose_answer_was_lost_is_the_one_that_runs(laptop: Laptop) -> None:
    """The job was made, the answer failed, the client asks again: the name is taken by itself."""
    laptop.lives.tell(FIRST, "Stopped")
    lost = []

    def lose_once(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if body["TrainingJobName"] == SECOND and lost:
            return laptop.lives._refuse_twice(body)
        return None

    def eat(answer: dict[str, Any]) -> dict[str, Any] | None:
        laptop.lives._begin(answer)
        if answer["TrainingJobArn"].endswith(SECOND) and not lost:
            lost.append(answer)
            return None
        return answer

    laptop.aws.answers["CreateTrainingJob"] = lose_once
    laptop.aws.amendments["CreateTrainingJob"] = eat
    by_file = write_run(laptop.folder)
    assert f"Started {SECOND}" in laptop("resume", by_file, "--yes").stderr
    assert lost
    assert laptop.lives.names() == [FIRST, SECOND]


def test_a_laptop_killed_before_the_job_leaves_the_way_free(laptop: Laptop) -> None:
    """Its claim is in the bucket, the job is not there: others wait, and then go on."""
    laptop.lives.tell(FIRST, "Stopped")
    s3 = laptop.aws.client("s3")
    claimed = s3.get_object(Bucket="my-bucket", Key=f"demo/jobs/{FIRST}.json")["Body"].read()
    s3.put_object(Bucket="my-bucket", Key=f"demo/jobs/{SECOND}.json", Body=claimed)
    assert "somebody else is starting it" in laptop("resume", "demo", "--yes", code=2).stderr
    [key] = [
        version
        for name, version in get_backend("s3")["123456789012"]["aws"]
        .buckets["my-bucket"]
        .keys.items()
        if name == f"demo/jobs/{SECOND}.json"
    ]
    key.last_modified = datetime.now(UTC).replace(tzinfo=None) - timedelta(hours=1)
    laptop("resume", "demo", "--yes")
    assert laptop.lives.names() == [FIRST, SECOND]


def test_a_name_that_somebody_else_has_is_passed_over(laptop: Laptop) -> None:
    laptop.lives.tell(FIRST, "Stopped")
    body = laptop.aws.bodies("CreateTrainingJob")[0]
    plain = {key: value for key, value in body.items() if key != "Tags"}
    laptop.aws.client("sagemaker").create_training_job(**plain | {"TrainingJobName": SECOND})
    laptop("resume", "demo", "--yes")
    assert laptop.lives.names()[-1] == "demo--256px-0003"


def test_an_unknown_status_is_taken_for_a_job_that_may_cost_money(laptop: Laptop) -> None:
    laptop.lives.tell(FIRST, "Contemplating", "Deeply")
    assert "Contemplating" in laptop("submit", laptop.run_file, "--yes", code=2).stderr
    assert laptop.json("watch", "demo", "--once")["action"] == "wait"
    assert "Contemplating (Deeply)" in laptop("status", "demo").stdout


def test_expired_credentials_say_how_to_go_on(laptop: Laptop) -> None:
    laptop.aws.refusals["ListTrainingJobs"] = "ExpiredTokenException"
    said = laptop("watch", "demo", code=4).stderr
    assert "sign in again" in said


@pytest.mark.parametrize(
    ("refusal", "code"),
    [("AccessDeniedException", 4), ("ThrottlingException", 5), ("RequestTimeTooSkewed", 4)],
)
def test_a_refusal_is_one_line_with_its_code(laptop: Laptop, refusal: str, code: int) -> None:
    laptop.aws.refusals["ListTrainingJobs"] = refusal
    said = laptop("status", "demo", code=code).stderr
    assert f"ListTrainingJobs: AWS returned {refusal}" in said
    assert ("clock" in said) == (refusal == "RequestTimeTooSkewed")


def test_throttling_of_every_call_makes_a_watch_slower_and_no_more(laptop: Laptop) -> None:
    """It comes to itself when AWS does."""
    laptop.lives.say(FIRST, "step", step=1000)
    asked = []

    def throttle(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        asked.append(body)
        if len(asked) < 6:
            return 400, {"__type": "ThrottlingException", "message": "Rate exceeded"}
        laptop.lives.tell(FIRST, "Completed")
        return None

    laptop.aws.answers["DescribeTrainingJob"] = throttle
    assert "the run is done" in laptop("watch", "demo", "--interval", "1s").stderr


def test_s3_that_asks_for_patience_is_one_line(laptop: Laptop) -> None:
    slow = (
        b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    )
    with serving(lambda request: Answer(503, slow)) as s3:
        laptop.environment["AWS_ENDPOINT_URL_S3"] = s3.url
        said = laptop("status", laptop.run_file, code=5).stderr
        assert "AWS returned SlowDown" in said
        assert len(s3.requests) > 1


def test_a_wrong_clock_here_makes_no_stall(laptop: Laptop) -> None:
    """The job's words are as old as AWS's clock says, whatever this laptop's says."""
    laptop.lives.say(FIRST, "step", step=400, ago=60, steps_per_second=1.0)
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


def test_a_stop_while_the_job_restarts_is_a_stop(laptop: Laptop) -> None:
    laptop.lives.tell(FIRST, "InProgress", "Restarting")
    laptop("stop", "demo")
    assert len(laptop.aws.bodies("StopTrainingJob")) == 1
    laptop("stop", "demo")
    assert len(laptop.aws.bodies("StopTrainingJob")) == 1


def test_with_incomplete_checkpoints_alone_a_run_begins_anew_and_says_why(laptop: Laptop) -> None:
    laptop.lives.tell(FIRST, "Stopped")
    laptop.lives.checkpoint("256px", 100, whole=False)
    laptop.lives.checkpoint("256px", 200, whole=False)
    shown = laptop("status", "demo").stdout
    assert shown.count("b.npz is missing") == 2
    laptop("resume", "demo", "--yes")
    assert laptop.lives.tags(SECOND)["sm-train:from-step"] == "0"


def test_the_function_does_what_watch_does(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop.lives.tell(FIRST, "Failed", reason="CapacityError: none", ended_ago=3600)
    for name, value in laptop.aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("SM_TRAIN_RUNS", "demo, nonsense")
    with pytest.raises(RuntimeError, match="nonsense"):
        handler({}, None)
    assert laptop.lives.names() == [FIRST, SECOND]
    monkeypatch.setenv("SM_TRAIN_RUNS", "demo")
    assert handler({}, None)["demo"]["action"] == "wait"


def test_the_functions_image_holds_all_that_it_needs(laptop: Laptop) -> None:
    """With the packages of its Dockerfile alone; no other distribution can be imported."""
    recipe = laptop("template", "watch-lambda-image").stdout
    [line] = re.findall(r"pip install[^\n]*\\\n(.*?)\n[A-Z]", recipe, re.DOTALL)
    packages = re.findall(r'"([A-Za-z0-9-]+)>=', line)
    env = {"AWS_REGION": "us-east-1", "SM_TRAIN_RUNS": "demo"}
    done = subprocess.run(
        [sys.executable, "-c", ONLY + FUNCTION, " ".join(packages)],
        env=clean_environment(laptop.folder) | laptop.aws.environment | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["demo"]["action"] == "wait"


def test_the_functions_template_passes_cfn_lint(laptop: Laptop) -> None:
    template = laptop.folder / "template.yaml"
    template.write_text(laptop("template", "watch-lambda").stdout)
    linted = subprocess.run(
        [Path(sys.executable).parent / "cfn-lint", template],
        capture_output=True,
        text=True,
        check=False,
    )
    assert linted.returncode == 0, linted.stdout


def test_a_run_that_is_not_there(laptop: Laptop) -> None:
    said = laptop("status", "nonsense", code=2).stderr
    assert "nonsense: neither a run file here nor a run or job" in said


def test_logs_of_all_machines_in_order_and_without_the_machine_readable_lines(
    laptop: Laptop,
) -> None:
    laptop.lives.say(FIRST, "step", step=1)
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
    laptop.lives.tell(FIRST, "Completed")
    assert laptop("logs", "demo", "--follow").stdout.count("first") == 1
