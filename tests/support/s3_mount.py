"""A bucket of moto's behind FUSE, as FastFile shows a channel, and what was asked of it."""

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

BUCKET = "data"
_PIECE = 2**16


@dataclass
class Get:
    """One read of an object: the first byte asked for, and how many were sent."""

    key: str
    start: int
    sent: int = 0


@dataclass
class Trouble:
    """``seconds`` before each answer, or until it is ``over``; ``cut`` ends the answer to a GET
    after so many bytes, or with None lets it be.
    """

    seconds: float = 0.0
    cut: Callable[[Get], int | None] = lambda get: None
    over: threading.Event = field(default_factory=threading.Event)


@dataclass
class Store:
    url: str = ""
    gets: list[Get] = field(default_factory=list)
    trouble: Trouble = field(default_factory=Trouble)

    def put(self, folder: Path) -> None:
        """Upload everything below ``folder`` under its path."""
        import boto3

        s3 = boto3.client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.url,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )
        s3.create_bucket(Bucket=BUCKET)
        for path in folder.rglob("*"):
            if path.is_file():
                s3.upload_file(str(path), BUCKET, path.relative_to(folder).as_posix())


@contextmanager
def store() -> Iterator[Store]:
    """A server of its own on loopback."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server
    from werkzeug.test import run_wsgi_app

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    inner = DomainDispatcherApplication(create_backend_app)
    seen = Store()

    def recording(environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"].removeprefix(f"/{BUCKET}").strip("/")
        if environ["REQUEST_METHOD"] != "GET" or not path:
            return inner(environ, start_response)
        asked = environ.get("HTTP_RANGE", "bytes=0-").removeprefix("bytes=").partition("-")
        get = Get(path, int(asked[0]))
        seen.gets.append(get)
        seen.trouble.over.wait(seen.trouble.seconds)
        pages, status, headers = run_wsgi_app(inner, environ)
        content = b"".join(pages)
        start_response(status, headers.to_wsgi_list())
        return _sent(get, content[: seen.trouble.cut(get)])

    server = make_server("127.0.0.1", 0, recording, threaded=True)
    seen.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        thread.join()


def _sent(get: Get, content: bytes) -> Iterator[bytes]:
    for place in range(0, len(content), _PIECE):
        piece = content[place : place + _PIECE]
        yield piece
        get.sent += len(piece)


@contextmanager
def mounted(url: str, place: Path) -> Iterator[Path]:
    """The bucket at ``place``, read-only and without a cache, as rclone mounts it."""
    place.mkdir()
    command = [
        "rclone",
        "mount",
        f":s3:{BUCKET}",
        str(place),
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
        # As much is asked for as is read: no buffer of rclone's own ahead of the reader, and
        # requests so short that little of the last one goes to waste.
        "--buffer-size",
        "0",
        "--vfs-read-chunk-size",
        "256k",
        "--vfs-read-chunk-size-limit",
        "256k",
        "--max-read-ahead",
        "128k",
        "--low-level-retries",
        "3",
        "--retries",
        "1",
    ]
    # Debian's rclone 1.60 fails on the machine's own bundle of certificates; here is no TLS.
    environment = {key: value for key, value in os.environ.items() if key != "AWS_CA_BUNDLE"}
    # What it says goes to a file: a pipe that nobody reads fills up, and rclone stands still.
    log = place.with_suffix(".log")
    with log.open("w") as said:
        mounting = subprocess.Popen(command, env=environment, stderr=said)
    try:
        deadline = time.monotonic() + 30
        while not place.is_mount():
            assert mounting.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "rclone mounts nothing"
            time.sleep(0.05)
        yield place
    finally:
        subprocess.run(["fusermount3", "-uz", place], check=False)
        mounting.terminate()
        mounting.wait(timeout=30)
