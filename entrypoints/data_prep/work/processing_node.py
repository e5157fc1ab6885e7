"""One node of a SageMaker Processing job: does its part of the work, then ends it or waits.

Processing copies its S3 inputs to the disk before it starts (it has no FastFile mode), so only the
code and a model are inputs of the job. The plan is read from the destination, and images from S3.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from sm_train.entrypoints.base.signals import raise_on_signals
from sm_train.entrypoints.data_prep.work.work_stages import (
    ENDED_NAME,
    LEASE_NAME,
    PLAN_NAME,
    POLL_SECONDS,
    SharedWork,
    WorkEndedError,
)
from sm_train.entrypoints.data_prep.work.worker_pool import WorkerPlan, WorkProgress
from sm_train.entrypoints.storage.storage import Storage, open_storage, write_file
from sm_train.entrypoints.storage.store import S3Access

_LOG_SECONDS = 30.0
"""Interval between two progress messages."""


class NodeWork(Protocol):
    """Work that is divided among the nodes of a job, as its plan describes it."""

    @property
    def parts(self) -> str:
        """What is divided, as ``12 shards``."""

    def build(
        self, work: WorkerPlan, shared: SharedWork, on_progress: Callable[[WorkProgress], None]
    ) -> None:
        """Complete all parts, together with the other nodes.

        Raises:
            WorkEndedError: another node has written the result.
        """

    def finalize(self) -> str | None:
        """Write the result; return a message for the log, None if a part is missing."""

    def remove_state(self) -> None:
        """Remove what the work is resumed from, the plan last."""


def run_node(
    read_work: Callable[[Storage, Path | None], NodeWork], arguments: list[str] | None = None
) -> None:
    """Do this node's part; the last node to finish writes the result.

    ``read_work`` reads the plan in the destination, with the folder of the job's model if it has
    one. It raises a FileNotFoundError without a plan.
    """
    parser = argparse.ArgumentParser(description="Do one node's part of a Processing job.")
    parser.add_argument("--destination", default=os.environ.get("SM_TRAIN_DESTINATION"))
    parser.add_argument("--base", type=Path, default=Path("/opt/ml"))
    options = parser.parse_args(arguments)
    model = options.base / "processing" / "input" / "model"
    destination = open_storage(options.destination, S3Access())
    try:
        node_work = read_work(destination, model if model.is_dir() else None)
    except FileNotFoundError:
        print("the other nodes have finished", flush=True)
        return
    rank, num_nodes = read_topology(options.base)
    print(f"node {rank + 1} of {num_nodes}, {node_work.parts}", flush=True)
    with raise_on_signals():
        work = WorkerPlan(destination, S3Access(), os.cpu_count() or 1)
        shared = SharedWork(destination, node_rank=rank, num_nodes=num_nodes, is_shared=True)
        with suppress(WorkEndedError):
            node_work.build(work, shared, _ProgressLog())
        try:
            print(_finalize(node_work, destination, shared), flush=True)
        except WorkEndedError:
            _remove_leftovers(node_work, destination)
            print("another node has written the result", flush=True)


def read_topology(base: Path) -> tuple[int, int]:
    """Return this node's rank and the number of nodes from SageMaker's resource configuration."""
    path = base / "config" / "resourceconfig.json"
    if not path.exists():
        return 0, 1
    document = json.loads(path.read_text(encoding="utf-8"))
    hosts = sorted(document["hosts"])
    return hosts.index(document["current_host"]), len(hosts)


def _finalize(node_work: NodeWork, destination: Storage, shared: SharedWork) -> str:
    """Write the result, or wait until another node has; return a message for the log.

    The node that has the lease of the result removes all other files. If it is lost before the plan
    is removed, which is the last file, another node continues.

    Raises:
        WorkEndedError: another node has done it.
    """
    with shared.renewed():
        while not shared.acquire("index"):
            _require_plan(destination)
            time.sleep(POLL_SECONDS)
        message = None
        if destination.size(ENDED_NAME) is None:
            message = node_work.finalize()
            _require_plan(destination)
            if message is None:
                raise RuntimeError("a finished part was removed; run the command again")
            write_file(destination, ENDED_NAME, b"")
        destination.remove(LEASE_NAME)
        node_work.remove_state()
    if message is None:
        raise WorkEndedError
    return message


def _require_plan(destination: Storage) -> None:
    if destination.size(PLAN_NAME) is None:
        raise WorkEndedError


def _remove_leftovers(node_work: NodeWork, destination: Storage) -> None:
    """Remove what this node stored after another one had removed the state of the work.

    It was paused meanwhile. Work that has begun since has a plan or a lease.
    """
    if destination.size(PLAN_NAME) is None and destination.size(LEASE_NAME) is None:
        node_work.remove_state()


class _ProgressLog:
    """Prints the progress periodically."""

    def __init__(self) -> None:
        self._started = self._last_logged = time.monotonic()

    def __call__(self, progress: WorkProgress) -> None:
        now = time.monotonic()
        if now - self._last_logged < _LOG_SECONDS:
            return
        self._last_logged = now
        rate = progress.done / (now - self._started)
        print(
            f"{progress.done:,} of {progress.total:,} {progress.unit}, "
            f"{rate:,.{0 if rate >= 10 else 2}f} {progress.unit}/s, "
            f"{progress.rejected:,} rejected",
            flush=True,
        )
