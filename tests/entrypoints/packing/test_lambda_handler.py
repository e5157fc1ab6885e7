"""The trickle: messages twice, out of order, at once and poisoned; each good image once."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import webdataset
from sm_train.entrypoints.data.shard_index import ShardIndex
from sm_train.entrypoints.data.shard_verification import verify_shard
from sm_train.entrypoints.packing import lambda_handler
from sm_train.entrypoints.packing.storage import S3Access, S3Prefix, s3_client
from sm_train.entrypoints.packing.streaming import STREAM_STATE, StreamingPacker

from tests.conftest import Aws, Cli
from tests.support.image_files import picture
from tests.support.restricted_imports import ONLY


class Context:
    """What Lambda says of the time that is left."""

    def __init__(self, seconds: float = 800.0) -> None:
        self._seconds = seconds

    def get_remaining_time_in_millis(self) -> int:
        return int(1000 * self._seconds)


class Bench:
    """A queue, a raw bucket and a destination on one moto server, and the function beside them."""

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
        """An image and its caption in the bucket, and S3's message of it in the queue."""
        if caption is not None:
            key = f"{name.rpartition('.')[0]}.txt"
            self.s3.put_object(Bucket="raw", Key=key, Body=caption.encode())
        answer = self.s3.put_object(Bucket="raw", Key=name, Body=content)
        self.tell(notification(name, answer["ETag"].strip('"'), len(content)))

    def tell(self, body: str) -> None:
        self.sqs.send_message(QueueUrl=self.queue, MessageBody=body)

    def messages(self, most: int = 10) -> list[dict[str, Any]]:
        """As Lambda's poller takes them: they stay in the queue until they are deleted."""
        got = self.sqs.receive_message(
            QueueUrl=self.queue, MaxNumberOfMessages=most, VisibilityTimeout=30
        ).get("Messages", [])
        return [
            {"messageId": one["MessageId"], "body": one["Body"], "handle": one["ReceiptHandle"]}
            for one in got
        ]

    def delete(self, messages: list[dict[str, Any]]) -> None:
        for one in messages:
            self.sqs.delete_message(QueueUrl=self.queue, ReceiptHandle=one["handle"])

    def drain(self) -> set[str]:
        """Let the function take everything; returns the bodies that are to come again."""
        again = set()
        while batch := self.messages():
            answer = lambda_handler.handler({"Records": batch}, Context())
            failed = {one["itemIdentifier"] for one in answer["batchItemFailures"]}
            again |= {one["body"] for one in batch if one["messageId"] in failed}
            self.delete(batch)
        return again

    def keys(self, below: str = "") -> list[str]:
        listed = self.s3.list_objects_v2(Bucket="packed", Prefix=f"set/{below}")
        return [one["Key"].removeprefix("set/") for one in listed.get("Contents", [])]

    def packed(self, folder: Path) -> tuple[ShardIndex, Counter[str]]:
        """The index, every shard held against it, and how often each image is in a shard."""
        folder.mkdir(parents=True, exist_ok=True)
        self.s3.download_file("packed", "set/index.parquet", str(folder / "index.parquet"))
        index = ShardIndex(folder / "index.parquet")
        assert {f"shards/{name}" for name in index.names} == set(self.keys("shards/"))
        seen: Counter[str] = Counter()
        for number, name in enumerate(index.names):
            self.s3.download_file("packed", f"set/shards/{name}", str(folder / name))
            verify_shard(folder / name, index.shard(number))
            read = webdataset.WebDataset(str(folder / name), shardshuffle=False)
            seen.update(json.loads(one["json"])["source"].removeprefix("s3://raw/") for one in read)
        return index, seen


def notification(key: str, etag: str, size: int) -> str:
    """S3's event message structure, version 2.1, as far as it is read."""
    from urllib.parse import quote_plus

    thing = {"key": quote_plus(key), "eTag": etag, "size": size, "sequencer": "0055AED6"}
    record = {
        "eventName": "ObjectCreated:Put",
        "eventSource": "aws:s3",
        "s3": {"bucket": {"name": "raw"}, "object": thing},
    }
    return json.dumps({"Records": [record]})


