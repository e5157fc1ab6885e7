"""Builds a pack from its plan to its index, on one node or several.

Each node builds the shards that its rank assigns to it. Nodes communicate only through the
destination, where each finished shard has a record. A node that finds all records writes the index,
which is the same whichever node writes it.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common.index_location import INDEX_NAME, SHARDS_FOLDER
from sm_train.entrypoints.data.shard_index import IndexWriter, RejectedInput
from sm_train.entrypoints.packing.deduplicate import digest_shards, digests_name, find_duplicates
from sm_train.entrypoints.packing.plan import PackInput, PackOptions, ShardPlan, shard_name
from sm_train.entrypoints.packing.shard_builder import (
    PACK_STATE,
    BuiltShard,
    read_record,
    record_name,
)
from sm_train.entrypoints.packing.storage import PART_BYTES, S3Prefix, Storage
from sm_train.entrypoints.packing.worker_pool import PackProgress, WorkerPlan, build_in_parallel

PLAN_NAME = f"{PACK_STATE}/plan.json"

_POLL_SECONDS = 5.0
"""Interval between two checks whether the other nodes have stored their digests."""


@dataclass(frozen=True)
class PackPlan:
    """Everything a node needs: the shards to build, and what else the index records.

    ``fingerprint`` is a digest of the inputs. ``rejected`` are inputs that were rejected before any
    image was read.
    """

    plans: tuple[ShardPlan, ...]
    rejected: tuple[RejectedInput, ...]
    fingerprint: str
    target_bytes: int
    index_options: dict[str, Any]

    def with_model(self, folder: Path) -> PackPlan:
        """Return the same plan with the model for latents in ``folder``."""
        options = replace(self.plans[0].options, latents=str(folder))
        return replace(self, plans=tuple(replace(plan, options=options) for plan in self.plans))

    def to_bytes(self) -> bytes:
        """Serialize the plan as compressed JSON lines. Equal plans give equal bytes."""
        header = {
            "fingerprint": self.fingerprint,
            "target_bytes": self.target_bytes,
            "index_options": self.index_options,
            "options": asdict(self.plans[0].options),
            "rejected": [asdict(item) for item in self.rejected],
            "shards": [len(plan.inputs) for plan in self.plans],
        }
        lines = [json.dumps(header)]
        lines += [
            json.dumps(list(vars(item).values())) for plan in self.plans for item in plan.inputs
        ]
        return gzip.compress("\n".join(lines).encode(), mtime=0)

    @classmethod
    def from_bytes(cls, content: bytes) -> PackPlan:
        """Deserialize what :meth:`to_bytes` returned."""
        header, *lines = gzip.decompress(content).decode().split("\n")
        document: dict[str, Any] = json.loads(header)
        inputs = [PackInput(*json.loads(line)) for line in lines]
        options = PackOptions(**document["options"])
        plans, first = [], 0
        for number, count in enumerate(document["shards"]):
            plan = ShardPlan(number, shard_name(number), inputs[first : first + count], options)
            plans.append(plan)
            first += count
        return cls(
            tuple(plans),
            tuple(RejectedInput(**item) for item in document["rejected"]),
            document["fingerprint"],
            document["target_bytes"],
            document["index_options"],
        )


def build_shards(
    pack: PackPlan,
    work: WorkerPlan,
    on_progress: Callable[[PackProgress], None],
    *,
    node_rank: int = 0,
    num_nodes: int = 1,
) -> None:
    """Build the unfinished shards of node ``node_rank``.

    Raises:
        OSError: the destination cannot be written, or the disk is full.
        WorkerKilledError: a worker process was killed.
    """
    assigned = pack.plans[node_rank::num_nodes]
    total = sum(len(plan.inputs) for plan in assigned)
    dropped: Mapping[int, RejectedInput] = {}
    if pack.plans[0].options.deduplicates:
        digest_shards(assigned, work, on_progress)
        # An image may duplicate one that is assigned to another node.
        _wait_for_digests(pack.plans, work.destination)
        dropped = find_duplicates(pack.plans, work.destination)
    missing = [plan for plan in assigned if read_record(plan, work.destination) is None]
    if isinstance(work.destination, S3Prefix):
        from botocore.exceptions import ClientError

        # Abort the uploads of a killed pack. Not every role may list them.
        with suppress(ClientError):
            names = {plan.name for plan in missing}
            work.destination.abort_uploads(SHARDS_FOLDER, names=names)
    already_done = total - sum(len(plan.inputs) for plan in missing)
    label = "2/2 packing" if pack.plans[0].options.deduplicates else "packing"
    for progress in build_in_parallel(missing, work, dropped):
        on_progress(replace(progress, done=progress.done + already_done, total=total, label=label))


def _wait_for_digests(plans: Sequence[ShardPlan], destination: Storage) -> None:
    missing = list(plans)
    while missing := [plan for plan in missing if destination.size(digests_name(plan)) is None]:
        time.sleep(_POLL_SECONDS)


def finalize(pack: PackPlan, destination: Storage) -> list[BuiltShard] | None:
    """Write the index if all shards are finished, and return them; otherwise return None.

    No index is written if every input was rejected.
    """
    built = []
    for plan in pack.plans:
        record = read_record(plan, destination)
        if record is None:
            return None
        built.append(record)
    if any(record.shard for record in built):
        _write_index(pack, destination, built)
    return built


def remove_state(pack: PackPlan, destination: Storage) -> None:
    """Remove what a pack is resumed from; the plan comes last, as it names the other files."""
    for plan in pack.plans:
        destination.remove(record_name(plan))
        if plan.options.deduplicates:
            destination.remove(digests_name(plan))
    destination.remove(PLAN_NAME)


def all_rejected(pack: PackPlan, built: Sequence[BuiltShard]) -> Iterator[RejectedInput]:
    """Yield all rejected inputs: those of the plan, then those of each shard."""
    yield from pack.rejected
    for record in built:
        yield from record.rejected


def _write_index(pack: PackPlan, destination: Storage, built: Sequence[BuiltShard]) -> None:
    rejected = sorted(
        all_rejected(pack, built), key=lambda item: (item.source, item.reason, item.detail)
    )
    with tempfile.TemporaryFile() as file:
        with IndexWriter(
            file,
            target_bytes=pack.target_bytes,
            inputs=pack.fingerprint,
            options=pack.index_options,
        ) as writer:
            for record in built:
                if record.shard is not None:
                    writer.add(record.shard)
            for item in rejected:
                writer.reject(item)
        file.seek(0)
        with destination.atomic_writer(INDEX_NAME) as sink:
            while content := file.read(PART_BYTES):
                sink.write(content)
