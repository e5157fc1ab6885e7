"""What a node of Kubernetes or Slurm stores about its job, next to the stage's checkpoints.

SageMaker keeps the status and the log of a job; other platforms forget both with the pod. So the
first process of each node stores, below ``job-records`` in the stage's checkpoint folder:

    run.json                    the run file, as the job's processes read it
    submitted.json              a :class:`Submitted` job, of `submit --to`
    stop.json                   a :class:`StopRequest` (``sm-train stop``, a budget)
    alerts.json                 the alerts that a watcher has sent
    algo-1-1700000000/          a node, and when its first process started; on Slurm with the job
        node.json               a :class:`NodeRecord`, stored again every 30 seconds
        000000.log, 000001.log  what the node printed, in segments

The clocks of nodes, of those who watch them and of the storage may differ. The storage's decides
how old a record or a request is, and a node's monotonic clock how long it has run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from sm_train.entrypoints.base.stored_fields import (
    checked_fields,
    integer,
    mapping_of,
    one_of,
    optional,
    positive,
    seconds,
    text,
    timestamp,
)
from sm_train.entrypoints.job_interface.node_description import RECORDS
from sm_train.entrypoints.storage.lease_files import AgedFile
from sm_train.entrypoints.storage.storage import Storage, read_document, write_file

FOLDER = RECORDS

RUN_FILE, STOP_FILE = f"{FOLDER}/run.json", f"{FOLDER}/stop.json"
SUBMITTED_FILE = f"{FOLDER}/submitted.json"
_NODE_FILE = "node.json"

RECORD_VERSION = 3
"""Format of a node's record and of a request to stop."""

_RESOLUTION_SECONDS = 1.0
"""Times of objects in S3 and dates of its responses are whole seconds."""

_AGREE_SECONDS = 2.0
"""Difference of two clocks that the resolution and the time of a request may explain."""

HEARTBEAT_SECONDS = 30.0
"""Interval at which a node stores its record."""

MISSING_SECONDS = 180.0
"""Age of a heartbeat from which on a node counts as lost: six intervals."""

NodeState = Literal["preparing", "training", "ended"]

_READS = 16
_SEGMENT = re.compile(r"\d{6}\.log")
_FOLDER = re.compile(r"(.+)-(\d{9,})")


@dataclass(frozen=True)
class NodeRecord:
    """One start of a node.

    ``node`` is algo-1, algo-2, …, or the host's name where the operator assigns ranks later.
    ``machine`` is the name by which an administrator knows it. ``started`` and ``seen``, the time
    of the newest heartbeat, are in Unix seconds by the node's clock, to be compared with the times
    in its log; ``ran`` is the seconds between them by a clock that nobody sets. ``exit_code`` is
    None until it has ended; ``stopped_by`` says who asked for that. ``commands`` are the
    platform's, by their purpose. ``job_id`` is the platform's number of the job, which a start
    after a preemption keeps and a job that somebody submits does not; None if it has none.
    """

    run: str
    stage: str
    platform: str
    node: str
    nodes: int
    instance_type: str
    host: str
    machine: str | None
    started: float
    seen: float
    ran: float = 0.0
    state: NodeState = "preparing"
    exit_code: int | None = None
    stopped_by: str | None = None
    commands: Mapping[str, str] = field(default_factory=dict)
    job_id: str | None = None

    @property
    def folder(self) -> str:
        """Its folder in the stage's checkpoint folder."""
        job = "" if self.job_id is None else f"-job{self.job_id}"
        return f"{FOLDER}/{self.node}{job}-{int(self.started)}"

    @property
    def file(self) -> str:
        """The file with this record, in the stage's checkpoint folder."""
        return f"{self.folder}/{_NODE_FILE}"

    @property
    def label(self) -> str:
        """The node with its machine, as in ``algo-2 (gpu-07)``."""
        return f"{self.node} ({self.machine})" if self.machine else self.node

    def to_json(self) -> bytes:
        return json.dumps({"version": RECORD_VERSION, **asdict(self)}).encode()

    @classmethod
    def parse(cls, content: bytes) -> NodeRecord:
        """Parse a stored record.

        Raises:
            OtherFormatError: it has another format.
            ValueError: it is not a record.
        """
        document = json.loads(content)
        _require_version(document)
        try:
            return cls(**checked_fields(document, _NODE_FIELDS))
        except TypeError as error:  # a field is missing
            raise ValueError(str(error)) from None


