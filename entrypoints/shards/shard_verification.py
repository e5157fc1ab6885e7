"""Verifies shards: every header, and against an index every byte.

Training reads around damage; verification reports the first fault as an error.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sm_train.entrypoints.base.digests import file_digest
from sm_train.entrypoints.shards.shard_format import Shard, ShardError
from sm_train.entrypoints.shards.tar_reader import TarScan, scan_tar


def scan_shard(path: Path, name: str | None = None) -> Shard:
    """Read a whole tar and describe it as a shard called ``name`` (its file name by default).

    Raises:
        ShardError: the file is not a tar, is damaged or cut short, or has a file in a sample twice.
        OSError: the file cannot be read.
    """
    scan = _strict_scan(path)
    with path.open("rb") as file:
        digest = file_digest(file)
        size = file.tell()
    offsets = (*scan.starts.tolist(), scan.end)
    return Shard(name or path.name, size, digest, scan.keys, offsets)


def verify_shard(path: Path, expected: Shard | None = None) -> None:
    """Verify the headers of a tar; with ``expected``, also compare every byte with the index.

    Raises:
        ShardError: the tar is damaged or cut short, or is not the one that the index describes.
        OSError: the file cannot be read.
    """
    if expected is None:
        _strict_scan(path)
        return
    shard = scan_shard(path, expected.name)
    if shard != replace(expected, widths=(), heights=(), colors=(), columns={}):
        raise ShardError(
            f"{path}: not the shard in the index: it has {shard.samples} samples, "
            f"{shard.bytes} bytes and digest {shard.blake3[:12]}…, the index has "
            f"{expected.samples}, {expected.bytes} and {expected.blake3[:12]}…"
        )


def _strict_scan(path: Path) -> TarScan:
    """Scan a tar.

    Raises:
        ShardError: it has any fault, even one that a reader can ignore.
    """
    scan = scan_tar(path)
    for fault in (*scan.damage, *scan.irregularities):
        raise ShardError(f"{path}: {fault}")
    return scan
