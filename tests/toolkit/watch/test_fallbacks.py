"""A run that finds no machines goes on elsewhere: real processes, two regions of one server."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.backends import get_backend
from sm_train.estimators.config.load import load_run
from sm_train.toolkit.cli import main
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.launch_record import ClaimedError, JobNameClaim
from sm_train.toolkit.jobs.training_job import jobs_of_run
from sm_train.toolkit.runs.remediation import StartJob
from sm_train.toolkit.runs.resolve import Run, resolve_run
from sm_train.toolkit.runs.stop import stop_run
from sm_train.toolkit.submit import replicate
from sm_train.toolkit.submit.bundle import bundle_of
from sm_train.toolkit.submit.relocation import job_launch
from sm_train.toolkit.submit.start_job import start_next_job
from sm_train.toolkit.submit.submission import launch_record, prepare
from sm_train.toolkit.watch.controller import WatchResult, reconcile

from tests.conftest import Aws, clean_environment
from tests.support.job_lifecycle import Lives
from tests.support.run_documents import ECR, stage
from tests.support.run_files import write_run

EAST, WEST = "us-east-1", "us-west-2"
SHARDS = {f"shards/{index}.tar": b"x" for index in range(8)} | {"index.parquet": b"x"}
MACHINES = {"instance_type": "ml.p4de.24xlarge", "backend": "nccl", "image": ECR}
ELSEWHERE = {"region": WEST, "buckets": {"my-bucket": "west"}}
FALLBACKS = [
    {"instance_type": "ml.p5.48xlarge", "stages": {"256px": {"instances": 2}}},
    ELSEWHERE,
]
SESSIONS = {one: boto3.Session("testing", "testing", region_name=one) for one in (EAST, WEST)}
"""For all tests: they keep botocore's models of the services, not endpoints."""

FIRST, SECOND, THIRD, FOURTH = (f"demo--256px-000{number}" for number in (1, 2, 3, 4))


class LiveRun:
    """A run whose first job is started; looked at in this process, as a watcher does."""

    def __init__(self, aws: Aws, folder: Path, **changes: Any) -> None:
        self.aws, self.lives = aws, Lives(aws)
        aws.make_bucket("my-bucket", **SHARDS)
        aws.make_bucket("west", WEST, **SHARDS)
        changes = {"cluster": MACHINES, "recovery": {"fallbacks": FALLBACKS}} | changes
        self.file = write_run(folder, **changes)
        config = load_run(self.file)
        submission = prepare(
            config, config.stages[0].name, bundle_of(config, folder), EAST, datetime(2026, 11, 20)
        )
        self.record = launch_record(submission, submission.requests[0])
        self.run = Run("demo", EAST, "my-bucket", config, self.record)
        self.start(StartJob(config.stages[0].name, 1, 0, "submit", "", auto_advance=False))

    def session(self, region: str = EAST) -> Any:
        return SESSIONS[region]

    def start(self, start: StartJob) -> str:
        return start_next_job(self.session(), job_launch(self.run, start))

    def claim(self, job: str, placement: int) -> None:
        record = replace(self.record, placement=placement)
        JobNameClaim(self.session(), "my-bucket", job, record).acquire()

    def look(self, region: str = EAST) -> WatchResult:
        session = self.session(region)
        return reconcile(session, resolve_run(session, "demo", region), dry_run=False)

    def lose(self, name: str, region: str = EAST, **fate: Any) -> None:
        """No machines, an hour ago."""
        given = {"status": "Failed", "reason": "CapacityError: Unable to provision."} | fate
        self.lives.tell(name, **given, ended_ago=3600, region=region)

    def jobs(self) -> dict[str, str]:
        """Every job, with its region, the oldest first."""
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


