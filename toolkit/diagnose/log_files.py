"""Logs to diagnose that lie on this machine: files, compressed ones, and folders of them."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from sm_train.toolkit.diagnose.hits import LogStream
from sm_train.toolkit.diagnose.log_scanner import BLOCK
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.jobs.events import LOG_NAME

_NODE = re.compile(r"algo-\d+")
_RANK = re.compile(r"rank[-_.]?(\d+)")
_STREAM = re.compile(r"(algo-\d+)-(\d{9,})")
"""SageMaker's streams: the instance, and when its container was started."""
_NO_LOG = frozenset(
    ".py .yaml .yml .toml .json .pt .pth .bin .safetensors .tar .parquet .png .jpg .npz".split()
)


def log_files(paths: Iterable[Path]) -> list[LogStream]:
    """One stream for each file; of a local run's folder its newest stage's log.

    Raises:
        UserError: a path is not there, or a folder holds no log.
    """
    files = [file for path in paths for file in _files(path)]
    unique = list(dict.fromkeys(files))
    return [_stream(file, alone=len(unique) == 1) for file in unique]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; name a job's log, a folder or a job")
    runs = list(path.rglob(LOG_NAME))
    if runs:
        return [max(runs, key=lambda log: log.stat().st_mtime)]
    found = sorted(file for file in path.rglob("*") if file.is_file() and _is_log(file))
    if not found:
        raise UserError(f"{path}: holds no log; give the files themselves")
    return found


def _is_log(path: Path) -> bool:
    if path.name.startswith(".") or path.suffix in _NO_LOG:
        return False
    with _open(path) as file:
        try:
            return b"\0" not in file.read(4096)
        except (EOFError, gzip.BadGzipFile):
            return False


def _open(path: Path) -> IO[bytes]:
    """The file's bytes; of a compressed one those inside."""
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb", buffering=0)


def _stream(path: Path, *, alone: bool) -> LogStream:
    def blocks() -> Iterator[bytes]:
        with _open(path) as file:
            try:
                # What comes before the place where a compressed log was cut is not lost.
                read = file.read1 if isinstance(file, gzip.GzipFile) else file.read
                while block := read(BLOCK):
                    yield block
            except EOFError:
                return
            except (OSError, ValueError) as error:
                raise UserError(f"{path}: cannot be read: {error}") from None

    named = _NODE.search(path.name) or _NODE.search(str(path.parent))
    ranked = _RANK.search(path.name)
    node = named[0] if named else None if alone or ranked else path.stem
    rank = int(ranked[1]) if ranked else None
    return LogStream(str(path), blocks, node, path.stat().st_mtime, rank)


def attempts(streams: Sequence[LogStream]) -> list[list[LogStream]]:
    """The streams by attempt, the last one last: a retry begins new streams on every instance.

    An attempt's streams begin together; those of the one before all began before any of its.
    Streams whose names tell no beginning belong to the last.
    """
    begun = {stream.name: _begun(stream.name) for stream in streams}
    newest: dict[str, float] = {}
    for instance, at in begun.values():
        newest[instance] = max(at, newest.get(instance, 0))
    older = [at for instance, at in begun.values() if at < newest[instance]]
    if not older:
        return [list(streams)]
    last = [stream for stream in streams if begun[stream.name][1] > max(older)]
    rest = [stream for stream in streams if begun[stream.name][1] <= max(older)]
    return [*attempts(rest), last]


def _begun(name: str) -> tuple[str, float]:
    """The instance and its container's start, from a stream's name; others are their own."""
    said = _STREAM.search(name)
    return (said[1], int(said[2])) if said else (name, math.inf)
