"""Relocation of runs without capacity: real processes, two regions of one fake AWS."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from moto.backends import get_backend
from sm_train.entrypoints.storage import server_copy
from sm_train.estimators.config.load import load_run
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.cli import main
from sm_train.toolkit.platforms.find_run import find_run
from sm_train.toolkit.records.launch_record import ClaimedError, JobNameClaim
from sm_train.toolkit.records.training_job import jobs_of_run
from sm_train.toolkit.run_file.run_file import declare_run_buckets
from sm_train.toolkit.runs.remediation import StartJob
from sm_train.toolkit.runs.stop import stop
from sm_train.toolkit.runs.watch.controller import WatchResult, poll_run
from sm_train.toolkit.submit import replicate
from sm_train.toolkit.submit.relocation import job_launch
from sm_train.toolkit.submit.run_bundle import bundle_of
from sm_train.toolkit.submit.start_job import start_next_job
from sm_train.toolkit.submit.submission import launch_record, prepare

from tests.conftest import Aws, Cli, clean_environment
from tests.support.aws.described_jobs import run_on_sagemaker
from tests.support.deadline import DEADLINE
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.moto_server import aws_session
from tests.support.run_documents import ECR, stage
from tests.support.run_files import one_line, write_run

pytestmark = pytest.mark.integration

EAST, WEST = "us-east-1", "us-west-2"
SHARDS = {f"shards/{index}.tar": b"x" for index in range(8)} | {"index.parquet": b"x"}
CLUSTER = {"instance_type": "ml.p4de.24xlarge", "backend": "nccl", "image": ECR}
OTHER_REGION = {"region": WEST, "buckets": {"ai-bucket": "west"}}
FALLBACKS = [
    {"instance_type": "ml.p5.48xlarge", "stages": {"256px": {"instances": 2}}},
    OTHER_REGION,
]
SESSIONS = {area: aws_session(area) for area in (EAST, WEST)}
"""Shared by all tests: sessions cache botocore's service models, not endpoints."""

FIRST, SECOND, THIRD, FOURTH = (f"demo--256px-000{number}" for number in (1, 2, 3, 4))


class LiveRun:
    """A run whose first job was started; a watcher in this process polls it."""

    def __init__(self, aws: Aws, folder: Path, **changes: Any) -> None:
        self.aws, self.sagemaker = aws, FakeSageMaker(aws)
        aws.make_bucket("ai-bucket", **SHARDS)
        aws.make_bucket("west", WEST, **SHARDS)
        changes = {"cluster": CLUSTER, "recovery": {"fallbacks": FALLBACKS}} | changes
        self.file = write_run(folder, **changes)
        config = load_run(self.file)
        declare_run_buckets(config)
        submission = prepare(
            config, config.stages[0].name, bundle_of(config, folder), EAST, datetime(2026, 11, 20)
        )
        self.record = launch_record(submission, submission.requests[0])
        self.run = run_on_sagemaker(config, self.record, self.session())
        self.start(StartJob(config.stages[0].name, 1, 0, "submit", "", auto_advance=False))

    def session(self, region: str = EAST) -> Any:
        return SESSIONS[region]

    def start(self, start: StartJob) -> str:
        return start_next_job(self.session(), job_launch(self.run, start))

    def claim(self, job: str, placement: int) -> None:
        record = replace(self.record, placement=placement)
        JobNameClaim(self.session(), "ai-bucket", job, record).acquire()

    def poll(self, region: str = EAST) -> WatchResult:
        return poll_run(find_run("demo", {"region": region, "profile": None}), dry_run=False)

    def lose(self, name: str, region: str = EAST, **status: Any) -> None:
        """End the job an hour ago for lack of capacity."""
        defaults = {"status": "Failed", "reason": "CapacityError: Unable to provision."}
        self.sagemaker.set_status(name, **defaults | status, ended_ago=3600, region=region)

    def jobs(self) -> dict[str, str]:
        """Return every job with its region, oldest first."""
        found = jobs_of_run(self.session(), "demo")
        assert len({job.name for job in found}) == len(found), "a name in two regions"
        return {job.name: job.region for job in found}

    def described(self, name: str, region: str = EAST) -> dict[str, Any]:
        client = self.aws.client("sagemaker", region)
        found: dict[str, Any] = client.describe_training_job(TrainingJobName=name)
        return found

    def keys(self, bucket: str, prefix: str) -> list[str]:
        s3 = self.aws.client("s3")
        found = s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())
        return [entry["Key"].removeprefix(prefix) for entry in found]


