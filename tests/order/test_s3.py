"""Commands that write to S3 and start jobs, killed at any of their requests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import cast

import pytest
from sm_train.entrypoints.base.digests import file_digest
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.toolkit.records.launch_record import read_record

from tests.conftest import Aws, clean_environment
from tests.support.image_files import write_album
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.moto_server import aws_session
from tests.support.order.traced import Call, Program, read_trace
from tests.support.run_files import write_run

WRITES = ("PUT", "POST", "DELETE")


def program(folder: Path, aws: Aws, *arguments: str) -> Program:
    environment = clean_environment(folder) | aws.environment | {"AWS_REGION": "us-east-1"}
    return Program(folder, environment, arguments)


def writes(calls: list[Call], place: str) -> list[int]:
    """Return the numbers of the calls that change objects below a place, or start a job."""
    return [
        number
        for number, call in enumerate(calls, start=1)
        if call.kind in WRITES and (call.path.startswith(place) or not call.path)
    ]


def pack_state(aws: Aws, prefix: str) -> object:
    """Return the samples of a pack in S3; None without an index. All its shards must be intact."""
    s3 = aws.client("s3")
    listed = s3.list_objects_v2(Bucket="packed", Prefix=prefix).get("Contents", [])
    keys = {entry["Key"].removeprefix(prefix) for entry in listed}
    if "index.parquet" not in keys:
        return None

    def read(name: str) -> io.BytesIO:
        return io.BytesIO(s3.get_object(Bucket="packed", Key=prefix + name)["Body"].read())

    index = ShardIndex("index.parquet", cast("io.RawIOBase", read("index.parquet")))
    for number, name in enumerate(index.names):
        assert file_digest(read(f"shards/{name}")) == index.shard(number).blake3
    return [index.keys(number) for number in range(len(index))]


class PackToS3:
    """`sm-train pack` of the same images to a prefix of its own for each attempt."""

    def __init__(self, aws: Aws, folder: Path) -> None:
        self.aws, self._folder, self._attempts = aws, folder, 0
        write_album(folder / "in", 7)
        aws.make_bucket("packed")
        done, self.calls = self.run(self.prefix())
        assert done == 0
        self.after = pack_state(aws, "1/")

    def prefix(self) -> str:
        self._attempts += 1
        return f"{self._attempts}/"

    def run(self, prefix: str, kill_at: int = 0) -> tuple[int, list[Call]]:
        place = f"s3://packed/{prefix.rstrip('/')}"
        command = program(self._folder, self.aws, "pack", "in", place, "--shard-size", "3KB")
        done = command.run(self._folder / "trace", kill_at)
        return done.returncode, read_trace(self._folder / "trace")

    def require_recovery(self, numbers: list[int]) -> None:
        for number in numbers:
            prefix = self.prefix()
            code, calls = self.run(prefix, kill_at=number)
            if code == 0:
                continue  # a run with fewer calls: threads differ in their number
            state = pack_state(self.aws, prefix)
            assert state in (None, self.after), (number, calls[-1])
            assert self.run(prefix)[0] == 0, (number, calls[-1])
            assert pack_state(self.aws, prefix) == self.after, (number, calls[-1])


@pytest.fixture
def packing(aws: Aws, tmp_path: Path) -> PackToS3:
    return PackToS3(aws, tmp_path)


@pytest.mark.integration
def test_the_index_is_stored_after_all_that_it_lists(packing: PackToS3) -> None:
    stored = [call for call in packing.calls if call.kind == "PUT" and "packed/1/" in call.path]
    names = [call.path.partition("?")[0].removeprefix("packed/1/") for call in stored]
    position = names.index("index.parquet")
    shards = [number for number, name in enumerate(names) if name.startswith("shards/")]
    assert shards
    assert max(shards) < position
    removed = [
        number
        for number, call in enumerate(packing.calls)
        if call.kind == "DELETE" or (call.kind == "POST" and "delete" in call.path)
    ]
    named = packing.calls.index(stored[position])
    assert all(number > named for number in removed)


@pytest.mark.integration
def test_a_kill_at_some_requests_leaves_a_pack_that_can_be_read(packing: PackToS3) -> None:
    numbers = writes(packing.calls, "packed/")
    packing.require_recovery(numbers[-6::3])


@pytest.mark.slow
def test_a_kill_at_any_request_leaves_a_pack_that_can_be_read(packing: PackToS3) -> None:
    packing.require_recovery(writes(packing.calls, "packed/"))


class Submissions:
    """`sm-train submit` of a run of its own for each attempt."""

    def __init__(self, aws: Aws, folder: Path) -> None:
        self._aws, self._folder, self._attempts = aws, folder, 0
        self.sagemaker = FakeSageMaker(aws)  # whose jobs do not end by themselves
        shards = {f"shards/{number}.tar": b"x" for number in range(4)}
        aws.make_bucket("ai-bucket", **shards, **{"index.parquet": b"x"})
        _, code, self.calls = self.submit()
        assert code == 0

    def submit(self, kill_at: int = 0, run: str | None = None) -> tuple[str, int, list[Call]]:
        if run is None:
            self._attempts += 1
            run = f"demo{self._attempts}"
            write_run(self._folder, name=run)
        code, calls = self.run("submit", "run.yaml", kill_at=kill_at)
        return run, code, calls

    def run(self, *arguments: str, kill_at: int = 0) -> tuple[int, list[Call]]:
        command = program(self._folder, self._aws, *arguments, "--yes")
        done = command.run(self._folder / "trace", kill_at)
        return done.returncode, read_trace(self._folder / "trace")

    def jobs(self, run: str) -> list[str]:
        names = [body["TrainingJobName"] for body in self._aws.bodies("CreateTrainingJob")]
        return [name for name in names if name.startswith(f"{run}--")]

    def require_one_job(self, numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", self._aws.url)
        session = aws_session()
        for number in numbers:
            run, code, calls = self.submit(kill_at=number)
            if code == 0:
                continue
            before = {*self.jobs(run)}
            for name in before:  # who reads it finds the whole record of a job that was created
                assert read_record(session, "ai-bucket", run, name) is not None, calls[-1]
            self.submit(run=run)
            started = {*self.jobs(run)}
            assert len(started) == 1, (number, calls[-1], started)
            assert before <= started


@pytest.fixture
def submissions(aws: Aws, tmp_path: Path) -> Submissions:
    return Submissions(aws, tmp_path)


def deciding(calls: list[Call]) -> list[int]:
    return [number for number, call in enumerate(calls, start=1) if call.kind in WRITES]


@pytest.mark.integration
def test_a_submission_that_is_killed_starts_one_job(
    submissions: Submissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions.require_one_job(deciding(submissions.calls)[-2:], monkeypatch)


@pytest.mark.slow
def test_a_submission_that_is_killed_at_any_request_starts_one_job(
    submissions: Submissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions.require_one_job(deciding(submissions.calls), monkeypatch)


def require_record_before_start(calls: list[Call], run: str) -> int:
    """Return the number of the request that starts the job, which follows its record."""
    starts = [number for number, call in enumerate(calls) if call.kind == "POST" and not call.path]
    [record] = [
        number
        for number, call in enumerate(calls)
        if call.kind == "PUT" and call.path.startswith(f"ai-bucket/{run}/jobs/")
    ]
    [start] = [number for number in starts if number > record][:1]
    return start + 1


@pytest.mark.integration
def test_the_record_of_a_job_is_stored_before_a_resume_starts_it(
    submissions: Submissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, code, calls = submissions.submit()
    assert code == 0
    require_record_before_start(calls, run)
    [first] = submissions.jobs(run)
    submissions.sagemaker.set_status(first, "Stopped")
    _, calls = submissions.run("resume", run, kill_at=10_000)
    start = require_record_before_start(calls, run)
    [first, second] = submissions.jobs(run)

    # Killed at its start, another run resumes with one job.
    submissions.sagemaker.set_status(second, "Stopped")
    code, _ = submissions.run("resume", run, kill_at=start)
    assert code != 0
    assert submissions.run("resume", run)[0] == 0
    assert len(submissions.jobs(run)) == 3
