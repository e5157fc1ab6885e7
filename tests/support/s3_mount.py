"""Mounts a moto bucket through FUSE, as FastFile mounts a channel, and records its requests.

The mount is read-only, and each read takes requests to S3 with a latency.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm_train.toolkit.submit.local.emulated_channels import channel_files, node_share

from tests.support.background_server import serve_in_background
from tests.support.deadline import DEADLINE
from tests.support.moto_server import moto_application

BUCKET = "data"
LATENCY_SECONDS = 0.02
"""Time to the first byte of each response. S3's own is 0.1 to 0.2 s for small objects (AWS, "Best
practices design patterns: optimizing Amazon S3 performance", read 2026-11)."""

CHUNK_BYTES = 2**18
"""Bytes that the mount requests at a time."""

_BLOCK_BYTES = 2**16


@dataclass
class Get:
    """A GET request of an object: the first byte requested and the number of bytes sent."""

    key: str
    start: int
    sent: int = 0


@dataclass
class Fault:
    """How the server responds: after ``seconds``, or when ``released`` is set.

    ``truncate_to`` returns the number of bytes after which the response to a GET ends, or None for
    the complete response.
    """

    seconds: float = LATENCY_SECONDS
    truncate_to: Callable[[Get], int | None] = lambda get: None
    released: threading.Event = field(default_factory=threading.Event)


@dataclass
class Bucket:
    """The bucket :data:`BUCKET` of a server at ``url``, and the GET requests it received.

    Requests to the channels of :meth:`create_channel` are included.
    """

    url: str = ""
    gets: list[Get] = field(default_factory=list)
    fault: Fault = field(default_factory=Fault)
    files: dict[str, Path] = field(default_factory=dict)
    """``BUCKET/KEY`` → the file from which the object is served: moto copies whole objects."""

    def upload(self, folder: Path) -> None:
        """Create the bucket and upload all files in ``folder``; a key is the relative path."""
        s3 = self._client()
        s3.create_bucket(Bucket=BUCKET)
        for path in folder.rglob("*"):
            if path.is_file():
                key = path.relative_to(folder).as_posix()
                s3.upload_file(str(path), BUCKET, key)
                self.files[f"{BUCKET}/{key}"] = path

    def create_channel(self, name: str, prefix: str, node_rank: int = 0, nodes: int = 1) -> str:
        """Create a bucket with what a node sees of a channel of this prefix; return its name."""
        s3 = self._client()
        s3.create_bucket(Bucket=name)
        keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET)["Contents"]]
        for path, key in node_share(channel_files(keys, prefix), node_rank, nodes).items():
            s3.copy_object(Bucket=name, Key=path, CopySource=f"{BUCKET}/{key}")
            self.files[f"{name}/{path}"] = self.files[f"{BUCKET}/{key}"]
        return name

    def _client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.url,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )


@contextmanager
def serve_bucket() -> Iterator[Bucket]:
    """Serve a bucket on loopback until the context ends."""
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = moto_application()
    bucket = Bucket()

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"].strip("/")
        if environ["REQUEST_METHOD"] != "GET" or path not in bucket.files:
            return moto(environ, start_response)
        first, _, last = environ.get("HTTP_RANGE", "bytes=0-").removeprefix("bytes=").partition("-")
        get = Get(path.partition("/")[2], int(first))
        bucket.gets.append(get)
        bucket.fault.released.wait(bucket.fault.seconds)
        with bucket.files[path].open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            stop = min(int(last) + 1, size) if last else size
            content = os.pread(file.fileno(), stop - get.start, get.start)
        headers = [
            ("Content-Length", str(len(content))),
            ("Content-Range", f"bytes {get.start}-{stop - 1}/{size}"),
        ]
        start_response("206 Partial Content" if "HTTP_RANGE" in environ else "200 OK", headers)
        return _send(get, content[: bucket.fault.truncate_to(get)])

    server = make_server("127.0.0.1", 0, application, threaded=True)
    bucket.url = f"http://127.0.0.1:{server.server_port}"
    with serve_in_background(server):
        yield bucket


def _send(get: Get, content: bytes) -> Iterator[bytes]:
    """Yield ``content`` in blocks; count in ``get`` those that the client took."""
    for start in range(0, len(content), _BLOCK_BYTES):
        block = content[start : start + _BLOCK_BYTES]
        yield block
        get.sent += len(block)


@contextmanager
def mount_bucket(url: str, folder: Path, name: str = BUCKET) -> Iterator[Path]:
    """Mount a bucket at ``folder`` with rclone, read-only and without a cache."""
    folder.mkdir()
    command = [
        "rclone",
        "mount",
        f":s3:{name}",
        str(folder),
        "--config",
        "/dev/null",
        "--s3-provider",
        "Other",
        "--s3-endpoint",
        url,
        "--s3-region",
        "us-east-1",
        "--s3-access-key-id",
        "testing",
        "--s3-secret-access-key",
        "testing",
        "--read-only",
        "--vfs-cache-mode",
        "off",
        "--no-modtime",
        "--no-checksum",
        # Request only what is read: no read-ahead buffer in rclone, and requests short enough
        # that little of the last one is wasted.
        "--buffer-size",
        "0",
        "--vfs-read-chunk-size",
        f"{CHUNK_BYTES}b",
        "--vfs-read-chunk-size-limit",
        f"{CHUNK_BYTES}b",
        "--max-read-ahead",
        "128k",
        "--low-level-retries",
        "3",
        "--retries",
        "1",
    ]
    # Debian's rclone 1.60 fails on some certificate bundles, and the loopback server has no TLS.
    environment = {key: value for key, value in os.environ.items() if key != "AWS_CA_BUNDLE"}
    # Log to a file: a pipe that nobody reads fills up and blocks rclone.
    log = folder.with_suffix(".log")
    with log.open("w") as stderr:
        rclone = subprocess.Popen(command, env=environment, stderr=stderr)
    try:
        deadline = time.monotonic() + DEADLINE
        while not folder.is_mount():
            assert rclone.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "rclone did not mount the bucket"
            time.sleep(0.05)
        yield folder
    finally:
        subprocess.run(["fusermount3", "-uz", folder], check=False)
        rclone.terminate()
        rclone.wait(timeout=DEADLINE)