_NODE_FIELDS: dict[str, Callable[[Any], Any]] = {
    "run": text,
    "stage": text,
    "platform": text,
    "node": text,
    "nodes": positive,
    "instance_type": text,
    "host": text,
    "machine": optional(text),
    "started": timestamp,
    "seen": timestamp,
    "ran": seconds,
    "state": one_of("preparing", "training", "ended"),
    "exit_code": optional(integer),
    "stopped_by": optional(text),
    "commands": mapping_of(text),
    "job_id": optional(text),
}


@dataclass(frozen=True)
class StopRequest:
    """A request of ``by`` to stop all nodes that had started when it was stored.

    ``requested`` is that time in Unix seconds, by the reader's clock. With ``job_id`` it concerns
    that job whenever it starts: also after it has waited in a queue.
    """

    by: str
    requested: float
    job_id: str | None = None

    def applies_to(self, started: float, job_id: str | None = None) -> bool:
        """Return whether it concerns what started at ``started``, Unix seconds by the same clock.

        One that may have been stored just before or just after the start does.
        """
        if self.job_id is not None and job_id == self.job_id:
            return True
        return self.requested > started - _RESOLUTION_SECONDS


@dataclass(frozen=True)
class Submitted:
    """A job that was handed to a platform at ``time``, Unix seconds: it may wait in a queue.

    ``commands`` are the platform's, by their purpose.
    """

    platform: str
    commands: Mapping[str, str]
    time: float


@dataclass(frozen=True)
class StoredNode:
    """A node's record as found in the storage, and the names of its log's segments in order.

    ``seen`` is when the storage received the newest heartbeat, in Unix seconds by the reader's
    clock. ``clock_offset`` is how many
    seconds the node's clock is ahead of the storage's.
    """

    record: NodeRecord
    segments: tuple[str, ...]
    seen: float
    clock_offset: float = 0.0

    @property
    def started(self) -> float:
        """When it started, in Unix seconds by the reader's clock."""
        return self.seen - self.record.ran

    def is_live(self, now: float) -> bool:
        """Return whether it has not ended, and has sent a heartbeat lately."""
        return self.record.state != "ended" and now - self.seen <= MISSING_SECONDS

    def is_lost(self, now: float) -> bool:
        """Return whether its heartbeats have ceased although it has not ended."""
        return self.record.state != "ended" and now - self.seen > MISSING_SECONDS


class OtherFormatError(ValueError):
    """A stored record has another format than this version reads."""


def _require_version(document: Any) -> None:
    found = document.get("version", 1) if isinstance(document, dict) else RECORD_VERSION
    if found != RECORD_VERSION:
        raise OtherFormatError(f"format {found!r}, this sm-train reads {RECORD_VERSION}")


def segment_name(folder: str, number: int) -> str:
    """Return the name of a segment of the log of the node in ``folder``."""
    return f"{folder}/{number:06d}.log"


_Found = tuple[AgedFile, NodeRecord] | None


def _in_threads(read: Callable[[str], _Found], folders: Iterable[str]) -> Iterable[_Found]:
    with ThreadPoolExecutor(_READS) as pool:
        return list(pool.map(read, folders))


def read_nodes(
    storage: Storage,
    read_each: Callable[[Callable[[str], _Found], Iterable[str]], Iterable[_Found]] = _in_threads,
) -> list[StoredNode]:
    """Return the starts of all nodes, oldest first; ``storage`` is the stage's checkpoint folder.

    A record that cannot be parsed is left out. ``read_each`` reads the records, as ``map`` does.

    Raises:
        OSError: the storage cannot be read, or a record has another format.
    """
    names = sorted(storage.list_sizes(FOLDER))
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        if _FOLDER.fullmatch(folder) and (file == _NODE_FILE or _SEGMENT.fullmatch(file)):
            folders.setdefault(f"{FOLDER}/{folder}", []).append(file)
    read = read_each(lambda folder: _read_record(storage, folder), folders)
    found = {folder: pair for folder, pair in zip(folders, read, strict=True) if pair}
    offset = _reader_offset([stored for stored, _ in found.values()])
    nodes = [
        StoredNode(
            record,
            tuple(f"{folder}/{file}" for file in folders[folder] if file != _NODE_FILE),
            stored.modified + offset,
            record.seen - stored.modified,
        )
        for folder, (stored, record) in found.items()
    ]
    return _ordered(nodes)