@pytest.fixture
def bench(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("SM_TRAIN_DESTINATION", "s3://packed/set")
    monkeypatch.setenv("SM_TRAIN_SHARD_BYTES", "20000")
    s3_client.cache_clear()
    return Bench(aws)


def flush() -> None:
    lambda_handler.handler({"flush": True}, Context())


def test_messages_twice_and_out_of_order_pack_each_image_once(bench: Bench, tmp_path: Path) -> None:
    names = [f"photos of {day}/{number:02}.jpg" for day in "ab" for number in range(12)]
    bodies = []
    for number, name in enumerate(names):
        bench.arrive(name, picture(number))
    while batch := bench.messages():
        bodies += [one["body"] for one in batch]
        bench.delete(batch)
    twice = bodies * 2
    random.Random(1).shuffle(twice)
    for body in twice[:30]:
        bench.tell(body)
    assert bench.drain() == set()
    for body in [*twice[30:], *bodies]:  # some long after their images are in a shard
        bench.tell(body)
    assert bench.drain() == set()
    flush()
    index, seen = bench.packed(tmp_path)
    assert seen == Counter(names)
    assert len(index) > 2
    assert all(index.image_sizes(number) is not None for number in range(len(index)))
    assert bench.keys(f"{STREAM_STATE}/staged/") == []
    flush()
    assert bench.packed(tmp_path / "again")[1] == Counter(names)


def test_bad_messages_are_rejected_and_incomplete_ones_retried(
    bench: Bench, tmp_path: Path
) -> None:
    bench.arrive("good.jpg", picture(1))
    bench.arrive("cut.jpg", picture(2)[:300])
    bench.arrive("silent.jpg", picture(3), caption=None)
    bench.arrive("notes.pdf", b"%PDF")
    bench.tell("no JSON at all")
    bench.tell('{"Records": [{"eventName": "ObjectCreated:Put"}]}')
    bench.tell(json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent"}))
    bench.tell(notification("gone.jpg", "0" * 32, 10))
    again = bench.drain()
    assert [json.loads(body)["Records"][0]["s3"]["object"]["key"] for body in again] == [
        "silent.jpg"
    ]
    bench.s3.put_object(Bucket="raw", Key="silent.txt", Body=b"the caption, at last")
    for body in again:
        bench.tell(body)
    assert bench.drain() == set()
    flush()
    index, seen = bench.packed(tmp_path)
    assert seen == Counter(["good.jpg", "silent.jpg"])
    assert Counter(one.reason for one in index.rejected()) == {
        "image-corrupt": 1,
        "image-missing": 1,
        "message-unreadable": 2,
    }


def test_one_bad_record_of_a_message_costs_that_record(bench: Bench, tmp_path: Path) -> None:
    bench.arrive("a.jpg", picture(1))
    bench.arrive("b.jpg", picture(2))
    batch = bench.messages()
    records = [json.loads(one["body"])["Records"][0] for one in batch]
    bench.delete(batch)
    bench.tell(json.dumps({"Records": [records[0], {"s3": 1}, "none", records[1]]}))
    assert bench.drain() == set()
    flush()
    index, seen = bench.packed(tmp_path)
    assert seen == Counter(["a.jpg", "b.jpg"])
    assert [one.reason for one in index.rejected()] == ["message-unreadable"] * 2


def test_an_unwritable_destination_fails_only_the_messages_that_need_it(
    bench: Bench, tmp_path: Path
) -> None:
    bench.s3.delete_bucket(Bucket="packed")
    bench.arrive("a.jpg", picture(1))
    bench.tell(json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent"}))
    [again] = bench.drain()
    assert json.loads(again)["Records"][0]["s3"]["object"]["key"] == "a.jpg"
    bench.aws.make_bucket("packed")
    bench.tell(again)
    assert bench.drain() == set()
    flush()
    assert bench.packed(tmp_path)[1] == Counter(["a.jpg"])


def test_uploads_that_were_broken_off_are_given_up_after_a_day(bench: Bench) -> None:
    def begin(key: str) -> None:
        bench.s3.create_multipart_upload(Bucket="packed", Key=key)

    def left() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = bench.s3.list_multipart_uploads(Bucket="packed")["Uploads"]
        return found

    begin("set/shards/streamed-000000.tar")
    begin("other/shards/streamed-000000.tar")
    trickle = StreamingPacker(S3Prefix("packed", "set/", S3Access(None, "us-east-1")), 1000)
    begun = left()[0]["Initiated"]
    assert trickle.abort_abandoned_uploads(begun + timedelta(hours=23)) == 0
    assert trickle.abort_abandoned_uploads(begun + timedelta(hours=25)) == 1
    assert [one["Key"] for one in left()] == ["other/shards/streamed-000000.tar"]


@pytest.mark.slow
def test_many_at_once_pack_each_image_once(bench: Bench, tmp_path: Path) -> None:
    """Six invocations with overlapping batches, all of which want to make shards."""
    names = [f"{number:02}.jpg" for number in range(24)]
    for number, name in enumerate(names):
        bench.arrive(name, picture(number))
    messages = []
    while batch := bench.messages():
        messages += batch
        bench.delete(batch)
    start = threading.Barrier(6)

    def invoke(number: int) -> Any:
        start.wait()
        mine = messages[number * 4 : number * 4 + 8]
        answer = lambda_handler.handler({"Records": mine}, Context())
        flush()
        return answer["batchItemFailures"]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(invoke, range(6))) == [[]] * 6
    flush()
    index, seen = bench.packed(tmp_path)
    assert seen == Counter(names)
    assert len(bench.keys(f"{STREAM_STATE}/done/")) == len(index)


class KilledError(BaseException):
    """The end of a function that ran out of time: nothing after it happens."""


@pytest.mark.parametrize("effects", [*range(1, 36, 3), 29, 30])
def test_killed_between_any_two_effects_nothing_is_lost_or_doubled(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effects: int
) -> None:
    """The function dies before its n-th change in S3; its messages come again."""
    names = [f"{number}.jpg" for number in range(6)]
    for number, name in enumerate(names):
        bench.arrive(name, picture(number))
    batch = bench.messages()
    left = [effects]

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KilledError
            return method(*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in ("create_if_absent", "atomic_writer", "remove"):
            patch.setattr(S3Prefix, name, counted(getattr(S3Prefix, name)))
        try:
            lambda_handler.handler({"Records": batch}, Context())
            flush()
        except KilledError:
            pass
    assert lambda_handler.handler({"Records": batch}, Context()) == {"batchItemFailures": []}
    flush()
    assert bench.packed(tmp_path)[1] == Counter(names)
    assert bench.keys(f"{STREAM_STATE}/staged/") == []


def test_an_image_that_is_overwritten_is_packed_once(bench: Bench, tmp_path: Path) -> None:
    """Two messages, one object: the first is of a version that is gone."""
    bench.arrive("a.jpg", picture(1))
    bench.arrive("a.jpg", picture(2))
    assert bench.drain() == set()
    flush()
    assert bench.packed(tmp_path)[1] == Counter(["a.jpg"])


def test_without_time_no_shard_is_begun(bench: Bench) -> None:
    for number in range(8):
        bench.arrive(f"{number}.jpg", picture(number))
    batch = bench.messages()
    lambda_handler.handler({"Records": batch}, Context(seconds=10))
    assert bench.keys("shards/") == []
    assert len(bench.keys(f"{STREAM_STATE}/staged/")) == 8


def test_it_adds_to_what_was_packed_in_bulk(bench: Bench, aws: Aws, tmp_path: Path) -> None:
    """The index goes on listing the shards that were there."""
    from sm_train.entrypoints.packing.storage import S3Access
    from sm_train.toolkit.packing.pack import PackJob, pack

    from tests.support.image_files import album

    album(tmp_path / "in", 5)
    job = PackJob(str(tmp_path / "in"), "s3://packed/set", None, 10**6, "image", "caption", 1)
    pack(job, lambda _: None)
    bench.arrive("new.jpg", picture(9))
    assert bench.drain() == set()
    flush()
    bench.s3.download_file("packed", "set/index.parquet", str(tmp_path / "index.parquet"))
    index = ShardIndex(tmp_path / "index.parquet")
    assert index.names == ["shard-000000.tar", "streamed-000000.tar"]
    assert index.header.samples == 6
    assert StreamingPacker(S3Prefix("packed", "set/", S3Access()), 1).seal() == 0


class _Runtime(BaseHTTPRequestHandler):
    """The API by which a function's process asks for its next event and gives its answer."""

    server: RuntimeServer

    def do_GET(self) -> None:
        if not self.server.events:
            self.server.idle.set()
            self.server.over.wait()
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
        self.server.answers.append((self.path.rpartition("/")[2], json.loads(content)))
        self.send_response(202)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


class RuntimeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, events: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Runtime)
        self.events, self.answers = events[::-1], list[tuple[str, Any]]()
        self.idle, self.over = threading.Event(), threading.Event()


def test_lambdas_own_runtime_runs_it(bench: Bench, tmp_path: Path) -> None:
    """AWS's runtime interface client, as in the function's container."""
    for number in range(3):
        bench.arrive(f"{number}.jpg", picture(number))
    server = RuntimeServer([{"Records": bench.messages()}, {"flush": True}])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "awslambdaric",
            HANDLER,
        ],
        env=os.environ | {"AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{server.server_port}"},
    )
    try:
        assert server.idle.wait(60)
    finally:
        process.kill()
        process.wait()
        server.over.set()
        server.shutdown()
    assert server.answers == [
        ("response", {"batchItemFailures": []}),
        ("response", {"sealed": 1, "uploads_aborted": 0}),
    ]
    assert bench.packed(tmp_path)[1] == Counter(["0.jpg", "1.jpg", "2.jpg"])