@pytest.fixture
def server(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Aws:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    return aws


@pytest.fixture
def run(server: Aws, tmp_path: Path) -> LiveRun:
    return LiveRun(server, tmp_path)


def test_relocates_in_fallback_order_and_then_home(run: LiveRun) -> None:
    run.lose(FIRST)
    assert "ml.p5.48xlarge" in run.poll().done
    relocated = run.described(SECOND)
    resources = relocated["ResourceConfig"]
    assert (resources["InstanceType"], resources["InstanceCount"]) == ("ml.p5.48xlarge", 2)
    run.sagemaker.checkpoint("256px", 300)
    run.lose(SECOND, status="Stopped", secondary="Interrupted", reason=None)
    assert f"4 × ml.p4de.24xlarge in {WEST}" in run.poll().done
    there = run.described(THIRD, WEST)
    assert there["CheckpointConfig"]["S3Uri"] == "s3://west/demo/checkpoints/256px/"
    assert there["OutputDataConfig"]["S3OutputPath"] == "s3://west/demo/output"
    image = there["AlgorithmSpecification"]["TrainingImage"]
    assert image == ECR.replace(EAST, WEST)
    uris = [channel["DataSource"]["S3DataSource"]["S3Uri"] for channel in there["InputDataConfig"]]
    assert all(uri.startswith("s3://west/") for uri in uris)
    assert run.keys("west", "demo/checkpoints/256px/step-00000300/") == [
        "a.safetensors",
        "b.npz",
        "complete.json",
    ]
    assert run.sagemaker.tags(THIRD, WEST)["sm-train:from-step"] == "300"
    # It makes progress there; the home bucket then gets the newer checkpoint.
    run.sagemaker.checkpoint("256px", 700, bucket="west")
    run.lose(THIRD, WEST)
    run.poll()
    assert run.jobs() == {FIRST: EAST, SECOND: EAST, THIRD: WEST, FOURTH: EAST}
    assert run.sagemaker.tags(FOURTH)["sm-train:from-step"] == "700"
    assert "complete.json" in run.keys("ai-bucket", "demo/checkpoints/256px/step-00000700/")


def no_quota(*types: str) -> Any:
    """Reject jobs on these instance types in the first region for lack of quota."""

    def respond(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if body["_region"] != EAST or body["ResourceConfig"]["InstanceType"] not in types:
            return None
        return 400, {"__type": "ResourceLimitExceeded", "message": "the limit is 0 instances"}

    return respond


def test_placement_without_quota_is_skipped(run: LiveRun) -> None:
    run.aws.responses["CreateTrainingJob"] = no_quota("ml.p5.48xlarge")
    run.sagemaker.checkpoint("256px", 300)
    run.lose(FIRST)
    assert WEST in run.poll().done
    # The name that was rejected at one placement is used at the next.
    assert run.jobs() == {FIRST: EAST, SECOND: WEST}
    assert run.sagemaker.tags(SECOND, WEST)["sm-train:from-step"] == "300"


def test_without_any_quota_the_next_poll_retries_at_once(server: Aws, tmp_path: Path) -> None:
    run = LiveRun(server, tmp_path, recovery={"fallbacks": FALLBACKS[:1]})
    server.responses["CreateTrainingJob"] = no_quota("ml.p5.48xlarge", "ml.p4de.24xlarge")
    run.lose(FIRST)
    for _ in range(2):
        with pytest.raises(UserError, match="the limit is 0 instances; request a higher quota"):
            run.poll()
    del server.responses["CreateTrainingJob"]
    assert "started" in run.poll().done
    assert run.jobs() == {FIRST: EAST, SECOND: EAST}


def test_failure_unrelated_to_capacity_does_not_relocate(run: LiveRun) -> None:
    run.lose(FIRST)
    run.poll()
    run.lose(SECOND, reason="InternalServerError: x")
    run.poll()
    assert run.described(THIRD)["ResourceConfig"]["InstanceType"] == "ml.p5.48xlarge"


def test_pending_timeout_relocates(server: Aws, tmp_path: Path) -> None:
    run = LiveRun(server, tmp_path, cluster=CLUSTER | {"max_pending": "30m"})
    run.lose(FIRST, status="Stopped", reason=None)
    job = get_backend("sagemaker")["345678901234"][EAST].training_jobs[FIRST]
    job.training_start_time = None
    job.secondary_status_transitions = []
    job.creation_time = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
    run.poll()
    assert run.described(SECOND)["ResourceConfig"]["InstanceType"] == "ml.p5.48xlarge"


@pytest.mark.slow
def test_relocated_next_stage_gets_the_previous_stages_model(server: Aws, tmp_path: Path) -> None:
    stages = [stage("a"), stage("b", optimizer_state="keep")]
    run = LiveRun(server, tmp_path, stages=stages, recovery={"fallbacks": [OTHER_REGION]})
    first, second = "demo--a-0001", "demo--a-0002"
    run.sagemaker.checkpoint("a", 1000)
    run.aws.client("s3").put_object(
        Bucket="ai-bucket", Key="demo/checkpoints/a/final/unet/x.safetensors", Body=b"model"
    )
    run.sagemaker.set_status(first, "Completed")
    run.start(StartJob("b", 1, 0, "resume", "", auto_advance=True))
    run.lose("demo--b-0001")
    run.poll()
    assert run.jobs()["demo--b-0002"] == WEST
    assert second not in run.jobs()
    assert run.keys("west", "demo/checkpoints/a/final/") == ["unet/x.safetensors"]
    assert "complete.json" in run.keys("west", "demo/checkpoints/a/step-00001000/")


def test_relocation_encrypts_what_it_copies_and_stages(server: Aws, tmp_path: Path) -> None:
    """Both buckets deny objects without the run's key: record, code and checkpoint."""
    server.required_keys = {"ai-bucket": "alias/train", "west": "alias/train"}
    fallbacks = {"fallbacks": [OTHER_REGION]}
    run = LiveRun(server, tmp_path, recovery=fallbacks, output_kms_key="alias/train")
    head = server.client("s3").head_object(Bucket="ai-bucket", Key=f"demo/jobs/{FIRST}.json")
    assert head["ServerSideEncryption"] == "aws:kms"
    run.sagemaker.checkpoint("256px", 300)
    run.lose(FIRST)
    run.poll()
    assert run.jobs() == {FIRST: EAST, SECOND: WEST}
    assert "complete.json" in run.keys("west", "demo/checkpoints/256px/step-00000300/")


KILLED_IN_COPY = """
import os, sys
from sm_train.entrypoints.storage import server_copy
from sm_train.toolkit.submit import replicate
from sm_train.toolkit.cli import main
replicate._ProgressCounter.add = lambda *_, **__: os._exit(9)
from sm_train.toolkit.cli import main
main(sys.argv[1:])
"""


def test_copy_interrupted_by_a_kill_is_resumed(server: Aws, tmp_path: Path) -> None:
    """Copied objects are not copied again, and the marker is copied last."""
    run = LiveRun(server, tmp_path, recovery={"fallbacks": [OTHER_REGION]})
    run.sagemaker.checkpoint("256px", 300)
    run.lose(FIRST)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_COPY, "--region", EAST, "watch", "demo", "--once"],
        env=clean_environment(tmp_path) | run.aws.environment,
        check=False,
        timeout=DEADLINE,
    )
    assert killed.returncode == 9
    folder = "demo/checkpoints/256px/step-00000300/"
    copied = run.keys("west", folder)
    assert copied
    assert "complete.json" not in copied
    assert run.jobs() == {FIRST: EAST}
    run.aws.requests.clear()
    run.poll()
    assert run.jobs() == {FIRST: EAST, SECOND: WEST}
    assert len(run.keys("west", folder)) == 3
    again = [path for method, path, _ in run.aws.requests if method == "PUT" and "west" in path]
    assert not {path.rpartition("/")[2] for path in again} & set(copied)