def test_a_run_goes_through_its_places_in_order_and_to_its_own_again(run: LiveRun) -> None:
    run.lose(FIRST)
    assert "ml.p5.48xlarge" in run.look().done
    moved = run.described(SECOND)
    resources = moved["ResourceConfig"]
    assert (resources["InstanceType"], resources["InstanceCount"]) == ("ml.p5.48xlarge", 2)
    run.lives.checkpoint("256px", 300)
    run.lose(SECOND, status="Stopped", secondary="Interrupted", reason=None)
    assert f"4 × ml.p4de.24xlarge in {WEST}" in run.look().done
    there = run.described(THIRD, WEST)
    assert there["CheckpointConfig"]["S3Uri"] == "s3://west/demo/checkpoints/256px"
    assert there["OutputDataConfig"]["S3OutputPath"] == "s3://west/demo/output"
    image = there["AlgorithmSpecification"]["TrainingImage"]
    assert image == ECR.replace(EAST, WEST)
    uris = [one["DataSource"]["S3DataSource"]["S3Uri"] for one in there["InputDataConfig"]]
    assert all(uri.startswith("s3://west/") for uri in uris)
    assert run.keys("west", "demo/checkpoints/256px/step-00000300/") == [
        "a.safetensors",
        "b.npz",
        "complete.json",
    ]
    assert run.lives.tags(THIRD, WEST)["sm-train:from-step"] == "300"
    # There it comes on, and its own place gets what it has learned since.
    run.lives.checkpoint("256px", 700, bucket="west")
    run.lose(THIRD, WEST)
    run.look()
    assert run.jobs() == {FIRST: EAST, SECOND: EAST, THIRD: WEST, FOURTH: EAST}
    assert run.lives.tags(FOURTH)["sm-train:from-step"] == "700"
    assert "complete.json" in run.keys("my-bucket", "demo/checkpoints/256px/step-00000700/")


def no_quota(*types: str) -> Any:
    """An account that may not have machines of these types in the first region."""

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if body["_region"] != EAST or body["ResourceConfig"]["InstanceType"] not in types:
            return None
        return 400, {"__type": "ResourceLimitExceeded", "message": "the limit is 0 instances"}

    return answer


def test_a_place_without_quota_is_passed_by(run: LiveRun) -> None:
    run.aws.answers["CreateTrainingJob"] = no_quota("ml.p5.48xlarge")
    run.lives.checkpoint("256px", 300)
    run.lose(FIRST)
    assert WEST in run.look().done
    # The name that was refused at one place is taken at the next.
    assert run.jobs() == {FIRST: EAST, SECOND: WEST}
    assert run.lives.tags(SECOND, WEST)["sm-train:from-step"] == "300"


def test_without_quota_anywhere_the_next_look_asks_again_at_once(
    server: Aws, tmp_path: Path
) -> None:
    run = LiveRun(server, tmp_path, recovery={"fallbacks": FALLBACKS[:1]})
    server.answers["CreateTrainingJob"] = no_quota("ml.p5.48xlarge", "ml.p4de.24xlarge")
    run.lose(FIRST)
    for _ in range(2):
        with pytest.raises(UserError, match="the limit is 0 instances; request a higher quota"):
            run.look()
    del server.answers["CreateTrainingJob"]
    assert "started" in run.look().done
    assert run.jobs() == {FIRST: EAST, SECOND: EAST}


def test_what_another_place_does_not_mend_is_repeated_where_it_was(run: LiveRun) -> None:
    run.lose(FIRST)
    run.look()
    run.lose(SECOND, reason="InternalServerError: x")
    run.look()
    assert run.described(THIRD)["ResourceConfig"]["InstanceType"] == "ml.p5.48xlarge"


def test_a_job_that_waited_longer_than_it_may_is_one_without_machines(
    server: Aws, tmp_path: Path
) -> None:
    run = LiveRun(server, tmp_path, cluster=MACHINES | {"max_pending": "30m"})
    run.lose(FIRST, status="Stopped", reason=None)
    job = get_backend("sagemaker")["123456789012"][EAST].training_jobs[FIRST]
    job.training_start_time = None
    job.creation_time = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
    run.look()
    assert run.described(SECOND)["ResourceConfig"]["InstanceType"] == "ml.p5.48xlarge"


