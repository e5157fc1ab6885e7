"""Entry point of a SageMaker Processing job: packs this node's shards, then writes the index.

Processing copies its S3 inputs to the disk before it starts (it has no FastFile mode), so only the
code and the model for latents are inputs of the job. The plan is read from the destination, and
images from S3, while they are packed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from sm_train.entrypoints.common.index_location import INDEX_NAME
from sm_train.entrypoints.common.signals import raise_on_signals
from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.packing.build_pack import build_shards, finalize, remove_state
from sm_train.entrypoints.packing.shared_work import (
    ENDED_NAME,
    LEASE_NAME,
    PLAN_NAME,
    POLL_SECONDS,
    PackEndedError,
    SharedWork,
)
from sm_train.entrypoints.packing.storage import Storage, open_storage, write_file
from sm_train.entrypoints.packing.stored_plan import PackPlan, read_plan
from sm_train.entrypoints.packing.worker_pool import PackProgress, WorkerPlan

_LOG_SECONDS = 30.0
"""Interval between two progress messages."""


def main(arguments: list[str] | None = None) -> None:
    """Build this node's shards; the last node to finish writes the index."""
    parser = argparse.ArgumentParser(description="Build one node's shards of a pack.")
    parser.add_argument("--destination", default=os.environ.get("SM_TRAIN_DESTINATION"))
    parser.add_argument("--base", type=Path, default=Path("/opt/ml"))
    options = parser.parse_args(arguments)
    inputs = options.base / "processing" / "input"
    destination = open_storage(options.destination, S3Access())
    try:
        pack = read_plan(destination, S3Access())
    except FileNotFoundError:
        print("the other nodes have finished the pack", flush=True)
        return
    if (inputs / "model").is_dir():
        pack = pack.with_model(inputs / "model")
    rank, num_nodes = read_topology(options.base)
    print(f"node {rank + 1} of {num_nodes}, {len(pack.plans)} shards", flush=True)
    with raise_on_signals():
        work = WorkerPlan(destination, S3Access(), os.cpu_count() or 1)
        shared = SharedWork(destination, node_rank=rank, num_nodes=num_nodes, is_shared=True)
        with suppress(PackEndedError):
            build_shards(pack, work, shared, _ProgressLog())
        try:
            print(_finalize(pack, destination, shared), flush=True)
        except PackEndedError:
            _remove_leftovers(pack, destination)
            print("another node has written the index", flush=True)


def read_topology(base: Path) -> tuple[int, int]:
    """Return this node's rank and the number of nodes from SageMaker's resource configuration."""
    path = base / "config" / "resourceconfig.json"
    if not path.exists():
        return 0, 1
    document = json.loads(path.read_text(encoding="utf-8"))
    hosts = sorted(document["hosts"])
    return hosts.index(document["current_host"]), len(hosts)


def _finalize(pack: PackPlan, destination: Storage, shared: SharedWork) -> str:
    """Write the index, or wait until another node has; return a message for the log.

    The node that has the lease of the index removes all other files. If it is lost before the plan
    is removed, which is the last file, another node continues.

    Raises:
        PackEndedError: another node has done it.
    """
    with shared.renewed():
        while not shared.acquire("index"):
            _require_plan(destination)
            time.sleep(POLL_SECONDS)
        totals = None
        if destination.size(ENDED_NAME) is None:
            totals = finalize(pack, destination)
            _require_plan(destination)
            if totals is None:
                raise RuntimeError("a finished shard was removed; pack again")
            write_file(destination, ENDED_NAME, b"")
        destination.remove(LEASE_NAME)
        remove_state(pack, destination)
    if totals is None:
        raise PackEndedError
    address, rejected = destination.address(INDEX_NAME), totals.rejected.total()
    return f"{address}: {totals.samples:,} samples, {rejected:,} rejected"


def _require_plan(destination: Storage) -> None:
    if destination.size(PLAN_NAME) is None:
        raise PackEndedError


def _remove_leftovers(pack: PackPlan, destination: Storage) -> None:
    """Remove what this node stored after another one had removed the state of the pack.

    It was paused meanwhile. A pack that has begun since has a plan or a lease.
    """
    if destination.size(PLAN_NAME) is None and destination.size(LEASE_NAME) is None:
        remove_state(pack, destination)


class _ProgressLog:
    """Prints the progress periodically."""

    def __init__(self) -> None:
        self._started = self._last_logged = time.monotonic()

    def __call__(self, progress: PackProgress) -> None:
        now = time.monotonic()
        if now - self._last_logged < _LOG_SECONDS:
            return
        self._last_logged = now
        rate = progress.done / (now - self._started)
        print(
            f"{progress.done:,} of {progress.total:,} images, {rate:,.0f} images/s, "
            f"{progress.rejected:,} rejected",
            flush=True,
        )


if __name__ == "__main__":
    main()
