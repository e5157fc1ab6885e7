"""A real HTTP server on loopback that stands for Slack, and answers as it is told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX"


@dataclass
class Hook:
    """``answers`` are used up first, as (status, headers); then everything is taken.

    ``hang`` are seconds before an answer.
    """

    port: int = 0
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    hang: float = 0.0
    taken: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    come: threading.Condition = field(default_factory=threading.Condition)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/{SECRET}"

    def wait_for(self, count: int, seconds: float = 30) -> list[dict[str, Any]]:
        """What was taken, once so many have arrived."""
        with self.come:
            assert self.come.wait_for(lambda: len(self.taken) >= count, seconds), self.taken
        return self.taken


@contextmanager
def webhook(port: int = 0) -> Iterator[Hook]:
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(hook.hang)
            with hook.come:
                hook.times.append(time.monotonic())
                status, headers = hook.answers.pop(0) if hook.answers else (200, {})
                if status == 200:
                    hook.taken.append(json.loads(body))
                hook.come.notify_all()
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
    hook.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hook
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