def test_the_next_stage_begins_where_the_run_is_with_the_model_of_the_one_before(
    server: Aws, tmp_path: Path
) -> None:
    stages = [stage("a"), stage("b", optimizer_state="keep")]
    run = LiveRun(server, tmp_path, stages=stages, recovery={"fallbacks": [ELSEWHERE]})
    first, second = "demo--a-0001", "demo--a-0002"
    run.lives.checkpoint("a", 1000)
    run.aws.client("s3").put_object(
        Bucket="my-bucket", Key="demo/checkpoints/a/final/unet/x.safetensors", Body=b"model"
    )
    run.lives.tell(first, "Completed")
    run.start(StartJob("b", 1, 0, "resume", "", auto_advance=True))
    run.lose("demo--b-0001")
    run.look()
    assert run.jobs()["demo--b-0002"] == WEST
    assert second not in run.jobs()
    assert run.keys("west", "demo/checkpoints/a/final/") == ["unet/x.safetensors"]
    assert "complete.json" in run.keys("west", "demo/checkpoints/a/step-00001000/")


DIES = """
import os, sys
from sm_train.toolkit.submit import replicate
from sm_train.toolkit.cli import main
replicate._ProgressCounter.on_progress = lambda *_, **__: os._exit(9)
from sm_train.toolkit.cli import main
main(sys.argv[1:])
"""


def test_a_watcher_that_is_killed_in_the_middle_of_a_copy(server: Aws, tmp_path: Path) -> None:
    """The next one goes on: what is there is not copied again, the marker comes last."""
    run = LiveRun(server, tmp_path, recovery={"fallbacks": [ELSEWHERE]})
    run.lives.checkpoint("256px", 300)
    run.lose(FIRST)
    killed = subprocess.run(
        [sys.executable, "-c", DIES, "--region", EAST, "watch", "demo", "--once"],
        env=clean_environment(tmp_path) | run.aws.environment,
        check=False,
        timeout=120,
    )
    assert killed.returncode == 9
    folder = "demo/checkpoints/256px/step-00000300/"
    partly = run.keys("west", folder)
    assert partly
    assert "complete.json" not in partly
    assert run.jobs() == {FIRST: EAST}
    run.aws.requests.clear()
    run.look()
    assert run.jobs() == {FIRST: EAST, SECOND: WEST}
    assert len(run.keys("west", folder)) == 3
    again = [path for method, path, _ in run.aws.requests if method == "PUT" and "west" in path]
    assert not {path.rpartition("/")[2] for path in again} & set(partly)


