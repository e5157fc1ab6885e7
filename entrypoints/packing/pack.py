"""A pack from its plan to its index, by one machine or by several.

Each machine makes its own shards of the plan, dealt out by its rank. Nothing passes between them
but what lies in the destination: a record for each finished shard. Whoever finds all records there
writes the index, which is the same whoever does.
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
from sm_train.entrypoints.packing.shard_builder import WORK, BuiltShard, read_record, record_name
from sm_train.entrypoints.packing.storage import PART_BYTES, S3Prefix, Storage
from sm_train.entrypoints.packing.worker_pool import PackProgress, WorkerPlan, run_workers

PLAN_NAME = f"{WORK}/plan.json"

_WAIT = 5.0  # seconds between two looks for what other machines have to finish

ProgressReport = Callable[[PackProgress], None]


@dataclass(frozen=True)
class PackPlan:
    """All that a machine needs to know: the shards, and what the index says besides.

    ``fingerprint`` is of the inputs, ``rejected`` what was left out before any image was read.
    """

    plans: tuple[ShardPlan, ...]
    rejected: tuple[RejectedInput, ...]
    fingerprint: str
    target_bytes: int
    index_options: dict[str, Any]

    def with_model(self, folder: Path) -> PackPlan:
        """The same pack where the model for latents lies in ``folder``."""
        options = replace(self.plans[0].options, latents=str(folder))
        return replace(self, plans=tuple(replace(one, options=options) for one in self.plans))

    def to_bytes(self) -> bytes:
        """As a document for other machines: JSON lines, compressed; the same for the same pack."""
        head = {
            "fingerprint": self.fingerprint,
            "target_bytes": self.target_bytes,
            "index_options": self.index_options,
            "options": asdict(self.plans[0].options),
            "rejected": [asdict(one) for one in self.rejected],
            "shards": [len(plan.inputs) for plan in self.plans],
        }
        lines = [json.dumps(head)]
        lines += [
            json.dumps(list(vars(item).values())) for plan in self.plans for item in plan.inputs
        ]
        return gzip.compress("\n".join(lines).encode(), mtime=0)

    @classmethod
    def from_bytes(cls, content: bytes) -> PackPlan:
        head, *lines = gzip.decompress(content).decode().split("\n")
        document: dict[str, Any] = json.loads(head)
        inputs = [PackInput(*json.loads(line)) for line in lines]
        options = PackOptions(**document["options"])
        plans, first = [], 0
        for number, count in enumerate(document["shards"]):
            plan = ShardPlan(number, shard_name(number), inputs[first : first + count], options)
            plans.append(plan)
            first += count
        return cls(
            tuple(plans),
            tuple(RejectedInput(**one) for one in document["rejected"]),
            document["fingerprint"],
            document["target_bytes"],
            document["index_options"],
        )


def make_shards(
    pack: PackPlan,
    work: WorkerPlan,
    on_progress: ProgressReport,
    *,
    rank: int = 0,
    machines: int = 1,
) -> None:
    """Make the shards of machine ``rank`` that are not there yet.

    Raises:
        OSError: the destination cannot be written, or the disk is full.
        WorkerKilledError: a process was killed.
    """
    own = pack.plans[rank::machines]
    total = sum(len(plan.inputs) for plan in own)
    dropped: Mapping[int, RejectedInput] = {}
    if pack.plans[0].options.compares:
        digest_shards(own, work, on_progress)
        # An image may be a duplicate of one that another machine looks at.
        _wait_for_digests(pack.plans, work.destination)
        dropped = find_duplicates(pack.plans, work.destination)
    missing = [plan for plan in own if read_record(plan, work.destination) is None]
    if isinstance(work.destination, S3Prefix):
        from botocore.exceptions import ClientError

        # What a killed pack has left; not everybody may look for it.
        with suppress(ClientError):
            names = {plan.name for plan in missing}
            work.destination.abort_uploads(SHARDS_FOLDER, names=names)
    begun = total - sum(len(plan.inputs) for plan in missing)
    for tally in run_workers(missing, work, dropped):
        on_progress(replace(tally, done=tally.done + begun, total=total))


def _wait_for_digests(plans: Sequence[ShardPlan], destination: Storage) -> None:
    missing = list(plans)
    while missing := [one for one in missing if destination.size(digests_name(one)) is None]:
        time.sleep(_WAIT)


def finish(pack: PackPlan, destination: Storage) -> list[BuiltShard] | None:
    """Write the index if all shards are there; returns what was made of them.

    None where some are not. Where nothing at all was accepted there is no index to write.
    """
    made = []
    for plan in pack.plans:
        record = read_record(plan, destination)
        if record is None:
            return None
        made.append(record)
    if any(one.shard for one in made):
        _write_index(pack, destination, made)
    return made


def forget(pack: PackPlan, destination: Storage) -> None:
    """Remove what an unfinished pack is resumed by, the plan last: it tells of the rest."""
    for plan in pack.plans:
        destination.remove(record_name(plan))
        if plan.options.compares:
            destination.remove(digests_name(plan))
    destination.remove(PLAN_NAME)


def rejections(pack: PackPlan, made: Sequence[BuiltShard]) -> Iterator[RejectedInput]:
    """Everything that was left out."""
    yield from pack.rejected
    for one in made:
        yield from one.rejected


def _write_index(pack: PackPlan, destination: Storage, made: Sequence[BuiltShard]) -> None:
    ordered = sorted(
        rejections(pack, made), key=lambda item: (item.source, item.reason, item.detail)
    )
    with tempfile.TemporaryFile() as file:
        with IndexWriter(
            file,
            target_bytes=pack.target_bytes,
            inputs=pack.fingerprint,
            options=pack.index_options,
        ) as writer:
            for one in made:
                if one.shard is not None:
                    writer.add(one.shard)
            for item in ordered:
                writer.reject(item)
        file.seek(0)
        with destination.atomic_writer(INDEX_NAME) as sink:
            while content := file.read(PART_BYTES):
                sink.write(content)