def test_stop_during_a_copy_prevents_the_start(
    server: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LiveRun(server, tmp_path, recovery={"fallbacks": [OTHER_REGION]})
    run.sagemaker.checkpoint("256px", 300)
    run.lose(FIRST)
    on_progress = replicate._ProgressCounter.add

    def stop_and_continue(self: Any, copied_bytes: int) -> None:
        stop(find_run("demo", {"region": EAST, "profile": None}), wait=False)
        on_progress(self, copied_bytes)

    monkeypatch.setattr(replicate._ProgressCounter, "add", stop_and_continue)
    assert "was stopped" in run.poll().done
    assert run.jobs() == {FIRST: EAST}


def test_large_objects_are_copied_in_parts_and_newer_ones_again(
    run: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_copy, "_PART_BYTES", 5 << 20)
    s3, content = run.aws.client("s3"), bytes(12 << 20)
    s3.put_object(Bucket="ai-bucket", Key="x/large", Body=content)
    s3.put_object(Bucket="ai-bucket", Key="x/complete.json", Body=b"{}")
    progress: list[tuple[int, int]] = []

    def copy() -> list[tuple[str, str]]:
        run.aws.requests.clear()
        folder = replicate.FolderCopy("s3://ai-bucket/x", EAST, "s3://west/y", WEST)
        replicate.copy_folder(run.session(), folder, lambda *call: progress.append(call))
        return [(path, query) for method, path, query in run.aws.requests if method == "PUT"]

    parts = copy()
    assert sum("partNumber" in query for _, query in parts) == 3
    assert parts[-1][0] == "/west/y/complete.json"
    assert s3.get_object(Bucket="west", Key="y/large")["Body"].read() == content
    assert progress[-1] == (len(content) + 2, len(content) + 2)
    assert copy() == []
    run.aws.make_older("west", "y/complete.json", 3600)
    assert [path for path, _ in copy()] == ["/west/y/complete.json"]


START_SCRIPT = """
import json, sys, boto3
from sm_train.toolkit.aws.session import open_session
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.records.launch_record import JobNameClaim, LaunchRecord
from sm_train.toolkit.runs.remediation import StartJob
from sm_train.toolkit.platforms.sagemaker.sagemaker_run import SageMakerRun
from sm_train.toolkit.submit import start_job
from sm_train.toolkit.submit.relocation import job_launch

def wait_for_the_others(function):
    def waiting(*arguments):
        print("ready", flush=True)
        sys.stdin.readline()
        return function(*arguments)
    return waiting

owner, name = (JobNameClaim, "acquire") if sys.argv[3] == "acquire" else (start_job, sys.argv[3])
setattr(owner, name, wait_for_the_others(getattr(owner, name)))
record = LaunchRecord(**json.load(open(sys.argv[1])))
session = open_session(None, "us-east-1")
run = SageMakerRun(
    target="demo", config=record.config, region="us-east-1", bucket="ai-bucket",
    session=session, record=record,
)
start = StartJob("256px", 2, 0, "x", "", False, int(sys.argv[2]))
try:
    start_job.start_next_job(session, job_launch(run, start))
except UserError as error:
    print(error)
"""


def start_concurrently(run: LiveRun, folder: Path, placements: list[int], function: str) -> None:
    """Start attempt 2 in one process for each of ``placements``; all wait at ``function``."""
    path = folder / "record.json"
    path.write_text(json.dumps(vars(run.record)))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START_SCRIPT, path, str(placement), function],
            env=clean_environment(folder) | run.aws.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for placement in placements
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline()  # "ready", or an error
    for process in processes:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, with an error
            process.stdin.write("\n")
            process.stdin.flush()
    for process in processes:
        process.communicate(timeout=DEADLINE)
        assert process.returncode == 0