def test_a_stop_while_a_checkpoint_is_copied_is_kept(
    server: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LiveRun(server, tmp_path, recovery={"fallbacks": [ELSEWHERE]})
    run.lives.checkpoint("256px", 300)
    run.lose(FIRST)
    copied = replicate._ProgressCounter.on_progress

    def stopped_meanwhile(self: Any, **told: Any) -> None:
        found = resolve_run(run.session(), "demo", EAST)
        stop_run(run.session(), found, wait=False)
        copied(self, **told)

    monkeypatch.setattr(replicate._ProgressCounter, "on_progress", stopped_meanwhile)
    assert "was stopped" in run.look().done
    assert run.jobs() == {FIRST: EAST}


def test_a_large_object_is_copied_in_parts_and_a_newer_one_anew(
    run: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicate, "_PART_BYTES", 5 << 20)
    s3, content = run.aws.client("s3"), bytes(12 << 20)
    s3.put_object(Bucket="my-bucket", Key="x/large", Body=content)
    s3.put_object(Bucket="my-bucket", Key="x/complete.json", Body=b"{}")
    seen: list[tuple[int, int]] = []

    def copy() -> list[tuple[str, str]]:
        run.aws.requests.clear()
        folder = replicate.FolderCopy("s3://my-bucket/x", EAST, "s3://west/y", WEST)
        replicate.copy_folder(run.session(), folder, lambda *one: seen.append(one))
        return [(path, query) for method, path, query in run.aws.requests if method == "PUT"]

    parts = copy()
    assert sum("partNumber" in query for _, query in parts) == 3
    assert parts[-1][0] == "/west/y/complete.json"
    assert s3.get_object(Bucket="west", Key="y/large")["Body"].read() == content
    assert seen[-1] == (len(content) + 2, len(content) + 2)
    assert copy() == []
    [old] = [
        version
        for name, version in get_backend("s3")["123456789012"]["aws"].buckets["west"].keys.items()
        if name == "y/complete.json"
    ]
    old.last_modified -= timedelta(hours=1)
    assert [path for path, _ in copy()] == ["/west/y/complete.json"]


START_SCRIPT = """
import json, sys, boto3
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.launch_record import JobNameClaim, LaunchRecord
from sm_train.toolkit.runs.remediation import StartJob
from sm_train.toolkit.runs.resolve import Run
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
run = Run("demo", "us-east-1", "my-bucket", record.config, record)
session = boto3.Session("testing", "testing", region_name="us-east-1")
start = StartJob("256px", 2, 0, "x", "", False, int(sys.argv[2]))
try:
    start_job.start_next_job(session, job_launch(run, start))
except UserError as error:
    print(error)
"""


def start_at_once(run: LiveRun, folder: Path, places: list[int], function: str) -> None:
    """One process for each of ``places``, which starts attempt 2 there: all have come to
    ``function`` when the first may call it.
    """
    path = folder / "record.json"
    path.write_text(json.dumps(vars(run.record)))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START_SCRIPT, path, str(place), function],
            env=clean_environment(folder) | run.aws.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline()  # ready, or why it goes no further
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_whatever_places_are_wanted_at_once_one_job_comes(run: LiveRun, tmp_path: Path) -> None:
    """SageMaker takes a name once in each region; the record, once in all."""
    run.lose(FIRST)
    start_at_once(run, tmp_path, [0, 2, 1], "acquire")
    assert list(run.jobs()) == [FIRST, SECOND]


def broken_off(run: LiveRun, place: int) -> None:
    """Somebody claimed attempt 2 for ``place`` an hour ago, and was never heard of again."""
    claimed = vars(run.record) | {"placement": place, "version": 3, "claim": "0"}
    key = f"demo/jobs/{SECOND}.json"
    s3 = run.aws.client("s3")
    s3.put_object(Bucket="my-bucket", Key=key, Body=json.dumps(claimed).encode())
    stored = get_backend("s3")["123456789012"]["aws"].buckets["my-bucket"].keys
    [version] = [one for name, one in stored.items() if name == key]
    version.last_modified = datetime.now(UTC).replace(tzinfo=None) - timedelta(hours=1)


def test_who_slept_between_look_and_claim_takes_over_at_the_same_place_alone(run: LiveRun) -> None:
    broken_off(run, 2)
    with pytest.raises(ClaimedError):
        run.claim(SECOND, placement=1)
    run.claim(SECOND, placement=2)


@pytest.mark.parametrize(("place", "function"), [(0, "acquire"), (2, "with_free_name")])
def test_a_start_that_was_broken_off_is_taken_over_or_given_up_by_one_alone(
    run: LiveRun, tmp_path: Path, place: int, function: str
) -> None:
    """Several want the place that it was claimed for, and several another."""
    run.lose(FIRST)
    broken_off(run, place)
    start_at_once(run, tmp_path, [0, 2, 2], function)
    made = list(run.jobs())
    assert made in ([FIRST, SECOND], [FIRST, THIRD])


def test_two_watchers_move_a_run_once(run: LiveRun, tmp_path: Path) -> None:
    run.lives.checkpoint("256px", 300)
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
    said = [watcher.communicate(timeout=120)[1] for watcher in watchers]
    assert [watcher.returncode for watcher in watchers] == [0, 0], said
    assert list(run.jobs()) == [FIRST, SECOND]


