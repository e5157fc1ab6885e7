"""Leases: exactly one of several processes, on any machines, holds a right at a time.

A lease is a file that is created and taken over by conditional writes. Its holder renews it in the
background. A lease ends when it is released, at once when its process has ended on the machine that
asks, and otherwise once it was not renewed for some time: its machine is lost, or was suspended.
A holder that was suspended does not notice the loss before its next renewal, so what it protects
must stay correct if two hold it: leases save work, and conditional writes decide.

A holder is a random ID. Its process locks a file of that name until it ends; the kernel releases
the lock however the process ends. Holders on other machines have no file here.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from sm_train.entrypoints.base.stored_fields import checked_fields, integer, text
from sm_train.entrypoints.storage.lease_files import LeaseFiles

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


RENEW_SECONDS = 20.0

EXPIRES_SECONDS = 120.0
"""Age at which a lease that was not renewed may be taken over: five renewals may fail."""

_ATTEMPTS = 5

_HOLDER_FIELDS = {"token": text, "host": text, "process": integer, "job": text}

_UNKNOWN = Holder("", "an unknown machine, as the lease is damaged", 0, "")

JobIsActive = Callable[[str], bool]
"""Returns whether the processing job of this name is running."""


class LeaseHeldError(RuntimeError):
    """Another process or job holds the lease; the message names it."""


@dataclass(frozen=True)
class StoredLease:
    """A lease as stored. ``document`` is what its holder wrote next to its identity.

    ``version`` identifies the stored file; ``age`` is in seconds.
    """

    holder: Holder
    document: dict[str, Any]
    version: str
    age: float

    def has_expired(self, seconds: float) -> bool:
        """Return whether its holder will not return: it has ended, or has not renewed it."""
        return self.age >= seconds or self.holder.has_ended


class Lease:
    """The lease ``name`` for ``holder``. ``document`` is stored with it."""

    def __init__(
        self,
        files: LeaseFiles,
        name: str,
        holder: Holder,
        document: Mapping[str, Any] | None = None,
    ) -> None:
        self._files, self._name, self.holder = files, name, holder
        self._document = dict(document or {})
        self.version: str | None = None
        """What :meth:`take` and :meth:`renew` wrote last; None if the lease is not held."""

    def acquire(
        self, *, job_is_active: JobIsActive = lambda job: False, by_force: bool = False
    ) -> None:
        """Take the lease, if nobody holds it; ``by_force`` also takes it over from its holder.

        A damaged one counts until it is as old as one that was not renewed.

        Raises:
            LeaseHeldError: another process or job holds it.
        """
        for _ in range(_ATTEMPTS):
            stored = self._stored()
            if stored is not None and not by_force:
                # A job is created after its lease.
                is_free = stored.has_expired(EXPIRES_SECONDS)
                if not is_free or (stored.holder.job and job_is_active(stored.holder.job)):
                    raise LeaseHeldError(str(stored.holder))
            if self.take(stored):
                return
        raise LeaseHeldError("others are starting")

    def take(self, stored: StoredLease | None) -> bool:
        """Write the lease over ``stored``, or if None is stored; return whether that succeeded."""
        self.version = self.write(self._document, None if stored is None else stored.version)
        return self.version is not None

    def write(self, document: Mapping[str, Any], version: str | None) -> str | None:
        """Write ``document`` and the holder over the stored ``version``; return the new version.

        None if another writer was faster.
        """
        content = json.dumps({**document, "holder": asdict(self.holder)}, indent=1).encode()
        return self._files.write_if(self._name, content, version=version)

    def renew(self) -> bool:
        """Renew the lease; return whether it is still held."""
        if self.version is not None:
            self.version = self.write(self._document, self.version)
        return self.version is not None

    def release(self) -> None:
        """Remove the lease if it is still held."""
        stored = self._stored()
        if stored is not None and stored.holder == self.holder:
            self._files.remove(self._name)

    def _stored(self) -> StoredLease | None:
        with suppress(ValueError):
            return read_lease(self._files, self._name)
        found = self._files.read(self._name)
        return None if found is None else StoredLease(_UNKNOWN, {}, found.version, found.age)


def read_lease(files: LeaseFiles, name: str) -> StoredLease | None:
    """Return the lease as stored; None if nobody has it.

    Raises:
        ValueError: it is damaged.
    """
    found = files.read(name)
    if found is None:
        return None
    try:
        document: dict[str, Any] = json.loads(found.content)
        holder = Holder(**checked_fields(document.pop("holder"), _HOLDER_FIELDS))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no lease: {error}") from None
    return StoredLease(holder, document, found.version, found.age)


class Renewal:
    """Renews leases in a thread while its context is open. One that is lost is dropped."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, name: str, lease: Lease) -> None:
        """Renew ``lease``, which is held, from now on."""
        with self._lock:
            self._leases[name] = lease

    def discard(self, name: str) -> None:
        """Stop renewing one lease."""
        with self._lock:
            self._leases.pop(name, None)

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._leases

    def clear(self) -> None:
        """Stop renewing all leases: what they protect is finished."""
        with self._lock:
            self._leases.clear()

    def __enter__(self) -> Renewal:
        self._stop.clear()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            with self._lock:
                leases = dict(self._leases)
            for name, lease in leases.items():
                # After a failed request the lease is still valid, and the next one renews it.
                with suppress(*_request_errors()):
                    if not lease.renew():
                        self.discard(name)


def _request_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a request to the storage; botocore may not be installed."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return (OSError,)
    return (OSError, BotoCoreError, ClientError)
