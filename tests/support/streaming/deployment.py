"""A streaming pack on a moto server: its queues, its buckets and the runtime of its functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import webdataset
from sm_train.entrypoints.data_prep.streaming import lambda_handler
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.shards.shard_verification import verify_shard
from sm_train.entrypoints.storage.storage import S3Prefix
from sm_train.entrypoints.storage.store import S3Access

from tests.support.background_server import serve_in_background
from tests.support.deadline import DEADLINE
from tests.support.moto_server import ACCOUNT, Aws


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
        self.dead_letters = self.sqs.create_queue(QueueName="rejected")["QueueUrl"]
        redrive = {
            "deadLetterTargetArn": f"arn:aws:sqs:us-east-1:{ACCOUNT}:rejected",
            "maxReceiveCount": "3",
        }
        self.queue = self.sqs.create_queue(
            QueueName="arrivals",
            Attributes={"VisibilityTimeout": "0", "RedrivePolicy": json.dumps(redrive)},
        )["QueueUrl"]

    def arrive(
        self, name: str, content: bytes, caption: str | None = "a caption", tags: str = ""
    ) -> None:
        """Put an image and its caption in the bucket, and S3's notification in the queue."""
        if caption is not None:
            key = f"{name.rpartition('.')[0]}.txt"
            self.s3.put_object(Bucket="raw", Key=key, Body=caption.encode())
        self.s3.put_object(Bucket="raw", Key=name, Body=content, Tagging=tags)
        self.announce(name)

    def announce(self, name: str) -> None:
        """Send S3's notification of an object, of any kind."""
        head = self.s3.head_object(Bucket="raw", Key=name)
        self.send(notification(name, head["ETag"].strip('"'), head["ContentLength"]))

    def send(self, body: str) -> None:
        self.sqs.send_message(QueueUrl=self.queue, MessageBody=body)

    def receive(self, limit: int = 10, visible_after: int = 30) -> list[dict[str, Any]]:
        """Receive messages as Lambda's poller does: they stay in the queue until deleted.

        They can be received again after ``visible_after`` seconds.
        """
        received = self.sqs.receive_message(
            QueueUrl=self.queue, MaxNumberOfMessages=limit, VisibilityTimeout=visible_after
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
            response = lambda_handler.stage({"Records": batch}, FakeContext())
            failed = {item["itemIdentifier"] for item in response["batchItemFailures"]}
            failed_bodies |= {
                message["body"] for message in batch if message["messageId"] in failed
            }
            self.delete(batch)
        return failed_bodies

    def keys(self, prefix: str = "") -> list[str]:
        listing = self.s3.list_objects_v2(Bucket="packed", Prefix=f"set/{prefix}")
        return [entry["Key"].removeprefix("set/") for entry in listing.get("Contents", [])]

    def put(self, name: str, content: bytes) -> None:
        """Write an object of the pack, as another program would."""
        self.s3.put_object(Bucket="packed", Key=f"set/{name}", Body=content)

    @property
    def destination(self) -> S3Prefix:
        """The storage of the pack."""
        return S3Prefix("packed", "set/", S3Access(None, "us-east-1"))

    def flush(self) -> dict[str, Any]:
        """Seal all staged samples and write the index."""
        return lambda_handler.seal({"flush": True}, FakeContext())

    def packed(self, folder: Path) -> tuple[ShardIndex, Counter[str]]:
        """Verify every shard; return the index and the number of occurrences of each image."""
        index, documents = self._verified(folder)
        return index, Counter(
            document["source"].removeprefix("s3://raw/") for document in documents
        )

    def documents(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Return the JSON files of all samples by the addresses of their images."""
        return {document["source"]: document for document in self._verified(folder)[1]}

    def _verified(self, folder: Path) -> tuple[ShardIndex, list[dict[str, Any]]]:
        folder.mkdir(parents=True, exist_ok=True)
        self.s3.download_file("packed", "set/index.parquet", str(folder / "index.parquet"))
        index = ShardIndex(folder / "index.parquet")
        assert {f"shards/{name}" for name in index.names} == set(self.keys("shards/"))
        documents = []
        for number, name in enumerate(index.names):
            self.s3.download_file("packed", f"set/shards/{name}", str(folder / name))
            verify_shard(folder / name, index.shard(number))
            samples = webdataset.WebDataset(str(folder / name), shardshuffle=False)
            documents += [json.loads(sample["json"]) for sample in samples]
        return index, documents


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


def deploy(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """Return a deployment whose functions run in this process, with small shards."""
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("SM_TRAIN_DESTINATION", "s3://packed/set")
    monkeypatch.setenv("SM_TRAIN_SHARD_BYTES", "20000")
    # Every object names the key that the bucket's policy demands.
    monkeypatch.setenv("SM_TRAIN_BUCKET_KMS_KEYS", "packed=alias/packed")
    aws.required_keys["packed"] = "alias/packed"
    return Deployment(aws)


class _Runtime(BaseHTTPRequestHandler):
    """Lambda's runtime API and the poller of its queue, as one server.

    The function's process gets the messages that the poller received. Those that it does not report
    as failed are deleted. After a process died, none is.
    """

    server: RuntimeServer

    def do_GET(self) -> None:
        messages = self.server.deployment.receive(visible_after=0)
        if not messages:
            self.server.idle.set()
            self.server.stopped.wait()
            return
        self.server.messages = messages
        content = json.dumps({"Records": messages}).encode()
        deadline = int((time.time() + self.server.seconds) * 1000)
        self.send_response(200)
        self.send_header("Lambda-Runtime-Aws-Request-Id", "8476a536-e9f4-11e8-9739-2dfe598c3fcd")
        self.send_header("Lambda-Runtime-Deadline-Ms", str(deadline))
        self.send_header("Lambda-Runtime-Invoked-Function-Arn", "arn:aws:lambda:::function:pack")
        self.send_header("Lambda-Runtime-Trace-Id", "Root=1-5bef4de7-ad49b0e87f6ef6c87fc2e700")
        self.send_header("Lambda-Runtime-Client-Context", "{}")
        self.send_header("Lambda-Runtime-Cognito-Identity", "{}")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.responses.append((self.path.rpartition("/")[2], content))
        failed = {item["itemIdentifier"] for item in content.get("batchItemFailures", [])}
        handled = [item for item in self.server.messages if item["messageId"] not in failed]
        self.server.deployment.delete(handled)
        self.send_response(202)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


class RuntimeServer(ThreadingHTTPServer):
    """Serves the messages of a deployment to its function, which has ``seconds`` for each batch."""

    daemon_threads = True

    def __init__(self, deployment: Deployment, seconds: float) -> None:
        super().__init__(("127.0.0.1", 0), _Runtime)
        self.deployment, self.seconds = deployment, seconds
        self.messages: list[dict[str, Any]] = []
        self.responses: list[tuple[str, dict[str, Any]]] = []
        self.idle, self.stopped = threading.Event(), threading.Event()


@contextmanager
def lambda_runtime(
    deployment: Deployment, seconds: float = 800
) -> Iterator[tuple[RuntimeServer, subprocess.Popen[bytes]]]:
    """Run the function that stages images in AWS's runtime interface client, until the exit."""
    server = RuntimeServer(deployment, seconds)
    handler = "sm_train.entrypoints.data_prep.streaming.lambda_handler.stage"
    with serve_in_background(server):
        process = subprocess.Popen(
            [sys.executable, "-m", "awslambdaric", handler],
            env=os.environ | {"AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{server.server_port}"},
        )
        try:
            yield server, process
        finally:
            process.kill()
            process.wait()
            server.stopped.set()


def handle_all(deployment: Deployment, seconds: float = 800) -> list[tuple[str, dict[str, Any]]]:
    """Let the function handle messages until the queue has none; return its responses."""
    with lambda_runtime(deployment, seconds) as (server, _):
        assert server.idle.wait(DEADLINE)
        return server.responses
