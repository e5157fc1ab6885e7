"""Shared fixtures: the command line as a user runs it, and AWS's stand-in on loopback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support import cli_server

# How long an example takes says something of the machine's other work.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

Cli = Callable[..., subprocess.CompletedProcess[str]]
Mount = Callable[[str], Path]

# A forbidden use ends the process at once: an exception could be swallowed on its way.
_NO_NETWORK = """
import os, sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        os.write(2, f"touched the network: {event} {arguments[1:]}".encode())
        os._exit(97)
sys.addaudithook(refuse)
"""
_LOOPBACK_ONLY = """
import os, sys
def refuse(event, arguments):
    host = arguments[1][0] if event == "socket.connect" and isinstance(arguments[1], tuple) else ""
    if event == "socket.getaddrinfo":
        host = arguments[0]
    if host not in ("", "127.0.0.1", "localhost", "::1", None):
        os.write(2, f"left this machine: {event} {host}".encode())
        os._exit(97)
sys.addaudithook(refuse)
"""
_PRELUDES = {"none": _NO_NETWORK, "loopback": _LOOPBACK_ONLY}


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs ``sm-train`` in a process of its own, without credentials, home or configuration.

    ``network="none"`` makes any use of a socket fail, ``"loopback"`` any that leaves the machine.
    """

    def run(
        *arguments: str | Path,
        network: str = "none",
        env: dict[str, str] | None = None,
        cwd: Path = tmp_path,
        stdin: str | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        return cli_server.run(
            _PRELUDES[network],
            [str(one) for one in arguments],
            env=clean_environment(tmp_path) | (env or {}),
            cwd=cwd,
            stdin=stdin or "",
            timeout=timeout,
        )

    return run


def clean_environment(home: Path) -> dict[str, str]:
    """This process's environment without anything that AWS's libraries would read."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    return kept | {"HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true", "COLUMNS": "100"}


@dataclass
class Aws:
    """A moto server on loopback and everything that was sent to it."""

    url: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and query of every call of another protocol, which is S3's."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Operation → the error code that AWS would answer it with."""
    amendments: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = field(
        default_factory=dict
    )
    """Operation → what the real service adds to moto's answer; None where the answer is lost."""
    answers: dict[str, Callable[[dict[str, Any]], tuple[int, dict[str, Any]] | None]] = field(
        default_factory=dict
    )
    """Operation → what the real service answers where moto does not: status and content, or None
    where moto may answer. It is told the call's body, with the region as ``_region``."""

    def bodies(self, operation: str) -> list[dict[str, Any]]:
        return [body for name, body in self.calls if name == operation]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }

    def client(self, service: str, region: str = "us-east-1") -> Any:
        import boto3

        return boto3.client(
            service,
            region_name=region,
            endpoint_url=self.url,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )

    def make_bucket(self, name: str, region: str = "us-east-1", **objects: bytes) -> None:
        s3 = self.client("s3", region)
        place = (
            {}
            if region == "us-east-1"
            else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        )
        s3.create_bucket(Bucket=name, **place)
        for key, content in objects.items():
            s3.put_object(Bucket=name, Key=key, Body=content)


@pytest.fixture
def aws() -> Iterator[Aws]:
    """A fresh moto server that records the body of every JSON-protocol call."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server
    from werkzeug.test import run_wsgi_app

    inner = DomainDispatcherApplication(create_backend_app)
    seen = Aws("")

    def recording(environ: dict[str, Any], start_response: Any) -> Any:
        target = environ.get("HTTP_X_AMZ_TARGET")
        if not target:
            query = environ.get("QUERY_STRING", "")
            seen.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], query))
        else:
            length = int(environ.get("CONTENT_LENGTH") or 0)
            body = environ["wsgi.input"].read(length)
            operation = target.rsplit(".", 1)[-1]
            seen.calls.append((operation, json.loads(body or b"{}")))
            environ["wsgi.input"] = io.BytesIO(body)
            if operation in seen.refusals:
                start_response("400 Bad Request", [("Content-Type", "application/x-amz-json-1.1")])
                answer = {"__type": seen.refusals[operation], "message": "no, and why"}
                return [json.dumps(answer).encode()]
            # Whose region a call is for stands in its signature alone.
            region = environ.get("HTTP_AUTHORIZATION", "//").split("/")[2]
            asked = json.loads(body or b"{}") | {"_region": region}
            answered = seen.answers.get(operation, lambda _: None)(asked)
            if answered is not None:
                status, content = answered
                start_response(f"{status} ", [("Content-Type", "application/x-amz-json-1.1")])
                return [json.dumps(content).encode()]
            if operation in seen.amendments:
                pages, status, headers = run_wsgi_app(inner, environ)
                answer = seen.amendments[operation](json.loads(b"".join(pages)))
                if answer is None:
                    start_response("500 Lost", [])
                    return [b""]
                headers.remove("Content-Length")
                start_response(status, headers.to_wsgi_list())
                return [json.dumps(answer).encode()]
        return inner(environ, start_response)

    server = make_server("127.0.0.1", 0, recording, threaded=True)
    seen.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    reset = urllib.request.Request(f"{seen.url}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).read()
    yield seen
    server.shutdown()
    thread.join()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a small file system with the given options; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount_one(options: str) -> Path:
        place = tmp_path / f"mount-{len(mounted)}"
        place.mkdir()
        run = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {run.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount_one
    for place in mounted:
        subprocess.run(["umount", place], check=True)
