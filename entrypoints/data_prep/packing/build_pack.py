"""Builds a pack from its plan to its index, on one node or several.

Nodes take leases for ranges of shards. They communicate only through the destination, where each
finished shard has a record. A node that finds all records writes the index, which is the same
whichever node writes it.
"""

from __future__ import annotations

import heapq
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import IO

from sm_train.entrypoints.data_prep.packing.deduplicate import (
    DROPPED_NAME,
    DUPLICATES_FOLDER,
    DroppedInputs,
    DuplicateSearch,
    digest_shards,
    forget_hashes,
)
from sm_train.entrypoints.data_prep.packing.plan import ShardPlan
from sm_train.entrypoints.data_prep.packing.shard_builder import (
    read_index,
    read_record,
    record_name,
)
from sm_train.entrypoints.data_prep.packing.shard_workers import (
    ShardTask,
    build_in_parallel,
    split_cores,
)
from sm_train.entrypoints.data_prep.packing.stored_plan import DIGESTS_FOLDER, PackPlan
from sm_train.entrypoints.data_prep.work.state_files import StateFiles
from sm_train.entrypoints.data_prep.work.work_stages import (
    ENDED_NAME,
    LEASES_FOLDER,
    PLAN_NAME,
    STATE_FOLDER,
    Part,
    SharedWork,
    Stage,
    split_parts,
)
from sm_train.entrypoints.data_prep.work.worker_pool import WorkerPlan, WorkProgress, run_tasks
from sm_train.entrypoints.job_interface.index_location import (
    INDEX_NAME,
    SHARDS_FOLDER,
    removal_list,
    replaced_index,
)
from sm_train.entrypoints.shards.removal_list import decode_list
from sm_train.entrypoints.shards.shard_index import IndexWriter, RejectedInput, ShardIndex
from sm_train.entrypoints.storage.storage import S3Prefix, Storage, write_file


def build_shards(
    pack: PackPlan,
    work: WorkerPlan,
    shared: SharedWork,
    on_progress: Callable[[WorkProgress], None],
) -> None:
    """Build the unfinished shards, together with the other nodes of ``shared``.

    Raises:
        OSError: the destination cannot be written, or the disk is full.
        WorkerKilledError: a worker process was killed.
        WorkEndedError: another node has written the index.
    """
    total = pack.images
    state = StateFiles(work.destination, (STATE_FOLDER, f"{pack.folder}/{DIGESTS_FOLDER}"))
    dropped: DroppedInputs | None = None
    with shared.renewed():
        if pack.plans[0].options.deduplicates:
            for progress in find_duplicates(pack.plans, work, shared, state, pack.packed):
                on_progress(replace(progress, total=total, label="1/2 hashing"))
            dropped = DroppedInputs((*pack.packed, *pack.plans), work.destination)
        stage = _building(pack.plans, work, shared, state, dropped)
        finished = total - sum(len(plan.inputs) for plan in stage.unfinished(stage.items))
        label = "packing" if dropped is None else "2/2 packing"
        for progress in shared.complete(stage):
            done = progress.done + finished
            on_progress(replace(progress, done=done, total=total, label=label))


def find_duplicates(
    plans: Sequence[ShardPlan],
    work: WorkerPlan,
    shared: SharedWork,
    state: StateFiles,
    packed: Sequence[ShardPlan] = (),
) -> Iterator[WorkProgress]:
    """Store the digests of all inputs, then the images to leave out.

    The inputs of ``packed`` have digests, and come first in order.
    """
    cores = split_cores(plans, work, max_processes=work.workers)
    yield from shared.complete(
        Stage(
            split_parts("digests", plans, shared.num_nodes),
            lambda items: [plan for plan in items if not state.has(plan.digests)],
            lambda items: digest_shards(items, work, cores),
        )
    )
    if state.has(DROPPED_NAME):
        return
    search = DuplicateSearch.of((*packed, *plans), work.destination, plans[0].options.near_bits)
    for names, task in (
        (search.part_names(), search.search_part),
        ([DROPPED_NAME], search.find_dropped),
    ):
        processes = search.processes(min(work.workers, len(names) or 1))
        for _ in shared.complete(
            Stage(
                [Part(name.rpartition("/")[2], [name]) for name in names],
                lambda items: [name for name in items if not state.has(name)],
                partial(run_tasks, task, processes=processes, decoders=1),
            )
        ):
            pass  # its progress does not count inputs
    forget_hashes()


def _building(
    plans: Sequence[ShardPlan],
    work: WorkerPlan,
    shared: SharedWork,
    state: StateFiles,
    dropped: DroppedInputs | None,
) -> Stage[ShardPlan]:
    """Return the last stage, which builds the shards."""
    built: set[str] = set()

    def unfinished(items: Iterable[ShardPlan]) -> list[ShardPlan]:
        missing = []
        for plan in items:
            if plan.name in built:
                continue
            if (
                state.has(record_name(plan.name))
                and read_record(plan.name, work.destination) is not None
            ):
                built.add(plan.name)
            else:
                missing.append(plan)
        return missing

    def run(items: Iterable[ShardPlan]) -> Generator[WorkProgress]:
        def tasks() -> Iterator[ShardTask]:
            for plan in items:
                _abort_uploads(plan, work.destination)
                yield plan, {} if dropped is None else dropped.of_shard(plan)

        return build_in_parallel(tasks(), work, plans)

    return Stage(split_parts("shards", plans, shared.num_nodes), unfinished, run)


