"""Notices at once that a process has ended, and how, without being its parent.

A pidfd becomes readable when its process ends. The exit code can be read until the parent reaps
the process: torchrun polls its processes ten times a second, so waking up at once usually suffices.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from typing import TextIO

from sm_train.entrypoints.monitoring import procfs


class ExitWatcher:
    """Waits for the end of processes and of an input; ``exit_codes`` maps pids to exit codes."""

    def __init__(self) -> None:
        self.exit_codes: dict[int, int | None] = {}
        self._descriptors: dict[int, int] = {}

    def watch(self, pids: Iterable[int]) -> None:
        """Watch further processes; macOS and Linux before 5.3 cannot, and nothing wakes up."""
        for pid in pids:
            if pid in self._descriptors.values() or pid in self.exit_codes:
                continue
            try:
                if hasattr(os, "pidfd_open"):
                    self._descriptors[os.pidfd_open(pid)] = pid
                    continue
            except OSError:
                pass
            self.exit_codes[pid] = procfs.exit_code(pid)

    def wait(self, source: TextIO, seconds: float) -> bool:
        """Wait until a process ends, at most ``seconds``; return whether ``source`` was closed."""
        number = source.fileno()
        readable, _, _ = select.select([number, *self._descriptors], [], [], seconds)
        for descriptor in set(readable) - {number}:
            pid = self._descriptors.pop(descriptor)
            self.exit_codes[pid] = procfs.exit_code(pid)
            os.close(descriptor)
        return number in readable
