"""The logs of a job: streams of lines, their attempts, and a question about why the job ended.

The answer comes from the analysis of logs, which an installation may lack.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from sm_train.toolkit.errors import UserError

READ_BYTES = 1 << 22
"""Bytes of a log that are read at a time."""

ANALYSIS = "sm_train.toolkit.diagnose.diagnosis"
"""The module whose ``diagnose_logs`` says why a job ended."""

_MAX_LINE_BYTES = 1 << 20
# my-job/algo-1-1700000000: a SageMaker log stream's name, with the instance and the time at which
# its container started
_STREAM = re.compile(r"(algo-\d+)-(\d{9,})")


@dataclass(frozen=True)
class LogStream:
    """One log: its content as blocks of bytes of any size, its origin and its last write time."""

    name: str
    blocks: Callable[[], Iterable[bytes]]
    node: str | None = None
    reference: float = 0.0
    """Unix seconds; no line is later. It determines the year of times without one."""
    rank: int | None = None
    """The rank of lines that do not name theirs."""


@dataclass(frozen=True)
class JobLogs:
    """The logs of the job ``name``: of its last attempt, and of ``earlier`` ones, oldest first."""

    name: str
    status: str
    last: Sequence[LogStream]
    earlier: Sequence[Sequence[LogStream]] = ()


class LogCause(Protocol):
    """Why a job ended."""

    @property
    def cause(self) -> str:
        """The code of the cause."""

    @property
    def title(self) -> str: ...

    @property
    def action(self) -> str | None:
        """What to do about it."""

    @property
    def confidence(self) -> str | None:
        """``high``, ``medium`` or ``low``."""

    @property
    def retryable(self) -> bool | None:
        """Whether another job may succeed without a change; None if that is unknown."""


def cause_of(logs: JobLogs) -> LogCause | None:
    """Return why a job ended; None if this installation has no analysis of logs.

    Raises:
        UserError: the job has no logs yet, or they cannot be read.
    """
    package = ANALYSIS.rpartition(".")[0]
    try:
        analysis = import_module(ANALYSIS)
    except ModuleNotFoundError as error:
        if error.name is None or not package.startswith(error.name):
            raise
        return None
    cause: LogCause = analysis.diagnose_logs(logs)
    return cause


def file_stream(path: Path) -> LogStream:
    """Return the stream of a log on this machine, as the product writes it."""

    def blocks() -> Iterator[bytes]:
        try:
            with path.open("rb", buffering=0) as file:
                while block := file.read(READ_BYTES):
                    yield block
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error}") from None

    return LogStream(str(path), blocks, None, path.stat().st_mtime)


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Regroup ``blocks`` so that each ends with a newline; lines above 1 MiB are split."""
    rest = b""
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
            if len(rest) > _MAX_LINE_BYTES:
                yield rest + b"\n"
                rest = b""
    if rest:
        yield rest + b"\n"


def attempts(streams: Sequence[LogStream]) -> list[list[LogStream]]:
    """Group the streams by attempt, oldest first: a retry starts new streams on every instance.

    All streams of an attempt start after those of the previous attempt. Streams without a start
    time in their name belong to the last attempt.
    """
    starts = {stream.name: _instance_and_start(stream.name) for stream in streams}
    newest: dict[str, float] = {}
    for instance, start in starts.values():
        newest[instance] = max(start, newest.get(instance, 0))
    older = [start for instance, start in starts.values() if start < newest[instance]]
    if not older:
        return [list(streams)]
    # The last attempt starts after the newest stream that another one on its instance superseded.
    last = [stream for stream in streams if starts[stream.name][1] > max(older)]
    rest = [stream for stream in streams if starts[stream.name][1] <= max(older)]
    return [*attempts(rest), last]


def _instance_and_start(name: str) -> tuple[str, float]:
    """Parse a stream's name; any other name counts as an instance without a start time."""
    parsed = _STREAM.search(name)
    return (parsed[1], int(parsed[2])) if parsed else (name, math.inf)