HANDLER = "sm_train.entrypoints.packing.lambda_handler.handler"

FUNCTION = """
from sm_train.entrypoints.packing.lambda_handler import handler
import json
class Context:
    def get_remaining_time_in_millis(self): return 800_000
print(handler(json.loads(sys.argv[2]), Context()))
print(handler({"flush": True}, Context()))
"""


def test_the_functions_image_holds_all_that_it_needs(
    bench: Bench, cli: Cli, tmp_path: Path
) -> None:
    recipe = cli("template", "pack-lambda-image").stdout
    [line] = re.findall(r"pip install[^\n]*\\\n(.*?)\n[A-Z]", recipe, re.DOTALL)
    packages = re.findall(r'"([a-z0-9]+)>=', line)
    bench.arrive("a.jpg", picture(1))
    event = json.dumps({"Records": bench.messages()})
    run = subprocess.run(
        [sys.executable, "-c", ONLY + FUNCTION, " ".join(packages), event],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert bench.packed(tmp_path)[1] == Counter(["a.jpg"])


def test_the_template_passes_cfn_lint(cli: Cli, tmp_path: Path) -> None:
    printed = cli("template", "pack-lambda")
    assert printed.returncode == 0
    (tmp_path / "template.yaml").write_text(printed.stdout)
    command = [Path(sys.executable).parent / "cfn-lint", "template.yaml"]
    linted = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout
