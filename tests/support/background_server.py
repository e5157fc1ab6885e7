"""Runs an HTTP server in a thread until a context ends."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_POLL_SECONDS = 0.01  # socketserver's default, 0.5 s, is how long each server would take to stop


@contextmanager
def serve_in_background(server: socketserver.BaseServer) -> Iterator[None]:
    """Serve requests in a daemon thread; stop the thread and close ``server`` at the end."""
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