def test_concurrent_starts_at_different_placements_create_one_job(
    run: LiveRun, tmp_path: Path
) -> None:
    """SageMaker rejects duplicate names within a region; the claim, across all regions."""
    run.lose(FIRST)
    start_concurrently(run, tmp_path, [0, 2, 1], "acquire")
    assert list(run.jobs()) == [FIRST, SECOND]


def leave_expired_claim(run: LiveRun, placement: int) -> None:
    """Claim attempt 2 for ``placement`` an hour ago, without starting the job."""
    claimed = vars(run.record) | {"placement": placement, "version": 5}
    claimed |= {"holder": {"token": "0"}}
    key = f"demo/jobs/{SECOND}.json"
    s3 = run.aws.client("s3")
    s3.put_object(Bucket="ai-bucket", Key=key, Body=json.dumps(claimed).encode())
    run.aws.make_older("ai-bucket", key, 3600)


def test_expired_claim_can_be_taken_over_only_for_its_placement(run: LiveRun) -> None:
    leave_expired_claim(run, 2)
    with pytest.raises(ClaimedError):
        run.claim(SECOND, placement=1)
    run.claim(SECOND, placement=2)


@pytest.mark.parametrize(("placement", "function"), [(0, "acquire"), (2, "resolve_job_name")])
def test_expired_claim_is_taken_over_or_abandoned_by_one_process(
    run: LiveRun, tmp_path: Path, placement: int, function: str
) -> None:
    """Several processes want the claimed placement, several another."""
    run.lose(FIRST)
    leave_expired_claim(run, placement)
    start_concurrently(run, tmp_path, [0, 2, 2], function)
    jobs = list(run.jobs())
    assert jobs in ([FIRST, SECOND], [FIRST, THIRD])


