"""Draws what a command prints on a terminal of a given width."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pyte

from tests.conftest import _PRELUDES, clean_environment
from tests.support.deadline import DEADLINE
from tests.support.forked_commands import cli_server

_LINES = 400
"""More than any screen has: nothing scrolls away."""


def draw(
    arguments: Sequence[str],
    *,
    columns: int,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    network: str = "none",
) -> str:
    """Return the lines that ``sm-train`` leaves on a terminal, and its exit code if it is not 0."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = clean_environment(cwd) | {"TERM": "xterm-256color", "TZ": "UTC"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CI"):
        environment.pop(name, None)
    screen = pyte.Screen(columns, _LINES)
    reader = threading.Thread(target=_feed, args=(master, pyte.ByteStream(screen)))
    reader.start()
    try:
        done = cli_server.run(
            _PRELUDES[network],
            arguments,
            env=environment | dict(env or {}),
            cwd=cwd,
            stdin="",
            timeout=DEADLINE,
            terminal=os.ttyname(slave),
        )
    finally:
        os.close(slave)
        reader.join(DEADLINE)
        os.close(master)
    text = "\n".join(line.rstrip() for line in screen.display).rstrip("\n")
    status = f"\n[exit code {done.returncode}]" if done.returncode else ""
    return f"{text}{status}\n"


def _feed(master: int, stream: pyte.ByteStream) -> None:
    with suppress(OSError):  # Linux returns EIO once the other side is closed
        while block := os.read(master, 65536):
            stream.feed(block)


_VARIABLE = (
    # The bundle changes with every change of the training code.
    (r"\d+ files, [\d,]+ bytes, sha256 [0-9a-f]+…", "N files, N bytes, sha256 …"),
    # Names of jobs end with the time of their submission.
    (r"(-|--)\d{10,14}\b", r"\1TIME"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d", "YYYY-MM-DD HH:MM"),
    (r"\b\d\d:\d\d:\d\d\b", "HH:MM:SS"),
)


def normalize(text: str) -> str:
    """Replace what differs between two runs of the same code."""
    for pattern, replacement in _VARIABLE:
        text = re.sub(pattern, replacement, text)
    return text
