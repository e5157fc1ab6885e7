"""Opens logs on this machine: files, compressed files, exports and folders of them.

Files are UTF-8, or UTF-16 with a byte order mark, as Windows PowerShell redirects output.
"""

from __future__ import annotations

import codecs
import gzip
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from sm_train.toolkit.analysis.diagnose.log_exports import plain_lines
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.records.job_logs import LOG_NAME, READ_BYTES, LogStream

# algo-2-1700000000.log
_NODE = re.compile(r"algo-\d+")
# rank-3.log, rank_3.txt, rank3
_RANK = re.compile(r"rank[-_.]?(\d+)")
# The sections of a run file (estimators/run_config.py) at the start of a line.
_RUN_FILE_KEYS = re.compile(
    rb"^(model|data|stages|training|cluster|evaluation|checkpoint|heartbeat|recovery):(?:\s|$)",
    re.MULTILINE,
)
_HEAD_BYTES = 4096
_GZIP = b"\x1f\x8b"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_OTHER_SUFFIXES = frozenset(
    ".py .yaml .yml .toml .json .pt .pth .bin .safetensors .tar .parquet .png .jpg .npz".split()
)


def log_files(paths: Iterable[Path]) -> list[LogStream]:
    """Return one stream per file; for a local run's folder, the log of its latest stage.

    Raises:
        UserError: a path does not exist, or a folder has no log.
    """
    files = [file for path in paths for file in _files(path)]
    unique = list(dict.fromkeys(files))
    return [_stream(file, single=len(unique) == 1) for file in unique]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        _check_is_log(path)
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; name a log, a folder or a job")
    runs = list(path.rglob(LOG_NAME))
    if runs:
        return [max(runs, key=lambda log: log.stat().st_mtime)]
    logs = sorted(file for file in path.rglob("*") if file.is_file() and _is_log(file))
    if not logs:
        raise UserError(f"{path}: contains no log; name the files instead")
    return logs


def _check_is_log(path: Path) -> None:
    """Refuse a run file or a binary file, in which "no failure" would be found.

    Raises:
        UserError: the file is not a log.
    """
    with _open(path) as file:
        try:
            head = file.read(_HEAD_BYTES)
        except (EOFError, gzip.BadGzipFile):
            return
    if len(set(_RUN_FILE_KEYS.findall(head))) >= 2:
        raise UserError(
            f"{path}: is a run file, not a log; name the job, its log files or a local run's folder"
        )
    if b"\0" in head and not head.startswith(_UTF_16):
        raise UserError(f"{path}: is not a text file; name a log, compressed with gzip or not")


def _is_log(path: Path) -> bool:
    if path.name.startswith(".") or path.suffix in _OTHER_SUFFIXES:
        return False
    with _open(path) as file:
        try:
            head = file.read(_HEAD_BYTES)
        except (EOFError, gzip.BadGzipFile):
            return False
    # Like grep and git, treat a file with a NUL byte near its start as binary.
    return b"\0" not in head or head.startswith(_UTF_16)


def _open(path: Path) -> IO[bytes]:
    """Open a file, decompressing it if it is compressed."""
    with path.open("rb", buffering=0) as file:
        is_compressed = path.suffix == ".gz" or file.read(len(_GZIP)) == _GZIP
    if is_compressed:
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb", buffering=0)


def _stream(path: Path, *, single: bool) -> LogStream:
    def content() -> Iterator[bytes]:
        with _open(path) as file:
            try:
                # read1 returns all data before the point where a compressed log was truncated;
                # read would raise EOFError without it.
                read = file.read1 if isinstance(file, gzip.GzipFile) else file.read
                while block := read(READ_BYTES):
                    yield block
            except EOFError:
                return
            except (OSError, ValueError) as error:
                raise UserError(f"{path}: cannot be read: {error}") from None

    named = _NODE.search(path.name) or _NODE.search(str(path.parent))
    ranked = _RANK.search(path.name)
    # With a single log or one log per rank, the file's name does not identify the node.
    node = named[0] if named else None if single or ranked else path.stem
    rank = int(ranked[1]) if ranked else None
    return LogStream(
        str(path), lambda: plain_lines(_utf_8(content())), node, path.stat().st_mtime, rank
    )


def _utf_8(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Encode the blocks of a file in UTF-16 as UTF-8, and return any other one's unchanged."""
    decoder: codecs.IncrementalDecoder | None = None
    for number, block in enumerate(blocks):
        if number == 0 and block.startswith(_UTF_16):
            decoder = codecs.getincrementaldecoder("utf-16")("replace")
        yield block if decoder is None else decoder.decode(block).encode()
