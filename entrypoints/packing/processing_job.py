"""The main function of a SageMaker Processing job that packs: one machine's shards, then the index.

Processing copies its S3 inputs to the disk before it starts (it knows no FastFile), so only the
plan, the code and the model for latents come that way. Images are read from S3 as they are packed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from sm_train.entrypoints.common.index_location import INDEX_NAME
from sm_train.entrypoints.common.signals import raise_on_signals
from sm_train.entrypoints.packing.pack import PackPlan, finish, forget, make_shards
from sm_train.entrypoints.packing.storage import S3Access, Storage, open_storage
from sm_train.entrypoints.packing.worker_pool import PackProgress, WorkerPlan

PLAN_FILE = "plan.jsonl.gz"

_SAY = 30.0  # seconds between two lines of progress


def main(arguments: list[str] | None = None) -> None:
    """Make this machine's shards; the last one to finish writes the index."""
    parser = argparse.ArgumentParser(description="Pack one machine's part of a plan.")
    parser.add_argument("--destination", default=os.environ.get("SM_TRAIN_DESTINATION"))
    parser.add_argument("--base", type=Path, default=Path("/opt/ml"))
    options = parser.parse_args(arguments)
    inputs = options.base / "processing" / "input"
    pack = PackPlan.from_bytes((inputs / "plan" / PLAN_FILE).read_bytes())
    if (inputs / "model").is_dir():
        pack = pack.with_model(inputs / "model")
    rank, machines = machine(options.base)
    destination = open_storage(options.destination, S3Access())
    print(f"machine {rank + 1} of {machines}: {len(pack.plans[rank::machines])} shards", flush=True)
    with raise_on_signals():
        work = WorkerPlan(destination, S3Access(), os.cpu_count() or 1)
        make_shards(pack, work, _Printer(), rank=rank, machines=machines)
        print(_finish(pack, destination), flush=True)


def machine(base: Path) -> tuple[int, int]:
    """This machine's rank and the number of machines, as the platform's file names them."""
    path = base / "config" / "resourceconfig.json"
    if not path.exists():
        return 0, 1
    document = json.loads(path.read_text(encoding="utf-8"))
    hosts = sorted(document["hosts"])
    return hosts.index(document["current_host"]), len(hosts)


def _finish(pack: PackPlan, destination: Storage) -> str:
    made = finish(pack, destination)
    if made is None:
        # Records of finished packs are removed: then another machine was here before.
        done = destination.size(INDEX_NAME) is not None
        return "the index is there" if done else "others are not finished: they write the index"
    forget(pack, destination)
    accepted = sum(one.shard.samples for one in made if one.shard)
    rejected = len(pack.rejected) + sum(len(one.rejected) for one in made)
    return f"{destination.address(INDEX_NAME)}: {accepted:,} samples, {rejected:,} rejected"


class _Printer:
    """Says now and then how far packing is: a log has no progress bar."""

    def __init__(self) -> None:
        self._started = self._said = time.monotonic()

    def __call__(self, tally: PackProgress) -> None:
        now = time.monotonic()
        if now - self._said < _SAY:
            return
        self._said = now
        rate = tally.done / (now - self._started)
        print(
            f"{tally.done:,} of {tally.total:,} images, {rate:,.0f} images/s, "
            f"{tally.rejected:,} rejected",
            flush=True,
        )


if __name__ == "__main__":
    main()