def start_until(run: LiveRun, laptop: Path, placement: int, function: str) -> subprocess.Popen[str]:
    """Start attempt 2 on ``laptop``, a home folder, in a process that waits at ``function``."""
    path = laptop / "record.json"
    path.write_text(json.dumps(vars(run.record)))
    process = subprocess.Popen(
        [sys.executable, "-c", START_SCRIPT, path, str(placement), function],
        env=clean_environment(laptop) | run.aws.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def resume(cli: Cli, run: LiveRun, laptop: Path) -> subprocess.CompletedProcess[str]:
    environment = run.aws.environment | {"HOME": str(laptop)}
    arguments = ("--region", EAST, "resume", "demo", "--yes")
    return cli(*arguments, network="loopback", env=environment)


def test_claim_of_a_killed_process_is_free_at_once_on_the_same_laptop(
    cli: Cli, run: LiveRun, tmp_path: Path
) -> None:
    """While the process lives, and on another laptop, the claim holds: never two jobs."""
    run.lose(FIRST)
    laptops = [tmp_path / "one", tmp_path / "two"]
    for laptop in laptops:
        laptop.mkdir()
    claimant = start_until(run, laptops[0], 0, "create_job")
    for laptop in laptops:
        held = resume(cli, run, laptop)
        assert held.returncode == 2, held.stderr
        assert "another process has been starting it" in one_line(held.stderr)
    claimant.kill()
    claimant.communicate(timeout=DEADLINE)
    assert resume(cli, run, laptops[1]).returncode == 2
    assert list(run.jobs()) == [FIRST]
    resumed = resume(cli, run, laptops[0])
    assert resumed.returncode == 0, resumed.stderr
    assert list(run.jobs()) == [FIRST, SECOND]


def test_several_processes_take_over_the_claim_of_a_killed_one_once(
    run: LiveRun, tmp_path: Path
) -> None:
    run.lose(FIRST)
    claimant = start_until(run, tmp_path, 0, "create_job")
    claimant.kill()
    claimant.communicate(timeout=DEADLINE)
    start_concurrently(run, tmp_path, [0, 0, 2], "acquire")
    assert list(run.jobs()) == [FIRST, SECOND]


def test_concurrent_watchers_relocate_a_run_once(run: LiveRun, tmp_path: Path) -> None:
    run.sagemaker.checkpoint("256px", 300)
    run.lose(FIRST)
    watchers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sm_train.toolkit",
                "--region",
                region,
                "watch",
                "demo",
                "--once",
            ],
            env=clean_environment(tmp_path) | run.aws.environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for region in (EAST, EAST)
    ]
    output = [watcher.communicate(timeout=DEADLINE)[1] for watcher in watchers]
    assert [watcher.returncode for watcher in watchers] == [0, 0], output
    assert list(run.jobs()) == [FIRST, SECOND]


