"""Who holds a lease, and whether that process still runs on this machine.

A holder is a random ID. Its process locks a file of that name until it ends; the kernel releases
the lock however the process ends. Holders on other machines have no file here.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_KEPT_SECONDS = 86400.0
"""Files of older holders are removed: what they held has expired long ago."""

_locks: dict[str, IO[bytes]] = {}
"""Token of each holder of this process → its locked file."""


@dataclass(frozen=True)
class Holder:
    """A process on ``host``, or a processing job. ``token`` distinguishes those of one process."""

    token: str
    host: str = ""
    process: int = 0
    job: str = ""

    @classmethod
    def of_this_process(cls) -> Holder:
        """Return a new holder: this process, until it ends or :meth:`close` is called.

        Without a writable folder nobody notices its end, so its leases expire.
        """
        holder = cls(uuid.uuid4().hex, socket.gethostname(), os.getpid())
        path = _path(holder.token)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_old(path.parent)
            file = path.open("wb")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locks[holder.token] = file
        return holder

    @classmethod
    def of_job(cls, job: str) -> Holder:
        """Return a new holder: a processing job."""
        return cls(uuid.uuid4().hex, job=job)

    def close(self, *, settled: bool = True) -> None:
        """Let go, in the holder's process. If it is not ``settled``, it counts as ended here."""
        file = _locks.pop(self.token, None)
        if settled:
            _path(self.token).unlink(missing_ok=True)
        if file is not None:
            file.close()

    @property
    def has_ended(self) -> bool:
        """Whether it is a process of this machine that has ended. Of others, nothing is known."""
        try:
            with _path(self.token).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # on another machine, or locked
            return False
        return True

    def __str__(self) -> str:
        if self.job:
            return f"the processing job {self.job}"
        return f"process {self.process} on {self.host}"


def _path(token: str) -> Path:
    base = os.environ.get("XDG_STATE_HOME")  # XDG Base Directory specification
    try:
        state = Path(base) if base else Path.home() / ".local" / "state"
    except RuntimeError:  # the user has no home folder, as in Lambda
        state = Path(tempfile.gettempdir())
    return state / "sm-train" / "leases" / Path(token).name


def _remove_old(folder: Path) -> None:
    oldest = time.time() - _KEPT_SECONDS
    for path in folder.iterdir():
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