def _ordered(nodes: list[StoredNode]) -> list[StoredNode]:
    """Return the starts, oldest first.

    Their order is that of the storage, because the clocks of nodes may differ. Where it contradicts
    that of a single node, the folder has been copied, and with it the times were lost.
    """
    ordered = sorted(nodes, key=lambda node: (node.started, node.record.node))
    newest: dict[str, float] = {}
    for node in ordered:
        if node.record.started < newest.get(node.record.node, -1.0):
            return sorted(nodes, key=lambda node: (node.record.started, node.record.node))
        newest[node.record.node] = node.record.started
    return ordered


def _reader_offset(files: Sequence[AgedFile]) -> float:
    """Return how many seconds this machine's clock is ahead of the storage's; 0 if they agree.

    One number for all files, so that their order is that of the storage.
    """
    if not files:
        return 0.0
    offset = median(file.read - file.modified - file.age for file in files)
    return 0.0 if abs(offset) <= _AGREE_SECONDS else offset


def _read_record(storage: Storage, folder: str) -> _Found:
    name = f"{folder}/{_NODE_FILE}"
    try:
        stored = storage.read_aged(name)
        return stored, NodeRecord.parse(stored.content)
    except OtherFormatError as error:
        raise OSError(
            f"{storage.address(name)}: {error}; delete {storage.address(FOLDER)}, then start the "
            "job again with a manifest of `sm-train manifest`"
        ) from None
    except (FileNotFoundError, ValueError):
        return None


def read_stop_request(storage: Storage) -> StopRequest | None:
    """Return the newest request to stop; None if there is none, or if it is damaged.

    Raises:
        OSError: the storage cannot be read, or the request has another format.
    """
    try:
        stored = storage.read_aged(STOP_FILE)
        document = json.loads(stored.content)
        _require_version(document)
        fields = checked_fields(document, {"by": text, "job_id": optional(text)})
        by, job_id = fields["by"], fields.get("job_id")
    except OtherFormatError as error:
        address = storage.address(STOP_FILE)
        raise OSError(f"{address}: {error}; delete it, then repeat `sm-train stop`") from None
    except (FileNotFoundError, KeyError, ValueError):
        return None
    return StopRequest(by, stored.modified + _reader_offset([stored]), job_id)


def store_stop_request(storage: Storage, by: str, job_id: str | None = None) -> None:
    """Store a request of ``by`` to stop the nodes that have started, over an earlier one.

    With ``job_id`` it also concerns that job when its platform starts it again.

    Raises:
        OSError: the storage cannot be written.
    """
    document = {"version": RECORD_VERSION, "by": by, "job_id": job_id}
    write_file(storage, STOP_FILE, json.dumps(document).encode())


def read_submitted(storage: Storage) -> Submitted | None:
    """Return the newest job that was handed to the platform; None if none is known.

    Raises:
        OSError: the storage cannot be read.
    """
    document = read_document(storage, SUBMITTED_FILE)
    if document is None or document.pop("version", None) != RECORD_VERSION:
        return None
    fields = {"platform": text, "commands": mapping_of(text), "time": timestamp}
    try:
        return Submitted(**checked_fields(document, fields))
    except (TypeError, ValueError):
        return None


def store_submitted(storage: Storage, run_file: bytes, submitted: Submitted) -> None:
    """Store a job that was handed to the platform, and its run file.

    Raises:
        OSError: the storage cannot be written.
    """
    document = {"version": RECORD_VERSION, **asdict(submitted)}
    write_file(storage, RUN_FILE, run_file)
    write_file(storage, SUBMITTED_FILE, json.dumps(document).encode())
