"""Only one pack at a time writes below an S3 prefix: the second is refused before it starts."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.packing import claim as claims
from sm_train.entrypoints.packing.claim import (
    CLAIM_NAME,
    PackClaim,
    PackClaimedError,
    acquire,
    hold_claim,
    release,
)
from sm_train.entrypoints.packing.storage import S3Prefix

from tests.conftest import Aws, Cli
from tests.support.deadline import DEADLINE
from tests.support.image_files import write_album
from tests.support.run_files import write_run
from tests.toolkit.packing.test_pack_options import read_objects, upload_folder


@pytest.fixture
def prefix(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> S3Prefix:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    aws.make_bucket("packed")
    return S3Prefix("packed", "set/", S3Access(None, "us-east-1"))


def no_job(job: str) -> bool:
    return False


def elsewhere() -> PackClaim:
    return replace(PackClaim.of_this_process(), host="another-computer")


def test_exactly_one_of_many_gets_the_claim(prefix: S3Prefix) -> None:
    barrier, won = threading.Barrier(8, timeout=DEADLINE), list[str]()

    def start() -> None:
        claim = elsewhere()
        barrier.wait()
        try:
            acquire(prefix, claim, no_job)
        except PackClaimedError:
            return
        won.append(claim.token)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert json.loads(prefix.read(CLAIM_NAME))["token"] == won[0]


def test_a_claim_is_held_until_it_is_released_or_expires(
    prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = elsewhere(), elsewhere()
    acquire(prefix, first, no_job)
    with pytest.raises(PackClaimedError, match=f"to it: process {os.getpid()} on another"):
        acquire(prefix, second, no_job)
    release(prefix, second)  # is not the holder
    assert prefix.size(CLAIM_NAME)
    monkeypatch.setattr(claims, "EXPIRES_SECONDS", -1.0)
    acquire(prefix, second, no_job)
    release(prefix, first)
    assert json.loads(prefix.read(CLAIM_NAME))["token"] == second.token
    release(prefix, second)
    assert prefix.size(CLAIM_NAME) is None


def test_the_claim_of_a_process_that_ended_here_is_taken_over_at_once(prefix: S3Prefix) -> None:
    acquire(prefix, replace(PackClaim.of_this_process(), started="1"), no_job)
    with hold_claim(prefix, no_job), pytest.raises(PackClaimedError):
        acquire(prefix, elsewhere(), no_job)
    assert prefix.size(CLAIM_NAME) is None


def test_a_held_claim_is_renewed(prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RENEW_SECONDS", 0.01)
    renewed, put = threading.Event(), claims.put_claim

    def observed(*arguments: Any) -> str | None:
        etag = put(*arguments)
        if arguments[3] is not None and etag is not None:
            renewed.set()
        return etag

    monkeypatch.setattr(claims, "put_claim", observed)
    with hold_claim(prefix, no_job):
        assert renewed.wait(DEADLINE)


def test_the_claim_of_a_job_is_held_while_it_runs(
    prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire(prefix, PackClaim.of_job("pack-1"), no_job)
    with pytest.raises(PackClaimedError, match="the processing job pack-1"):
        acquire(prefix, elsewhere(), no_job)  # the job is about to be created
    monkeypatch.setattr(claims, "EXPIRES_SECONDS", -1.0)
    with pytest.raises(PackClaimedError, match="the processing job pack-1"):
        acquire(prefix, elsewhere(), lambda job: job == "pack-1")
    acquire(prefix, elsewhere(), no_job)


def test_a_second_pack_is_refused_before_it_starts(cli: Cli, aws: Aws, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 4)
    upload_folder(aws, tmp_path / "in", "photos/")
    aws.make_bucket("packed")
    aws.make_bucket("ai-bucket")
    run = write_run(tmp_path, bucket="ai-bucket")

    def pack(*options: object) -> Any:
        arguments = ("--region", "us-east-1", "pack", "s3://raw/photos/", "s3://packed/set")
        return cli(*arguments, *options, network="loopback", env=aws.environment, timeout=120)

    job = ("--on", "sagemaker", "--for", run, "--yes")
    started = pack(*job)
    assert started.returncode == 0, started.stderr
    [body] = aws.bodies("CreateProcessingJob")
    before = read_objects(aws, "packed", "")
    for second in (pack(), pack(*job)):
        assert (second.returncode, second.stderr.strip().splitlines()[-1]) == (
            2,
            "sm-train: s3://packed/set: another sm-train pack is writing to it: the processing job "
            f"{body['ProcessingJobName']}",
        )
    assert len(aws.bodies("CreateProcessingJob")) == 1
    assert read_objects(aws, "packed", "") == before
