"""What a node of Kubernetes or Slurm stores about its job, next to the stage's checkpoints.

SageMaker keeps the status and the log of a job; other platforms forget both with the pod. So the
first process of each node stores, below ``job-records`` in the stage's checkpoint folder:

    run.json                    the run file, as the job's processes read it
    stop.json                   a request to stop (``sm-train stop``, a budget)
    alerts.json                 the alerts that a watcher has sent
    algo-1-1700000000/          a node, and when its first process started
        node.json               a :class:`NodeRecord`, stored again every 30 seconds
        000000.log, 000001.log  what the node printed, in segments
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sm_train.entrypoints.job_records.stored_fields import (
    checked_fields,
    integer,
    mapping_of,
    one_of,
    optional,
    positive,
    text,
    timestamp,
)
from sm_train.entrypoints.shared_work.storage import Storage, write_file

FOLDER = "job-records"
"""Folder in a stage's checkpoint folder."""

RUN_FILE, STOP_FILE = f"{FOLDER}/run.json", f"{FOLDER}/stop.json"
_NODE_FILE = "node.json"

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
    """One start of a node. Times are in Unix seconds by the node's clock.

    ``node`` is algo-1, algo-2, …, or the host's name where the operator assigns ranks later.
    ``machine`` is the name by which an administrator knows it. ``seen`` is the time of the newest
    heartbeat. ``exit_code`` is None until it has ended; ``stopped_by`` says who asked for that.
    ``commands`` are the platform's, by their purpose.
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
    state: NodeState = "preparing"
    exit_code: int | None = None
    stopped_by: str | None = None
    commands: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Its folder in the stage's checkpoint folder."""
        return f"{FOLDER}/{self.node}-{int(self.started)}"

    @property
    def file(self) -> str:
        """The file with this record, in the stage's checkpoint folder."""
        return f"{self.folder}/{_NODE_FILE}"

    @property
    def label(self) -> str:
        """The node with its machine, as in ``algo-2 (gpu-07)``."""
        return f"{self.node} ({self.machine})" if self.machine else self.node

    @property
    def seconds(self) -> float:
        """How long it has run, as far as its heartbeats show."""
        return max(0.0, self.seen - self.started)

    def is_live(self, now: float) -> bool:
        """Return whether it has not ended, and has sent a heartbeat lately."""
        return self.state != "ended" and now - self.seen <= MISSING_SECONDS

    def is_lost(self, now: float) -> bool:
        """Return whether its heartbeats have ceased although it has not ended."""
        return self.state != "ended" and now - self.seen > MISSING_SECONDS

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, content: bytes) -> NodeRecord:
        """Parse a stored record; keys of a later version are ignored.

        Raises:
            ValueError: it is not a record.
        """
        try:
            return cls(**checked_fields(json.loads(content), _NODE_FIELDS))
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
    "state": one_of("preparing", "training", "ended"),
    "exit_code": optional(integer),
    "stopped_by": optional(text),
    "commands": mapping_of(text),
}


@dataclass(frozen=True)
class StopRequest:
    """A request to stop all nodes that had started by ``requested``, Unix seconds."""

    requested: float
    by: str

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class StoredNode:
    """A node's record, and the names of its log's segments in order."""

    record: NodeRecord
    segments: tuple[str, ...]


def segment_name(folder: str, number: int) -> str:
    """Return the name of a segment of the log of the node in ``folder``."""
    return f"{folder}/{number:06d}.log"


def read_nodes(storage: Storage) -> list[StoredNode]:
    """Return the starts of all nodes, oldest first; ``storage`` is the stage's checkpoint folder.

    A record that cannot be parsed is left out.

    Raises:
        OSError: the storage cannot be read.
    """
    names = sorted(storage.list_sizes(FOLDER))
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        if _FOLDER.fullmatch(folder) and (file == _NODE_FILE or _SEGMENT.fullmatch(file)):
            folders.setdefault(f"{FOLDER}/{folder}", []).append(file)
    with ThreadPoolExecutor(_READS) as pool:
        records = pool.map(lambda folder: _read_record(storage, folder), folders)
        nodes = [
            StoredNode(
                record, tuple(f"{folder}/{file}" for file in folders[folder] if file != _NODE_FILE)
            )
            for folder, record in zip(folders, records, strict=True)
            if record is not None
        ]
    return sorted(nodes, key=lambda node: (node.record.started, node.record.node))


def _read_record(storage: Storage, folder: str) -> NodeRecord | None:
    try:
        return NodeRecord.parse(storage.read(f"{folder}/{_NODE_FILE}"))
    except (FileNotFoundError, ValueError):
        return None


def read_stop_request(storage: Storage) -> StopRequest | None:
    """Return the newest request to stop; None if there is none, or if it is damaged.

    Raises:
        OSError: the storage cannot be read.
    """
    document = read_document(storage, STOP_FILE)
    try:
        return StopRequest(**checked_fields(document, {"requested": timestamp, "by": text}))
    except (TypeError, ValueError):
        return None


def store_stop_request(storage: Storage, request: StopRequest) -> None:
    """Store a request to stop, over an earlier one.

    Raises:
        OSError: the storage cannot be written.
    """
    write_file(storage, STOP_FILE, request.to_json())


def read_document(storage: Storage, name: str) -> dict[str, Any] | None:
    """Return a stored JSON object; None if there is none, or if it is damaged.

    Raises:
        OSError: the storage cannot be read.
    """
    try:
        document = json.loads(storage.read(name))
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None