def test_every_command_sees_the_run_from_any_of_its_regions(
    server: Aws,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Submitted for real, moved, looked at from both sides, stopped, and resumed on both."""
    monkeypatch.setenv("HOME", str(tmp_path))
    aws, lives = server, Lives(server)
    aws.make_bucket("my-bucket", **SHARDS)
    aws.make_bucket("west", WEST, **SHARDS)
    machines = {"instance_type": "ml.p4de.24xlarge", "backend": "nccl"}
    file = write_run(tmp_path, recovery={"fallbacks": [ELSEWHERE]}, cluster=machines)

    def sm_train(*words: str | Path, region: str = EAST, code: int = 0) -> Any:
        with pytest.raises(SystemExit) as ended:
            main(["--region", region, *map(str, words)])
        said = capsys.readouterr()
        assert ended.value.code == code, said.err
        return json.loads(said.out) if "--json" in words else said

    asked = sm_train("submit", file, "--yes").err
    assert f"4 × ml.p4de.24xlarge in {WEST}, on-demand; $" in asked
    s3 = aws.client("s3")
    [staged] = [
        one["Key"]
        for one in s3.list_objects_v2(Bucket="west", Prefix="demo/code/")["Contents"]
        if one["Key"].endswith("sourcedir.tar.gz")
    ]
    body = s3.get_object(Bucket="west", Key=staged)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(body)) as bundle:
        inner = bundle.extractfile("run.json")
        assert inner is not None
        document = json.loads(inner.read())
    assert (document["region"], document["bucket"]) == (WEST, "west")
    drivers = staged.replace("code/sourcedir.tar.gz", "sm_drivers/sm_train.sh")
    assert "launch train.py" in s3.get_object(Bucket="west", Key=drivers)["Body"].read().decode()

    lives.checkpoint("256px", 300)
    lives.tell(FIRST, "Failed", reason="CapacityError: none", seconds=0, ended_ago=3600)
    assert sm_train("watch", "demo", "--once", "--json")["action"] == "start"
    lives.say(SECOND, "step", region=WEST, step=400, steps_per_second=2.0)
    for region in (EAST, WEST):
        seen = sm_train("status", "demo", "--json", region=region)
        assert seen["region"] == EAST
        assert seen["stages"][0]["step"] == 400
        assert [job["region"] for job in seen["stages"][0]["jobs"]] == [EAST, WEST]
    assert seen["spent_usd"] == pytest.approx(600 * 4 * 31.5641075 / 3600, rel=0.02)
    [listed] = sm_train("list", "--json")["runs"]
    assert (listed["job"], listed["region"], listed["jobs"]) == (SECOND, WEST, 2)
    assert '"kind":"step"' in sm_train("logs", SECOND, "--raw").out.replace(" ", "")
    assert "neither a run file" in sm_train("logs", "demo--256px-0009", code=2).err
    actual = sm_train("cost", file, "--actual", "--json")
    assert actual["total"]["billed_usd"] == pytest.approx(seen["spent_usd"], rel=0.02)

    sm_train("stop", "demo")
    assert lives.tags(SECOND, WEST)["sm-train:stopped-for"] == "user"
    lives.checkpoint("256px", 500, bucket="west")
    lives.tell(SECOND, "Stopped", region=WEST)
    assert f"home?region={WEST}" in sm_train("resume", "demo", "--yes").err
    assert lives.names(WEST) == [SECOND, THIRD]
    lives.tell(THIRD, "Stopped", region=WEST)
    sm_train("resume", file, "--yes")
    assert lives.names() == [FIRST, FOURTH]
    assert lives.tags(FOURTH)["sm-train:from-step"] == "500"
    copied = s3.list_objects_v2(Bucket="my-bucket", Prefix="demo/checkpoints/256px/step-00000500/")
    assert copied["KeyCount"] == 3


def test_a_run_of_one_region_asks_no_other_and_copies_nothing(server: Aws, tmp_path: Path) -> None:
    run = LiveRun(server, tmp_path, recovery={"fallbacks": FALLBACKS[:1]})
    run.lives.checkpoint("256px", 300)
    run.lose(FIRST)
    run.aws.requests.clear()
    run.look()
    assert "sm-train:regions" not in run.lives.tags(FIRST)
    assert not [path for _, path, _ in run.aws.requests if path.startswith("/west")]
    puts = [path for method, path, _ in run.aws.requests if method == "PUT"]
    assert puts == [f"/my-bucket/demo/jobs/{SECOND}.json"]
