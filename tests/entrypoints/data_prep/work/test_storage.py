"""Local folders and S3 prefixes: complete reads, atomic writes, exactly one winner of a claim."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from sm_train.entrypoints.storage import parallel_read
from sm_train.entrypoints.storage.storage import LocalFolder, S3Prefix, open_storage, read_uri
from sm_train.entrypoints.storage.store import S3Access, open_store
from sm_train.entrypoints.storage.stream_upload import PART_BYTES, UPLOAD_PARTS, ShardSink

from tests.conftest import Aws
from tests.support.deadline import DEADLINE

MEGABYTE = 2**20


@pytest.fixture
def prefix(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> S3Prefix:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    aws.make_bucket("bucket")
    return S3Prefix("bucket", "set/", S3Access())


def before_request(operation: str, hook: Callable[[], None]) -> None:
    """Call ``hook`` ahead of every request of an S3 operation that the storage sends."""
    events: Any = open_store(S3Access())._client.meta.events
    events.register(f"before-call.s3.{operation}", lambda **_: hook())


def upload(prefix: S3Prefix, produce: Callable[[ShardSink], None]) -> None:
    with prefix.atomic_writer("a") as sink:
        produce(sink)


def unfinished_uploads(aws: Aws) -> list[str]:
    listing = aws.client("s3").list_multipart_uploads(Bucket="bucket")
    return [upload["Key"] for upload in listing.get("Uploads", [])]


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 8 * MEGABYTE, 8 * MEGABYTE + 1, 20 * MEGABYTE])
def test_read_returns_the_complete_object(aws: Aws, prefix: S3Prefix, size: int) -> None:
    content = os.urandom(size)
    aws.client("s3").put_object(Bucket="bucket", Key="set/a", Body=content)
    assert prefix.read("a") == content
    assert read_uri("s3://bucket/set/a", S3Access()) == content


def test_a_small_object_is_one_request(aws: Aws, prefix: S3Prefix) -> None:
    """A data set has millions of images: a HEAD for each would double the requests."""
    aws.client("s3").put_object(Bucket="bucket", Key="set/a", Body=b"image")
    aws.requests.clear()
    assert prefix.read("a") == b"image"
    to_the_bucket = [method for method, path, _ in aws.requests if path != "/"]  # not to STS
    assert to_the_bucket == ["GET"]


def test_large_objects_are_downloaded_in_parallel(
    aws: Aws, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_read, "RANGE_BYTES", 10)
    content = bytes(range(40))
    aws.client("s3").put_object(Bucket="bucket", Key="set/a", Body=content)
    reads = iter(range(100))
    together = threading.Barrier(3)

    def wait_for_others() -> None:
        if next(reads) > 0:  # the first request learns the size
            together.wait(DEADLINE)

    before_request("GetObject", wait_for_others)
    assert prefix.read("a") == content


def test_a_download_never_mixes_two_versions(
    aws: Aws, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_read, "RANGE_BYTES", 10)
    s3 = aws.client("s3")
    s3.put_object(Bucket="bucket", Key="set/a", Body=b"0123456789abcdef")
    reads = iter(range(100))

    def replace_after_first_range() -> None:
        if next(reads) == 1:
            s3.put_object(Bucket="bucket", Key="set/a", Body=b"9876543210fedcba")

    before_request("GetObject", replace_after_first_range)
    with pytest.raises(OSError, match="did not match expected ETag"):
        prefix.read("a")


def test_read_errors_are_those_of_a_file_system(aws: Aws, prefix: S3Prefix) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such object: 's3://bucket/set/gone'"):
        prefix.read("gone")
    with pytest.raises(OSError, match=r"S3 answers NoSuchBucket: 's3://nowhere/a'"):
        read_uri("s3://nowhere/a", S3Access())


@pytest.mark.parametrize("size", [0, 5, PART_BYTES - 1, PART_BYTES, 40 * MEGABYTE])
def test_an_object_appears_when_it_is_complete(aws: Aws, prefix: S3Prefix, size: int) -> None:
    content = os.urandom(size)
    with prefix.atomic_writer("a") as sink:
        for first in range(0, size, 7 * MEGABYTE):
            sink.write(content[first : first + 7 * MEGABYTE])
            assert prefix.size("a") is None
    assert prefix.size("a") == size
    assert prefix.read("a") == content
    assert unfinished_uploads(aws) == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, MEGABYTE, 20 * MEGABYTE, 70 * MEGABYTE])
def test_a_producer_error_leaves_no_object_and_no_upload(
    aws: Aws, prefix: S3Prefix, size: int
) -> None:
    """At any moment: the end of the pipe must not complete a truncated object."""

    def fail(delay: float, sink: ShardSink) -> None:
        sink.write(os.urandom(size))
        time.sleep(delay)
        raise RuntimeError("producer")

    for delay in (0, 0.001, 0.05):
        with pytest.raises(RuntimeError, match="producer"):
            upload(prefix, partial(fail, delay))
    assert prefix.size("a") is None
    assert unfinished_uploads(aws) == []


def test_an_interrupt_leaves_no_object_and_no_upload(aws: Aws, prefix: S3Prefix) -> None:
    def interrupt(sink: ShardSink) -> None:
        sink.write(os.urandom(20 * MEGABYTE))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(prefix, interrupt)
    assert prefix.size("a") is None
    assert unfinished_uploads(aws) == []


@pytest.mark.parametrize("size", [5, 20 * MEGABYTE])
def test_a_missing_bucket_is_the_error_of_the_write(prefix: S3Prefix, size: int) -> None:
    nowhere = S3Prefix("nowhere", "", S3Access())
    with pytest.raises(ClientError, match="NoSuchBucket"):
        upload(nowhere, lambda sink: sink.write(bytes(size)))


def test_a_failed_upload_stops_its_producer(prefix: S3Prefix) -> None:
    """A shard is not packed to its end for an upload that failed at its first part."""
    nowhere = S3Prefix("nowhere", "", S3Access())
    deadline = time.monotonic() + DEADLINE

    def produce(sink: ShardSink) -> None:
        while time.monotonic() < deadline:
            sink.write(bytes(MEGABYTE))
            time.sleep(0.01)

    with pytest.raises(ClientError, match="NoSuchBucket"):
        upload(nowhere, produce)
    assert time.monotonic() < deadline


def test_a_failed_part_leaves_no_object_and_no_upload(aws: Aws, prefix: S3Prefix) -> None:
    class PartError(Exception):
        pass

    parts = iter(range(100))

    def fail_third_part() -> None:
        if next(parts) == 2:
            raise PartError

    before_request("UploadPart", fail_third_part)
    with pytest.raises(PartError):
        upload(prefix, lambda sink: sink.writelines([bytes(MEGABYTE)] * 100))
    assert prefix.size("a") is None
    assert unfinished_uploads(aws) == []


def test_a_full_pipe_does_not_block_the_producer_of_a_failed_upload(
    prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads the pipe any more: the blocked write ends with the upload's error."""
    from s3transfer.upload import UploadNonSeekableInputManager

    def fail(*_: object) -> bool:
        time.sleep(0.2)  # until the producer fills the pipe
        raise MemoryError("no room for a part")

    monkeypatch.setattr(UploadNonSeekableInputManager, "requires_multipart_upload", fail)
    with pytest.raises(MemoryError):
        upload(prefix, lambda sink: sink.write(bytes(3 * PART_BYTES)))


