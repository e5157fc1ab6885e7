"""Checks whether the process that claimed a job's name on this machine is still running.

A claim is a random ID. Its process holds a lock on a file of that name until it exits; the kernel
releases the lock however the process ends. Claims of other machines have no file here.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

_KEPT_SECONDS = 86400.0
"""Files of older claims are removed: those claims have expired long ago."""


class ClaimLock:
    """The lock of this process on a claim."""

    def __init__(self, claim: str) -> None:
        """Create and lock the claim's file; without a writable folder do nothing."""
        self._path = _path(claim)
        self._file: IO[bytes] | None = None
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _remove_old(self._path.parent)
            self._file = self._path.open("wb")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self, *, settled: bool) -> None:
        """Unlock the claim. If it is not ``settled``, this machine may still take it over."""
        if self._file is not None:
            if settled:
                self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def has_ended(claim: str) -> bool:
    """Return whether a process of this machine made the claim and has ended."""
    try:
        with _path(claim).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # made on another machine, or locked
        return False
    return True


def _path(claim: str) -> Path:
    base = os.environ.get("XDG_STATE_HOME")  # XDG Base Directory specification
    try:
        state = Path(base) if base else Path.home() / ".local" / "state"
    except RuntimeError:  # the user has no home folder, as in Lambda
        state = Path(tempfile.gettempdir())
    return state / "sm-train" / "claims" / Path(claim).name


def _remove_old(folder: Path) -> None:
    oldest = time.time() - _KEPT_SECONDS
    for path in folder.iterdir():
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
