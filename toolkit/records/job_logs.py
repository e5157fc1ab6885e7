"""The logs of a job: streams of lines, their attempts, the events in them, and why the job ended.

A program in the job may print any line, and no command that reads a log may fail because of it:
an event with a value of another type is none. Unknown fields may hold anything. The analysis of
logs, which an installation may lack, answers why a job ended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import msgspec
from sm_train.cost.speed_model import TextEncoderPlacement
from sm_train.entrypoints.job_interface.events import FIELDS, PREFIX, TEXTS
from sm_train.toolkit.aws.cloudwatch_logs import search
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.base.wings import optional_module

if TYPE_CHECKING:
    import boto3


MAX_RANK = 100_000
"""Limit of ranks, nodes and their numbers, so that a list of all of them fits in memory."""

_MAX_NUMBER = 1e39
"""More than the largest value of float32, and so few digits that all of them can be printed."""

# Unix seconds, up to the year 5138.
_Time = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]
_Number = Annotated[float, msgspec.Meta(ge=-_MAX_NUMBER, le=_MAX_NUMBER)]
_Step = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


RankEntry = msgspec.defstruct(
    "RankEntry",
    [
        ("rank", _Rank),
        ("busy_seconds", _Number | None, None),
        ("data_wait_share", _Number | None, None),
    ],
    gc=False,
)
"""An entry of the field ``ranks``, with the values that a review uses."""

GpuEntry = msgspec.defstruct(
    "GpuEntry", [("gpu", _Rank), ("sm_clock", _Number | None, None)], gc=False
)
"""An entry of the field ``gpus``, with the values that a review uses."""


class StragglerEntry(msgspec.Struct, gc=False):
    """An entry of the field ``stragglers``; ``rank`` is None for a whole node."""

    rank: _Rank | None
    node: _Rank
    busy_seconds: _Number
    ratio: _Number


class _Figure(msgspec.Struct, array_like=True):
    measured: _Number | None
    expected: _Number | None
    unit: str


_HEADER: Mapping[str, Any] = {"time": _Time, "node": _Rank, "rank": _Rank}

_REQUIRED: Mapping[str, Any] = {
    "step": _Step,
    "nodes": _Rank,
    "world_size": _Rank,
    "effective_batch_size": _Number,
    "seconds": _Seconds | None,
    "seconds_since_step": _Seconds | None,
    "findings": list[str] | None,
    "ranks": list[RankEntry],  # type: ignore[valid-type]
    "gpus": list[GpuEntry],  # type: ignore[valid-type]
}
"""Types of required fields; of all others, numbers and texts that may be null."""

_OPTIONAL: Mapping[str, Mapping[str, Any]] = {
    "start": {
        "instance_type": str,
        "accelerator": str,
        "sharding": str,
        "reduce_dtype": str,
        "compile": bool,
        "activation_checkpointing": bool | Literal["selective"],
        "text_encoders": TextEncoderPlacement,
        "entry": str,
        "input_kind": str,
        "frozen_parameters": _Number,
    },
    "step": {
        "timed_steps": _Step,
        "timed_seconds": _Seconds,
        "waited_seconds": _Seconds,
        "compile_seconds": _Seconds | None,
    },
    "heartbeat": {
        "saves": list[tuple[_Step, _Seconds]],
        "unstored_seconds": _Seconds | None,
    },
    "node": {"stragglers": list[StragglerEntry]},
    "doctor": {"parts": dict[str, _Figure]},
    "warning": {
        "blamed_rank": _Rank,
        "blamed_node": _Rank,
        "rank_died": _Rank,
        "unread_rank": _Rank,
        "silent_seconds": _Seconds,
        "evidence": str,
    },
    "end": {"gpu_memory_peak": _Number},
}
"""Fields that a command reads if an event has them, by kind; each may be null."""


def field_types(kind: str) -> dict[str, Any]:
    """Return the types of an event's required fields and of those of its header, by name."""
    others = {name: str | None if name in TEXTS else _Number | None for name in FIELDS[kind]}
    required = {name: _REQUIRED[name] for name in FIELDS[kind] & _REQUIRED.keys()}
    return {**others, **required, **_HEADER}


def optional_types(kind: str) -> dict[str, Any]:
    """Return the types of the other fields that a command reads, by name; each may be missing."""
    return {name: type_ | None for name, type_ in _OPTIONAL.get(kind, {}).items()}


def _event_type(kind: str) -> type[msgspec.Struct]:
    fields: list[Any] = list(field_types(kind).items())
    fields += [(name, type_, None) for name, type_ in optional_types(kind).items()]
    return msgspec.defstruct(kind, fields)


_EVENT_TYPES = {kind: _event_type(kind) for kind in FIELDS}


def is_event(value: object) -> bool:
    """Return whether a JSON value is an event of a known kind with values of its types."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _EVENT_TYPES:
        return False
    try:
        msgspec.convert(value, _EVENT_TYPES[kind])
    except msgspec.ValidationError:
        return False
    return True


READ_BYTES = 1 << 22
"""Bytes of a log that are read at a time."""

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
    analysis = optional_module("sm_train.toolkit.analysis.diagnose.diagnosis")
    return None if analysis is None else analysis.diagnose_logs(logs)


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


def node_blocks(streams: Iterable[LogStream]) -> Iterator[tuple[str | None, bytes]]:
    """Yield (the node's name, whole lines) of streams, one after the other."""
    for stream in streams:
        for block in whole_lines(stream.blocks()):
            yield stream.node, block


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


LOG_NAME = "events.log"
"""The file in a local run's folder with the output of all its processes."""

Event = dict[str, Any]

UNREADABLE = (ValueError, RecursionError)
"""The errors that msgspec raises for text that is not JSON."""


def parse_event(line: str) -> Event | None:
    """Return the event in ``line``; None for any other line.

    A launcher or CloudWatch may put text before the event, and a killed process may truncate it:
    a line without a complete event of a known kind holds none.
    """
    start = line.find(PREFIX + "{")
    if start < 0:
        return None
    try:
        event = msgspec.json.decode(line[start + len(PREFIX) :])
    except UNREADABLE:
        return None
    return event if is_event(event) else None


def parse_events(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events among ``lines`` in order."""
    return (event for line in lines if (event := parse_event(line)) is not None)


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events in a log file, or in a local run's folder.

    Raises:
        FileNotFoundError: there is no such file, or the folder has no log.
    """
    log = path / LOG_NAME if path.is_dir() else path
    with log.open(encoding="utf-8", errors="replace") as lines:
        yield from parse_events(lines)


def job_events(session: boto3.Session, name: str, region: str | None = None) -> Iterator[Event]:
    """Yield the events of a job's rank 0 from all of its log streams; ``region`` is the session's
    unless given.
    """
    entries = search(session, f"{name}/", region=region, pattern='"SMT "')
    events = parse_events(entry.message for entry in entries)
    return (event for event in events if event["rank"] == 0)