@pytest.mark.integration
def test_parts_are_sent_in_parallel_and_the_producer_waits_for_them(prefix: S3Prefix) -> None:
    """Memory is bounded by the parts in flight, however fast the producer is."""
    release = threading.Event()
    in_flight = threading.Semaphore(0)

    def hold_part() -> None:
        in_flight.release()
        assert release.wait(DEADLINE)

    before_request("UploadPart", hold_part)
    written = 0

    def produce() -> None:
        nonlocal written
        with prefix.atomic_writer("a") as sink:
            for _ in range(12 * PART_BYTES // MEGABYTE):
                sink.write(bytes(MEGABYTE))
                written += MEGABYTE

    with ThreadPoolExecutor(1) as pool:
        produced = pool.submit(produce)
        for _ in range(UPLOAD_PARTS):
            assert in_flight.acquire(timeout=DEADLINE)
        time.sleep(0.5)  # the producer gets as far as it can
        reached = written
        release.set()
        produced.result(60)
    assert reached <= (UPLOAD_PARTS + 2) * PART_BYTES
    assert prefix.size("a") == 12 * PART_BYTES


@pytest.mark.integration
def test_an_upload_stays_within_bounded_memory(aws: Aws, prefix: S3Prefix) -> None:
    """400 MB through a process that may allocate 350 MB."""
    program = (
        "import resource\n"
        "from sm_train.entrypoints.storage.store import S3Access, open_store\n"
        "from sm_train.entrypoints.storage.storage import S3Prefix\n"
        "open_store(S3Access())\n"
        "limit = 350 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "with S3Prefix('bucket', 'set/', S3Access()).atomic_writer('a') as sink:\n"
        "    for _ in range(400):\n"
        "        sink.write(bytes(2**20))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert prefix.size("a") == 400 * MEGABYTE


def test_a_claim_has_one_winner(prefix: S3Prefix) -> None:
    assert prefix.create_if_absent("a", b"first")
    assert not prefix.create_if_absent("a", b"second")
    assert prefix.read("a") == b"first"
    assert prefix.list_sizes("nothing") == {}
    start = threading.Barrier(8)

    def claim(number: int) -> bool:
        start.wait()
        return prefix.create_if_absent("b", str(number).encode())

    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(claim, range(8)))
    assert claims.count(True) == 1
    assert prefix.read("b") == str(claims.index(True)).encode()


def test_aborting_uploads_spares_other_names(aws: Aws, prefix: S3Prefix) -> None:
    for key in ("set/shards/mine.tar", "set/shards/other.tar", "other/shards/mine.tar"):
        aws.client("s3").create_multipart_upload(Bucket="bucket", Key=key)
    assert prefix.abort_uploads("shards", names={"mine.tar"}) == 1
    assert sorted(unfinished_uploads(aws)) == ["other/shards/mine.tar", "set/shards/other.tar"]


@pytest.fixture(params=["folder", "prefix"])
def any_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "folder":
        return LocalFolder(tmp_path / "set")
    return request.getfixturevalue("prefix")


def test_folders_and_prefixes_behave_alike(any_storage: Any) -> None:
    assert any_storage.size("a/b") is None
    with pytest.raises(FileNotFoundError):
        any_storage.read("a/b")
    assert not any_storage.has_files("a")
    with any_storage.atomic_writer("a/b") as sink:
        sink.write(b"one")
        sink.writelines([b"t", memoryview(b"wo")])
    assert (any_storage.read("a/b"), any_storage.size("a/b")) == (b"onetwo", 6)
    assert any_storage.has_files("a")
    assert any_storage.address("a/b").endswith("set/a/b")
    any_storage.remove("a/b")
    any_storage.remove("a/b")
    assert any_storage.size("a/b") is None


def test_an_address_selects_the_storage() -> None:
    assert open_storage("s3://b/p/q", S3Access()) == S3Prefix("b", "p/q/", S3Access())
    assert open_storage("s3://b", S3Access()) == S3Prefix("b", "", S3Access())
    assert open_storage("a/b", S3Access()) == LocalFolder(Path("a/b"))