@pytest.mark.slow
def test_commands_work_from_each_of_a_runs_regions(
    server: Aws,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Submit, relocate, inspect from both regions, stop, and resume in both."""
    monkeypatch.setenv("HOME", str(tmp_path))
    aws, sagemaker = server, FakeSageMaker(server)
    aws.make_bucket("ai-bucket", **SHARDS)
    aws.make_bucket("west", WEST, **SHARDS)
    cluster = {"instance_type": "ml.p4de.24xlarge", "backend": "nccl"}
    file = write_run(tmp_path, recovery={"fallbacks": [OTHER_REGION]}, cluster=cluster)

    def sm_train(*arguments: str | Path, region: str = EAST, code: int = 0) -> Any:
        with pytest.raises(SystemExit) as ended:
            main(["--region", region, *map(str, arguments)])
        output = capsys.readouterr()
        assert ended.value.code == code, output.err
        return json.loads(output.out) if "--json" in arguments else output

    plan = sm_train("submit", file, "--yes").err
    assert f"4 × ml.p4de.24xlarge in {WEST}, on-demand; $" in plan
    s3 = aws.client("s3")
    [staged] = [
        item["Key"]
        for item in s3.list_objects_v2(Bucket="west", Prefix="demo/code/")["Contents"]
        if item["Key"].endswith("sourcedir.tar.gz")
    ]
    body = s3.get_object(Bucket="west", Key=staged)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(body)) as bundle:
        inner = bundle.extractfile("run.json")
        assert inner is not None
        document = json.loads(inner.read())
    assert (document["region"], document["bucket"]) == (WEST, "west")
    drivers = staged.replace("code/sourcedir.tar.gz", "sm_drivers/sm_train.sh")
    assert "launch train.py" in s3.get_object(Bucket="west", Key=drivers)["Body"].read().decode()

    sagemaker.checkpoint("256px", 300)
    sagemaker.set_status(FIRST, "Failed", reason="CapacityError: none", seconds=0, ended_ago=3600)
    assert sm_train("watch", "demo", "--once", "--json")["action"] == "start"
    sagemaker.log_event(SECOND, "step", region=WEST, step=400, steps_per_second=2.0)
    for region in (EAST, WEST):
        status = sm_train("status", "demo", "--json", region=region)
        assert status["region"] == EAST
        assert status["stages"][0]["step"] == 400
        assert [job["region"] for job in status["stages"][0]["jobs"]] == [EAST, WEST]
    assert status["spent_usd"] == pytest.approx(600 * 4 * 31.5641075 / 3600, rel=0.1)
    [listed] = sm_train("list", "--json")["runs"]
    assert (listed["job"], listed["region"], listed["jobs"]) == (SECOND, WEST, 2)
    assert '"kind":"step"' in sm_train("logs", SECOND, "--raw").out.replace(" ", "")
    assert "neither a run file" in sm_train("logs", "demo--256px-0009", code=2).err
    actual = sm_train("cost", file, "--actual", "--json")
    assert actual["total"]["billed_usd"] == pytest.approx(status["spent_usd"], rel=0.1)

    sm_train("stop", "demo")
    assert sagemaker.tags(SECOND, WEST)["sm-train:stopped-for"] == "user"
    sagemaker.checkpoint("256px", 500, bucket="west")
    sagemaker.set_status(SECOND, "Stopped", region=WEST)
    assert f"home?region={WEST}" in sm_train("resume", "demo", "--yes").err
    assert sagemaker.names(WEST) == [SECOND, THIRD]
    sagemaker.set_status(THIRD, "Stopped", region=WEST)
    sm_train("resume", file, "--yes")
    assert sagemaker.names() == [FIRST, FOURTH]
    assert sagemaker.tags(FOURTH)["sm-train:from-step"] == "500"
    copied = s3.list_objects_v2(Bucket="ai-bucket", Prefix="demo/checkpoints/256px/step-00000500/")
    assert copied["KeyCount"] == 3


def test_run_in_one_region_calls_no_other_and_copies_nothing(server: Aws, tmp_path: Path) -> None:
    run = LiveRun(server, tmp_path, recovery={"fallbacks": FALLBACKS[:1]})
    run.sagemaker.checkpoint("256px", 300)
    run.lose(FIRST)
    run.aws.requests.clear()
    run.poll()
    assert "sm-train:regions" not in run.sagemaker.tags(FIRST)
    assert not [path for _, path, _ in run.aws.requests if path.startswith("/west")]
    puts = [path for method, path, _ in run.aws.requests if method == "PUT"]
    assert puts == [f"/ai-bucket/demo/jobs/{SECOND}.json"]
