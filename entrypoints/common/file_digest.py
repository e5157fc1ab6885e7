"""Digests of files that may be larger than memory."""

from __future__ import annotations

from typing import IO

from blake3 import blake3

_READ_BYTES = 1 << 20


def file_digest(file: IO[bytes]) -> str:
    """Return the BLAKE3 digest of the rest of ``file``, in hexadecimal as ``b3sum`` prints it."""
    digest = blake3()
    while content := file.read(_READ_BYTES):
        digest.update(content)
    return digest.hexdigest()