def _abort_uploads(plan: ShardPlan, destination: Storage) -> None:
    """Abort the uploads of a shard by a killed process, whose parts S3 bills."""
    if isinstance(destination, S3Prefix):
        from botocore.exceptions import ClientError

        # Not every role may list them.
        with suppress(ClientError):
            destination.abort_uploads(SHARDS_FOLDER, names={plan.name})


@dataclass(frozen=True)
class PackTotals:
    """What a pack came to: its samples, and the number of rejected inputs for each reason."""

    samples: int
    rejected: Counter[str]

    @classmethod
    def of(cls, index: ShardIndex) -> PackTotals:
        """Return the totals of a finished pack."""
        return cls(index.header.samples, Counter(item.reason for item in index.rejected()))


def finalize(pack: PackPlan, destination: Storage) -> PackTotals | None:
    """Write the index if all shards are finished, and return its totals; otherwise return None.

    The present index, of a pack that is extended or of a streaming pack, comes first in it. No
    index is written if there are no samples. Memory holds the record of one shard.
    """
    while True:
        version = destination.version(INDEX_NAME)
        packed = None if version is None else read_index(destination, INDEX_NAME)
        if packed is None:
            _forget_removed_shards(destination)
        if packed is not None and pack.fingerprint in packed.header.fingerprints:
            return PackTotals.of(packed)  # another node was faster
        with tempfile.TemporaryFile() as index:
            totals = _write_index(pack, destination, packed, index)
            if totals is None or not totals.samples:
                return totals
            index.seek(0)
            # The function that packs images as they arrive may have written it meanwhile.
            if destination.replace_if(INDEX_NAME, index, version):
                return totals


def _forget_removed_shards(destination: Storage) -> None:
    """Keep the images that were removed from an earlier pack of this place, not their shards.

    The keys and the names of the new shards are those of other images.
    """
    name = removal_list(INDEX_NAME)
    try:
        removals = decode_list(destination.read(name), destination.address(name))
    except FileNotFoundError:
        return
    write_file(destination, name, removals.of_emptied_set().encode())
    destination.remove(replaced_index(INDEX_NAME))


def _write_index(
    pack: PackPlan, destination: Storage, packed: ShardIndex | None, index: IO[bytes]
) -> PackTotals | None:
    """Write ``packed``, the present index, and the shards of ``pack`` to ``index``.

    Return their totals; None if a shard is unfinished.
    """
    before = () if packed is None else packed.header.fingerprints
    inputs, *appended = *before, pack.fingerprint
    samples = 0
    reasons = Counter(item.reason for item in pack.rejected)
    with (
        tempfile.TemporaryFile("w+") as rejected,
        IndexWriter(
            index,
            target_bytes=pack.target_bytes,
            inputs=inputs,
            appended=appended,
            options=pack.index_options,
            columns=pack.index_columns,
        ) as writer,
    ):
        if packed is not None:
            for rows in packed.shard_rows():
                writer.add_rows(rows)
            samples = packed.header.samples
        for plan in pack.plans:
            record = read_record(plan.name, destination)
            if record is None:
                return None
            if record.shard is not None:
                writer.add(record.shard)
                samples += record.shard.samples
            for item in sorted(record.rejected, key=rejected_order):
                rejected.write(json.dumps(list(vars(item).values())) + "\n")
                reasons[item.reason] += 1
        rejected.seek(0)
        of_shards = (RejectedInput(*json.loads(line)) for line in rejected)
        of_packed = () if packed is None else _still_rejected(packed, pack)
        for item in merge_rejected(of_packed, pack.rejected, of_shards):
            writer.reject(item)
    return PackTotals(samples, reasons)


def _still_rejected(packed: ShardIndex, pack: PackPlan) -> Iterator[RejectedInput]:
    """Yield the rejected inputs of a finished pack that ``pack`` does not try again."""
    sources = {item.source for item in packed.rejected()}
    again = Counter[str]()
    for plan in pack.plans if sources else ():
        again.update(item.source for item in plan.inputs if item.source in sources)
    for item in packed.rejected():
        if again[item.source] > 0:
            again[item.source] -= 1
        else:
            yield item


def rejected_order(item: RejectedInput) -> tuple[str, str, str]:
    """Return what rejected inputs are sorted by in an index."""
    return item.source, item.reason, item.detail


def merge_rejected(*sorted_parts: Iterable[RejectedInput]) -> Iterator[RejectedInput]:
    """Merge rejected inputs that are sorted by source; those of one source may be in any order."""
    merged = heapq.merge(*sorted_parts, key=rejected_order)
    for _, items in groupby(merged, key=lambda item: item.source):
        yield from sorted(items, key=rejected_order)


def remove_state(pack: PackPlan, destination: Storage) -> None:
    """Remove what a pack is resumed from; the plan comes last, as it names the other files.

    Only the sign that the pack has ended stays longer, for nodes that look for these files.
    """
    for plan in pack.plans:
        destination.remove(record_name(plan.name))
    for folder in (DUPLICATES_FOLDER, LEASES_FOLDER):
        destination.remove_folder(folder)
    destination.remove(PLAN_NAME)
    destination.remove(ENDED_NAME)


def remove_plan(pack: PackPlan, destination: Storage) -> None:
    """Remove all that an unfinished pack stored besides its shards."""
    destination.remove_folder(pack.folder)
    remove_state(pack, destination)
