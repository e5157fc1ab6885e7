"""Streaming packing: messages repeated, reordered, concurrent and invalid; each image once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import webdataset
from sm_train.entrypoints.data.shard_index import ShardIndex
from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.packing import lambda_handler
from sm_train.entrypoints.packing.shard_verification import verify_shard
from sm_train.entrypoints.packing.streaming import STREAM_STATE, StreamingPacker
from sm_train.entrypoints.shared_work.storage import S3Prefix

from tests.conftest import Aws, Cli
from tests.support.background_server import serve_in_background
from tests.support.deadline import DEADLINE
from tests.support.image_files import image_bytes
from tests.support.restricted_imports import RESTRICT_IMPORTS, lambda_packages

pytestmark = pytest.mark.integration


class FakeContext:
    """Lambda's context object, with a fixed remaining time."""

    def __init__(self, seconds: float = 800.0) -> None:
        self._seconds = seconds

    def get_remaining_time_in_millis(self) -> int:
        return int(1000 * self._seconds)


class Deployment:
    """A queue, a raw bucket and a destination on one moto server, for the handler under test."""

    def __init__(self, aws: Aws) -> None:
        self.aws = aws
        aws.make_bucket("raw")
        aws.make_bucket("packed")
        self.sqs = aws.client("sqs")
        self.s3 = aws.client("s3")
        self.queue = self.sqs.create_queue(
            QueueName="arrivals", Attributes={"VisibilityTimeout": "0"}
        )["QueueUrl"]

    def arrive(self, name: str, content: bytes, caption: str | None = "a caption") -> None:
        """Put an image and its caption in the bucket, and S3's notification in the queue."""
        if caption is not None:
            key = f"{name.rpartition('.')[0]}.txt"
            self.s3.put_object(Bucket="raw", Key=key, Body=caption.encode())
        response = self.s3.put_object(Bucket="raw", Key=name, Body=content)
        self.send(notification(name, response["ETag"].strip('"'), len(content)))

    def send(self, body: str) -> None:
        self.sqs.send_message(QueueUrl=self.queue, MessageBody=body)

    def receive(self, limit: int = 10) -> list[dict[str, Any]]:
        """Receive messages as Lambda's poller does: they stay in the queue until deleted."""
        received = self.sqs.receive_message(
            QueueUrl=self.queue, MaxNumberOfMessages=limit, VisibilityTimeout=30
        ).get("Messages", [])
        return [
            {
                "messageId": message["MessageId"],
                "body": message["Body"],
                "handle": message["ReceiptHandle"],
            }
            for message in received
        ]

    def delete(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            self.sqs.delete_message(QueueUrl=self.queue, ReceiptHandle=message["handle"])

    def drain(self) -> set[str]:
        """Handle all messages; return the bodies of those to deliver again."""
        failed_bodies = set()
        while batch := self.receive():
            response = lambda_handler.handler({"Records": batch}, FakeContext())
            failed = {item["itemIdentifier"] for item in response["batchItemFailures"]}
            failed_bodies |= {
                message["body"] for message in batch if message["messageId"] in failed
            }
            self.delete(batch)
        return failed_bodies

    def keys(self, prefix: str = "") -> list[str]:
        listing = self.s3.list_objects_v2(Bucket="packed", Prefix=f"set/{prefix}")
        return [entry["Key"].removeprefix("set/") for entry in listing.get("Contents", [])]

    def packed(self, folder: Path) -> tuple[ShardIndex, Counter[str]]:
        """Verify every shard; return the index and the number of occurrences of each image."""
        folder.mkdir(parents=True, exist_ok=True)
        self.s3.download_file("packed", "set/index.parquet", str(folder / "index.parquet"))
        index = ShardIndex(folder / "index.parquet")
        assert {f"shards/{name}" for name in index.names} == set(self.keys("shards/"))
        seen: Counter[str] = Counter()
        for number, name in enumerate(index.names):
            self.s3.download_file("packed", f"set/shards/{name}", str(folder / name))
            verify_shard(folder / name, index.shard(number))
            samples = webdataset.WebDataset(str(folder / name), shardshuffle=False)
            seen.update(
                json.loads(sample["json"])["source"].removeprefix("s3://raw/") for sample in samples
            )
        return index, seen


def notification(key: str, etag: str, size: int) -> str:
    """Return S3's event message, version 2.1, with the fields that the handler reads."""
    from urllib.parse import quote_plus

    s3_object = {"key": quote_plus(key), "eTag": etag, "size": size, "sequencer": "0055AED6"}
    record = {
        "eventName": "ObjectCreated:Put",
        "eventSource": "aws:s3",
        "s3": {"bucket": {"name": "raw"}, "object": s3_object},
    }
    return json.dumps({"Records": [record]})


@pytest.fixture
def deployment(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("SM_TRAIN_DESTINATION", "s3://packed/set")
    monkeypatch.setenv("SM_TRAIN_SHARD_BYTES", "20000")
    # Every object names the key that the bucket's policy demands.
    monkeypatch.setenv("SM_TRAIN_BUCKET_KMS_KEYS", "packed=alias/packed")
    aws.required_keys["packed"] = "alias/packed"
    return Deployment(aws)


def flush() -> None:
    lambda_handler.handler({"flush": True}, FakeContext())


def test_overlapping_invocations_build_a_shard_once(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM_TRAIN_SHARD_BYTES", str(10**9))
    names = [f"{number:02}.jpg" for number in range(12)]
    for number, name in enumerate(names):
        deployment.arrive(name, image_bytes(number))
    packer = StreamingPacker(S3Prefix("packed", "set/", S3Access(None, "us-east-1")), 10**9)
    assert deployment.drain() == set()
    barrier, sealed = threading.Barrier(8, timeout=DEADLINE), list[int]()

    def invoke() -> None:
        barrier.wait()
        sealed.append(packer.seal(flush=True))

    invocations = [threading.Thread(target=invoke) for _ in range(8)]
    for invocation in invocations:
        invocation.start()
    for invocation in invocations:
        invocation.join()
    assert sum(sealed) == 1
    puts = [path for method, path, _ in deployment.aws.requests if method in ("PUT", "POST")]
    assert puts.count("/packed/set/shards/streamed-000000.tar") == 1
    assert deployment.packed(tmp_path)[1] == Counter(names)
    assert deployment.keys(f"{STREAM_STATE}/leases/") == []


def test_repeated_and_reordered_messages_pack_each_image_once(
    deployment: Deployment, tmp_path: Path
) -> None:
    names = [f"photos of {day}/{number:02}.jpg" for day in "ab" for number in range(12)]
    bodies = []
    for number, name in enumerate(names):
        deployment.arrive(name, image_bytes(number))
    while batch := deployment.receive():
        bodies += [message["body"] for message in batch]
        deployment.delete(batch)
    repeated = bodies * 2
    random.Random(1).shuffle(repeated)
    for body in repeated[:30]:
        deployment.send(body)
    assert deployment.drain() == set()
    for body in [*repeated[30:], *bodies]:  # some long after their images were packed
        deployment.send(body)
    assert deployment.drain() == set()
    flush()
    index, seen = deployment.packed(tmp_path)
    assert seen == Counter(names)
    assert len(index) > 2
    assert all(index.image_sizes(number) is not None for number in range(len(index)))
    assert deployment.keys(f"{STREAM_STATE}/staged/") == []
    flush()
    assert deployment.packed(tmp_path / "again")[1] == Counter(names)


def test_bad_messages_are_rejected_and_incomplete_ones_retried(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.arrive("good.jpg", image_bytes(1))
    deployment.arrive("cut.jpg", image_bytes(2)[:300])
    deployment.arrive("uncaptioned.jpg", image_bytes(3), caption=None)
    deployment.arrive("notes.pdf", b"%PDF")
    deployment.send("not JSON")
    deployment.send('{"Records": [{"eventName": "ObjectCreated:Put"}]}')
    deployment.send(json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent"}))
    deployment.send(notification("gone.jpg", "0" * 32, 10))
    failed = deployment.drain()
    assert [json.loads(body)["Records"][0]["s3"]["object"]["key"] for body in failed] == [
        "uncaptioned.jpg"
    ]
    deployment.s3.put_object(Bucket="raw", Key="uncaptioned.txt", Body=b"a late caption")
    for body in failed:
        deployment.send(body)
    assert deployment.drain() == set()
    flush()
    index, seen = deployment.packed(tmp_path)
    assert seen == Counter(["good.jpg", "uncaptioned.jpg"])
    assert Counter(item.reason for item in index.rejected()) == {
        "image-corrupt": 1,
        "image-missing": 1,
        "message-unreadable": 2,
    }


def test_an_invalid_record_does_not_affect_other_records(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.arrive("a.jpg", image_bytes(1))
    deployment.arrive("b.jpg", image_bytes(2))
    batch = deployment.receive()
    records = [json.loads(message["body"])["Records"][0] for message in batch]
    deployment.delete(batch)
    deployment.send(json.dumps({"Records": [records[0], {"s3": 1}, "none", records[1]]}))
    assert deployment.drain() == set()
    flush()
    index, seen = deployment.packed(tmp_path)
    assert seen == Counter(["a.jpg", "b.jpg"])
    assert [item.reason for item in index.rejected()] == ["message-unreadable"] * 2


def test_an_unwritable_destination_fails_only_the_messages_that_need_it(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.s3.delete_bucket(Bucket="packed")
    deployment.arrive("a.jpg", image_bytes(1))
    deployment.send(json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent"}))
    [failed] = deployment.drain()
    assert json.loads(failed)["Records"][0]["s3"]["object"]["key"] == "a.jpg"
    deployment.aws.make_bucket("packed")
    deployment.send(failed)
    assert deployment.drain() == set()
    flush()
    assert deployment.packed(tmp_path)[1] == Counter(["a.jpg"])


def test_abandoned_uploads_are_aborted_after_a_day(deployment: Deployment) -> None:
    def unfinished_uploads() -> list[dict[str, Any]]:
        listing = deployment.s3.list_multipart_uploads(Bucket="packed")
        uploads: list[dict[str, Any]] = listing["Uploads"]
        return uploads

    for key in ("set/shards/streamed-000000.tar", "other/shards/streamed-000000.tar"):
        deployment.s3.create_multipart_upload(Bucket="packed", Key=key)
    packer = StreamingPacker(S3Prefix("packed", "set/", S3Access(None, "us-east-1")), 1000)
    started = unfinished_uploads()[0]["Initiated"]
    assert packer.abort_abandoned_uploads(started + timedelta(hours=23)) == 0
    assert packer.abort_abandoned_uploads(started + timedelta(hours=25)) == 1
    remaining = [upload["Key"] for upload in unfinished_uploads()]
    assert remaining == ["other/shards/streamed-000000.tar"]


@pytest.mark.slow
def test_concurrent_invocations_pack_each_image_once(
    deployment: Deployment, tmp_path: Path
) -> None:
    """Six invocations with overlapping batches all try to build shards."""
    names = [f"{number:02}.jpg" for number in range(24)]
    for number, name in enumerate(names):
        deployment.arrive(name, image_bytes(number))
    messages = []
    while batch := deployment.receive():
        messages += batch
        deployment.delete(batch)
    start = threading.Barrier(6)

    def invoke(number: int) -> Any:
        start.wait()
        batch = messages[number * 4 : number * 4 + 8]
        response = lambda_handler.handler({"Records": batch}, FakeContext())
        flush()
        return response["batchItemFailures"]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(invoke, range(6))) == [[]] * 6
    flush()
    index, seen = deployment.packed(tmp_path)
    assert seen == Counter(names)
    assert len(deployment.keys(f"{STREAM_STATE}/done/")) == len(index)


class KilledError(BaseException):
    """Simulates the death of a function that ran out of time: nothing runs after it."""


@pytest.mark.parametrize("num_writes", [*range(1, 36, 3), 29, 30])
def test_a_kill_between_any_two_writes_loses_and_repeats_nothing(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    """The function dies before its n-th write to S3; its messages are delivered again."""
    names = [f"{number}.jpg" for number in range(6)]
    for number, name in enumerate(names):
        deployment.arrive(name, image_bytes(number))
    batch = deployment.receive()
    remaining = [num_writes]

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            remaining[0] -= 1
            if remaining[0] < 0:
                raise KilledError
            return method(*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in ("create_if_absent", "atomic_writer", "remove"):
            patch.setattr(S3Prefix, name, counted(getattr(S3Prefix, name)))
        try:
            lambda_handler.handler({"Records": batch}, FakeContext())
            flush()
        except KilledError:
            pass
    assert lambda_handler.handler({"Records": batch}, FakeContext()) == {"batchItemFailures": []}
    flush()
    assert deployment.packed(tmp_path)[1] == Counter(names)
    assert deployment.keys(f"{STREAM_STATE}/staged/") == []


def test_an_overwritten_image_is_packed_once(deployment: Deployment, tmp_path: Path) -> None:
    """Two messages about one object; the first names a version that no longer exists."""
    deployment.arrive("a.jpg", image_bytes(1))
    deployment.arrive("a.jpg", image_bytes(2))
    assert deployment.drain() == set()
    flush()
    assert deployment.packed(tmp_path)[1] == Counter(["a.jpg"])


def test_no_shard_is_started_without_enough_time(deployment: Deployment) -> None:
    for number in range(8):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    batch = deployment.receive()
    lambda_handler.handler({"Records": batch}, FakeContext(seconds=10))
    assert deployment.keys("shards/") == []
    assert len(deployment.keys(f"{STREAM_STATE}/staged/")) == 8


def test_streaming_adds_to_a_pack(deployment: Deployment, aws: Aws, tmp_path: Path) -> None:
    """The index keeps the shards of the pack, its columns and what it was packed with."""
    from sm_train.entrypoints.object_store.store import S3Access
    from sm_train.toolkit.packing.pack import PackJob, pack
    from sm_train.toolkit.packing.tables import TableOptions

    from tests.support.image_files import write_album

    write_album(tmp_path / "in", 5)
    table = TableOptions(index_columns=("source",))
    job = PackJob(str(tmp_path / "in"), "s3://packed/set", None, 10**6, 1, table)
    before = pack(job, lambda _: None).index
    deployment.arrive("new.jpg", image_bytes(9))
    assert deployment.drain() == set()
    flush()
    deployment.s3.download_file("packed", "set/index.parquet", str(tmp_path / "index.parquet"))
    index = ShardIndex(tmp_path / "index.parquet")
    assert index.names == ["shard-000000.tar", "streamed-000000.tar"]
    assert index.header.samples == 6
    assert index.header.columns == {"source": "text"}
    assert index.header.inputs == before.header.inputs
    assert index.shard(0) == before.shard(0)
    assert index.shard(1).columns == {"source": (None,)}
    groups = index.samples_by_group(["source"])
    assert sum(len(group.columns) for group in groups) == 6
    added = pack(replace(job, append=True), lambda _: None)
    assert added.appended is not None
    assert (added.appended.samples, added.samples) == (0, 6)
    assert StreamingPacker(S3Prefix("packed", "set/", S3Access()), 1).seal() == 0


def test_a_removed_image_does_not_return_with_the_next_shard(
    deployment: Deployment, cli: Cli, tmp_path: Path
) -> None:
    """The index keeps the rewritten shard, and lists the old one never again."""
    for number in range(3):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    assert deployment.drain() == set()
    flush()
    index, seen = deployment.packed(tmp_path / "first")
    assert seen == Counter({"0.jpg": 1, "1.jpg": 1, "2.jpg": 1})
    key = index.keys(0)[0]
    options = ("--region", "us-east-1", "--bucket-kms-key", "packed=alias/packed")
    removed = cli(
        *(*options, "remove", "s3://packed/set", key, "--yes"),
        network="loopback",
        env=deployment.aws.environment,
    )
    assert removed.returncode == 0, removed.stderr
    deployment.arrive("new.jpg", image_bytes(9))
    assert deployment.drain() == set()
    flush()
    index, seen = deployment.packed(tmp_path / "second")
    assert index.names == ["streamed-000000-r1.tar", "streamed-000001.tar"]
    assert key not in {*index.keys(0), *index.keys(1)}
    assert (seen.total(), seen["new.jpg"]) == (3, 1)


class _Runtime(BaseHTTPRequestHandler):
    """Lambda's runtime API: it hands events to the function's process and receives responses."""

    server: RuntimeServer

    def do_GET(self) -> None:
        if not self.server.events:
            self.server.idle.set()
            self.server.stopped.wait()
            return
        content = json.dumps(self.server.events.pop()).encode()
        self.send_response(200)
        self.send_header("Lambda-Runtime-Aws-Request-Id", "8476a536-e9f4-11e8-9739-2dfe598c3fcd")
        self.send_header("Lambda-Runtime-Deadline-Ms", str(int((time.time() + 800) * 1000)))
        self.send_header("Lambda-Runtime-Invoked-Function-Arn", "arn:aws:lambda:::function:pack")
        self.send_header("Lambda-Runtime-Trace-Id", "Root=1-5bef4de7-ad49b0e87f6ef6c87fc2e700")
        self.send_header("Lambda-Runtime-Client-Context", "{}")
        self.send_header("Lambda-Runtime-Cognito-Identity", "{}")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.responses.append((self.path.rpartition("/")[2], json.loads(content)))
        self.send_response(202)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


class RuntimeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, events: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Runtime)
        self.events, self.responses = events[::-1], list[tuple[str, Any]]()
        self.idle, self.stopped = threading.Event(), threading.Event()


def test_the_handler_runs_in_the_lambda_runtime(deployment: Deployment, tmp_path: Path) -> None:
    """Uses AWS's runtime interface client, as the function's container does."""
    for number in range(3):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
    server = RuntimeServer([{"Records": deployment.receive()}, {"flush": True}])
    with serve_in_background(server):
        process = subprocess.Popen(
            [sys.executable, "-m", "awslambdaric", HANDLER],
            env=os.environ | {"AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{server.server_port}"},
        )
        try:
            assert server.idle.wait(DEADLINE)
        finally:
            process.kill()
            process.wait()
            server.stopped.set()
    assert server.responses == [
        ("response", {"batchItemFailures": []}),
        ("response", {"sealed": 1, "uploads_aborted": 0}),
    ]
    assert deployment.packed(tmp_path)[1] == Counter(["0.jpg", "1.jpg", "2.jpg"])


HANDLER = "sm_train.entrypoints.packing.lambda_handler.handler"

FUNCTION = """
from sm_train.entrypoints.packing.lambda_handler import handler
import json
class FakeContext:
    def get_remaining_time_in_millis(self): return 800_000
print(handler(json.loads(sys.argv[2]), FakeContext()))
print(handler({"flush": True}, FakeContext()))
"""


def test_the_container_image_has_all_required_packages(
    deployment: Deployment, cli: Cli, tmp_path: Path
) -> None:
    packages = lambda_packages(cli("template", "pack-lambda-image").stdout)
    deployment.arrive("a.jpg", image_bytes(1))
    event = json.dumps({"Records": deployment.receive()})
    run = subprocess.run(
        [sys.executable, "-c", RESTRICT_IMPORTS + FUNCTION, " ".join(packages), event],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert deployment.packed(tmp_path)[1] == Counter(["a.jpg"])


def test_the_template_passes_cfn_lint(cli: Cli, tmp_path: Path) -> None:
    printed = cli("template", "pack-lambda")
    assert printed.returncode == 0
    (tmp_path / "template.yaml").write_text(printed.stdout)
    command = [Path(sys.executable).parent / "cfn-lint", "template.yaml"]
    linted = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout
