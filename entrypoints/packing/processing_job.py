"""Entry point of a SageMaker Processing job: packs this node's shards, then writes the index.

Processing copies its S3 inputs to the disk before it starts (it has no FastFile mode), so only the
plan, the code and the model for latents are inputs of the job. Images are read from S3 while they
are packed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from sm_train.entrypoints.common.index_location import INDEX_NAME
from sm_train.entrypoints.common.signals import raise_on_signals
from sm_train.entrypoints.packing.pack import PackPlan, build_shards, finalize, remove_state
from sm_train.entrypoints.packing.storage import S3Access, Storage, open_storage
from sm_train.entrypoints.packing.worker_pool import PackProgress, WorkerPlan

PLAN_FILE = "plan.jsonl.gz"

_LOG_SECONDS = 30.0
"""Interval between two progress messages."""


def main(arguments: list[str] | None = None) -> None:
    """Build this node's shards; the last node to finish writes the index."""
    parser = argparse.ArgumentParser(description="Build one node's shards of a pack.")
    parser.add_argument("--destination", default=os.environ.get("SM_TRAIN_DESTINATION"))
    parser.add_argument("--base", type=Path, default=Path("/opt/ml"))
    options = parser.parse_args(arguments)
    inputs = options.base / "processing" / "input"
    pack = PackPlan.from_bytes((inputs / "plan" / PLAN_FILE).read_bytes())
    if (inputs / "model").is_dir():
        pack = pack.with_model(inputs / "model")
    rank, num_nodes = read_topology(options.base)
    destination = open_storage(options.destination, S3Access())
    print(f"node {rank + 1} of {num_nodes}: {len(pack.plans[rank::num_nodes])} shards", flush=True)
    with raise_on_signals():
        work = WorkerPlan(destination, S3Access(), os.cpu_count() or 1)
        build_shards(pack, work, _ProgressLog(), node_rank=rank, num_nodes=num_nodes)
        print(_finalize(pack, destination), flush=True)


def read_topology(base: Path) -> tuple[int, int]:
    """Return this node's rank and the number of nodes from SageMaker's resource configuration."""
    path = base / "config" / "resourceconfig.json"
    if not path.exists():
        return 0, 1
    document = json.loads(path.read_text(encoding="utf-8"))
    hosts = sorted(document["hosts"])
    return hosts.index(document["current_host"]), len(hosts)


def _finalize(pack: PackPlan, destination: Storage) -> str:
    """Write the index if all nodes are finished; return a message for the log."""
    built = finalize(pack, destination)
    if built is None:
        # A node that writes the index removes all records.
        if destination.size(INDEX_NAME) is not None:
            return "another node has written the index"
        return "other nodes are still packing; the last one writes the index"
    remove_state(pack, destination)
    accepted = sum(record.shard.samples for record in built if record.shard)
    rejected = len(pack.rejected) + sum(len(record.rejected) for record in built)
    return f"{destination.address(INDEX_NAME)}: {accepted:,} samples, {rejected:,} rejected"


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
