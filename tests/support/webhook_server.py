"""A real HTTP server on loopback in place of Slack, with configurable responses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.background_server import serve_in_background
from tests.support.deadline import DEADLINE

SECRET = "T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX"


@dataclass
class WebhookServer:
    """``responses`` (status, headers) are used up first; after them every request gets a 200.

    ``delay`` are the seconds before a response. ``received`` are the bodies that got a 200.
    """

    port: int = 0
    responses: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    delay: float = 0.0
    received: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/{SECRET}"

    def wait_for(self, count: int, seconds: float = DEADLINE) -> list[dict[str, Any]]:
        """Wait until ``count`` bodies were received; returns them."""
        with self.changed:
            complete = self.changed.wait_for(lambda: len(self.received) >= count, seconds)
            assert complete, self.received
        return self.received


@contextmanager
def webhook_server(port: int = 0) -> Iterator[WebhookServer]:
    state = WebhookServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(state.delay)
            with state.changed:
                state.times.append(time.monotonic())
                status, headers = state.responses.pop(0) if state.responses else (200, {})
                if status == 200:
                    state.received.append(json.loads(body))
                state.changed.notify_all()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    state.port = server.server_port
    with serve_in_background(server):
        yield state
