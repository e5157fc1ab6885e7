"""Digests of files, and codes that prove that a message comes from the same job."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import IO

from sm_train.entrypoints.base.error import Error

CODE_BYTES = 16
"""Length of the truncated HMAC-SHA256 before each message (RFC 2104, section 5: half or more)."""

_READ_BYTES = 1 << 20


def file_digest(file: IO[bytes]) -> str:
    """Return the BLAKE3 digest of the rest of ``file``, in hexadecimal as ``b3sum`` prints it."""
    from blake3 import blake3

    digest = blake3()
    while content := file.read(_READ_BYTES):
        digest.update(content)
    return digest.hexdigest()


def message_key(document: Path) -> bytes:
    """Return the key of a job's messages, derived from the job file that its nodes have."""
    return hashlib.sha256(document.read_bytes()).digest()


def machine_key() -> bytes:
    """Return the key of the messages between a user's processes on this machine, outside of a job.

    It lies in a file that only the user can read.

    Raises:
        Error: the file is another user's, or others can read it.
    """
    path = Path(tempfile.gettempdir()) / f"sm-train-{os.geteuid()}.key"
    # Of this call alone: another thread may do the same at this time.
    descriptor, own = tempfile.mkstemp(prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
        os.link(own, path)  # whole, or not at all
    except FileExistsError:
        pass
    finally:
        Path(own).unlink()
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
            raise Error(f"{path}: belongs to another user, or others can read it; remove it")
        return file.read()


def seal(content: bytes, key: bytes, name: str = "") -> bytes:
    """Return ``content`` after the code that proves that its sender has ``key``.

    With a ``name`` the code is valid under that name only.
    """
    signed = name.encode() + b"\0" + content
    return hmac.digest(key, signed, "sha256")[:CODE_BYTES] + content


def unseal(message: bytes, key: bytes, name: str = "") -> bytes | None:
    """Return the content of a sealed message; None if its sender did not have ``key``."""
    content = message[CODE_BYTES:]
    return content if hmac.compare_digest(seal(content, key, name), message) else None
