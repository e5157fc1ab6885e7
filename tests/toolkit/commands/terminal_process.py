"""Runs ``sm-train`` on a pseudo-terminal, as a person uses it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import clean_environment
from tests.support.deadline import DEADLINE

_START = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
# The parent of the tests (nohup, a shell) may ignore it, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
COMMAND = """
from sm_train.toolkit.cli import main
main(sys.argv[1:])
"""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


@dataclass
class TerminalProcess:
    """A command on a terminal; ``output`` is what it has printed so far, without control."""

    process: subprocess.Popen[bytes]
    master: int
    _bytes: bytes = b""

    @property
    def output(self) -> str:
        return _CONTROL.sub("", self._bytes.decode("utf-8", "replace"))

    def expect(self, text: str) -> None:
        """Read until ``text`` is on the screen."""
        end = time.monotonic() + DEADLINE
        while text not in self.output:
            assert self._read(end), f"{text!r} is not in:\n{self.output}"

    def send(self, text: str) -> None:
        """Type ``text``."""
        os.write(self.master, text.encode())

    def finish(self) -> int:
        """Read until the command has ended; return its exit code."""
        end = time.monotonic() + DEADLINE
        while self._read(end):
            pass
        return self.process.wait(DEADLINE)

    def _read(self, end: float) -> bool:
        """Read what there is; return whether there may be more."""
        ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"no output within the deadline after:\n{self.output}"
        with suppress(OSError):  # Linux returns EIO once the other side is closed
            block = os.read(self.master, 65536)
            self._bytes += block
            return bool(block)
        return False


@contextmanager
def terminal_process(
    arguments: Sequence[str | Path],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    columns: int = 80,
    program: str = COMMAND,
) -> Iterator[TerminalProcess]:
    """Run ``program``, by default ``sm-train``, with ``arguments`` on a terminal of 40 lines."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = clean_environment(cwd) | {"TERM": "xterm-256color"} | dict(env or {})
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", _START + program, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield TerminalProcess(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
