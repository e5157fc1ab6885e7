"""Digests of files that may be larger than memory."""

from __future__ import annotations

from typing import IO

from blake3 import blake3

_CHUNK = 1 << 20


def file_digest(file: IO[bytes]) -> str:
    """BLAKE3 of what is left to read, as ``b3sum`` prints it."""
    digest = blake3()
    while content := file.read(_CHUNK):
        digest.update(content)
    return digest.hexdigest()
