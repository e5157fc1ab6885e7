"""The index of a set of shards: one small file that spares every reader the walk through them.

A packed folder holds::

    index.jsonl
    shards/shard-000000.tar
    shards/shard-000001.tar …

The index lies beside the shards' folder and never in it: with ``ShardedByS3Key`` every object
below the channel's prefix is dealt to one instance, so whatever lies among the tars takes a
shard's place. The data channel is ``…/shards/``, and nothing but tars may be there.

``index.jsonl`` is JSON lines. The first is a header: ``format``, ``version`` and totals, by which
a file cut short is known. One line for each shard follows (:class:`~.shards.Shard`), then one for
each refused input (:class:`Refused`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.shards import Shard, ShardError, scan_shard

INDEX_NAME = "index.jsonl"
SHARDS_FOLDER = "shards"

FORMAT = "sm-train-index"
VERSION = 1


@dataclass(frozen=True)
class Refused:
    """An input that was left out.

    ``source`` is its path in the packed folder, or its row of the table. ``reason`` is a fixed
    code such as ``image-corrupt``; ``detail`` says what was wrong, for a person.
    """

    source: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Index:
    """What was packed, into what, and what was left out.

    ``target_bytes`` is the shard size that was asked for, and ``inputs`` a digest over the names
    and sizes of everything that went in: both are None for shards that sm-train did not pack.
    """

    shards: tuple[Shard, ...]
    refused: tuple[Refused, ...] = ()
    target_bytes: int | None = None
    inputs: str | None = None

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


def write_index(path: Path, index: Index) -> None:
    """Write ``index`` and wait until it is on the disk. The same index gives the same bytes.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for line in _lines(index):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _lines(index: Index) -> Iterator[dict[str, Any]]:
    yield {
        "format": FORMAT,
        "version": VERSION,
        "target_bytes": index.target_bytes,
        "inputs": index.inputs,
        "shards": len(index.shards),
        "samples": index.samples,
        "bytes": index.bytes,
        "refused": len(index.refused),
    }
    for shard in index.shards:
        yield {"kind": "shard", **vars(shard)}
    for refused in index.refused:
        yield {"kind": "refused", **vars(refused)}


def read_index(path: Path) -> Index:
    """Read an index file.

    Raises:
        ShardError: it is no index, is damaged or cut short, or has a version of the future.
        OSError: it cannot be read.
    """
    shards: list[Shard] = []
    refused: list[Refused] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        header = _header(path, next(lines, ""))
        for number, line in enumerate(lines, start=2):
            try:
                fields = json.loads(line)
                if fields.pop("kind") == "shard":
                    shards.append(_shard(**fields))
                else:
                    refused.append(Refused(**fields))
            except (ValueError, TypeError, AttributeError, KeyError):
                raise ShardError(f"{path}:{number}: not a line of a shard index") from None
    index = Index(tuple(shards), tuple(refused), header.get("target_bytes"), header.get("inputs"))
    promised = header.get("shards"), header.get("samples"), header.get("refused")
    if promised != (len(shards), index.samples, len(refused)):
        raise ShardError(f"{path}: cut short or edited: its lines do not add up to its first")
    return index


def indexed_samples(shards: Path) -> int | None:
    """Samples by the first line of the index beside the folder ``shards``; None without one."""
    path = shards.parent / INDEX_NAME
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            samples = _header(path, next(lines, "")).get("samples")
    except (OSError, ShardError):
        return None
    return samples if isinstance(samples, int) else None


def _header(path: Path, line: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ShardError(f"{path}: not a shard index")
    if header.get("version") != VERSION:
        raise ShardError(
            f"{path}: index version {header.get('version')}; this sm-train reads {VERSION}"
        )
    return header


def _shard(name: str, bytes: int, sha256: str, keys: list[str], offsets: list[int]) -> Shard:
    if len(offsets) != len(keys) + 1:
        raise ValueError("one offset for each sample and one behind the last")
    return Shard(name, bytes, sha256, tuple(keys), tuple(offsets))


def index_shards(folder: Path) -> Index:
    """Describe every ``*.tar`` below ``folder``, for a tree that came without an index.

    Reads each shard once from end to end. Names are paths below ``folder``, in sorted order.

    Raises:
        ShardError: there is no tar, or one is damaged.
        OSError: something cannot be read.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.tar"))
    if not names:
        raise ShardError(f"{folder}: no tar files here")
    return Index(tuple(scan_shard(folder / name, name) for name in names))
