"""Keeps two jobs of one stage from training at once, where the platform numbers its jobs.

A requeued job has the number that it had before; one that somebody submits again has another.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sm_train.entrypoints.clusters.node_record import (
    MISSING_SECONDS,
    NodeRecord,
    StopRequest,
    StoredNode,
    read_nodes,
    read_stop_request,
)
from sm_train.entrypoints.clusters.prepare import PreparationError
from sm_train.entrypoints.job_interface.node_description import NOT_SAVED
from sm_train.entrypoints.storage.storage import Storage

_LIMIT_SECONDS = 2 * MISSING_SECONDS
_POLL_SECONDS = 15.0


def stop_of_queued_job(storage: Storage, record: NodeRecord) -> StopRequest | None:
    """Return the request that stopped this job while it waited in a queue; None if none did.

    Raises:
        OSError: the storage cannot be read.
    """
    request = read_stop_request(storage)
    if request is None or request.job_id is None or request.job_id != record.job_id:
        return None
    return request


def has_lost_its_save(storage: Storage, record: NodeRecord) -> bool:
    """Return whether this job could not save its last checkpoint before it was started again.

    Not every platform lets a job end by its exit code.

    Raises:
        OSError: the storage cannot be read.
    """
    return record.job_id is not None and any(
        node.record.job_id == record.job_id and node.record.exit_code == NOT_SAVED
        for node in read_nodes(storage)
    )


def wait_for_other_jobs(
    storage: Storage,
    record: NodeRecord,
    log: Callable[[str], None],
    *,
    limit: float = _LIMIT_SECONDS,
    poll: float = _POLL_SECONDS,
) -> None:
    """Wait until no earlier job of the stage is live: two would write to the same checkpoints.

    Nodes that were killed seem live until their heartbeats are old.

    Raises:
        OSError: the storage cannot be read.
        PreparationError: another job trains the stage.
    """
    if record.job_id is None:
        return
    deadline = time.monotonic() + limit
    while others := _earlier_jobs(read_nodes(storage), record, time.time()):
        if time.monotonic() > deadline:
            raise PreparationError(
                f"job {others[0]} trains this stage: wait for its end, or end it"
            )
        log(f"job {others[0]} seems to train this stage: waiting for its end")
        time.sleep(poll)


def _earlier_jobs(nodes: list[StoredNode], record: NodeRecord, now: float) -> list[str]:
    """Return the numbers of other jobs with live nodes that started before this start."""
    own = [node.started for node in nodes if node.record.folder == record.folder]
    found = {
        node.record.job_id
        for node in nodes
        if node.record.job_id != record.job_id
        and node.is_live(now)
        and node.started < min(own, default=now)
    }
    return sorted(str(number) for number in found if number is not None)
