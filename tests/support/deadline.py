"""The timeout of tests for processes, threads and events."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE = 300.0
"""Seconds that a test waits for a process, thread or event before it fails.

Long enough for a loaded machine; only a failing test waits that long.
"""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
