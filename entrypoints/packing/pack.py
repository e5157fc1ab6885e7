"""Builds a pack from its plan to its index, on one node or several.

Nodes claim ranges of shards. They communicate only through the destination, where each finished
shard has a record. A node that finds all records writes the index, which is the same whichever node
writes it.
"""

from __future__ import annotations

import heapq
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from sm_train.entrypoints.common.index_location import INDEX_NAME, SHARDS_FOLDER
from sm_train.entrypoints.data.shard_index import IndexWriter, RejectedInput
from sm_train.entrypoints.packing.deduplicate import (
    DROPPED_NAME,
    DUPLICATES_FOLDER,
    DroppedInputs,
    DuplicateSearch,
    digest_shards,
    digests_name,
    forget_hashes,
)
from sm_train.entrypoints.packing.plan import PackOptions, ShardPlan, shard_name
from sm_train.entrypoints.packing.plan_files import (
    HEADER_FILE,
    INPUTS,
    REJECTED,
    PlanFiles,
    PlannedInputs,
    PlannedRejections,
    partition_names,
)
from sm_train.entrypoints.packing.shard_builder import (
    PACK_STATE,
    read_record,
    record_name,
)
from sm_train.entrypoints.packing.storage import PART_BYTES, S3Access, S3Prefix, Storage
from sm_train.entrypoints.packing.work_claims import (
    CLAIMS_FOLDER,
    ENDED_NAME,
    PLAN_NAME,
    Part,
    SharedWork,
    Stage,
)
from sm_train.entrypoints.packing.worker_pool import (
    PackProgress,
    ShardTask,
    WorkerPlan,
    build_in_parallel,
    run_tasks,
    split_cores,
)

INPUTS_FOLDER = "inputs"
"""Folder in the destination with the plan of each pack, in a folder of its own."""

_COPIES = 8
"""Files of a plan that are copied at the same time."""

_PARTS_PER_NODE = 8
"""Parts of the shards for each node: the last ones to finish are small."""

_MAX_PART_SHARDS = 64

_LIST_SECONDS = 1.0
"""Age of a listing of S3 at which it is renewed."""


@dataclass(frozen=True)
class PackPlan:
    """Everything a node needs: the shards to build, and what else the index records.

    The inputs are in files, so its size does not depend on their number. ``fingerprint`` is a
    digest of the inputs, ``image_bytes`` the size of all images, and ``root`` what precedes a
    source in its address. ``rejected`` are inputs that were rejected before any image was read.
    """

    plans: tuple[ShardPlan, ...]
    rejected: PlannedRejections
    fingerprint: str
    target_bytes: int
    index_options: dict[str, Any]
    image_bytes: int
    root: str

    @property
    def images(self) -> int:
        """The number of inputs."""
        return sum(len(plan.inputs) for plan in self.plans)

    @property
    def folder(self) -> str:
        """The folder of its files in the destination."""
        return _inputs_folder(self.fingerprint)

    @property
    def partitions(self) -> list[str]:
        """The names of the files with its inputs."""
        return partition_names(INPUTS, self.images) + partition_names(REJECTED, len(self.rejected))

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the pack: an unfinished one with the same identity is resumed."""
        return {
            "inputs": self.fingerprint,
            "shard_bytes": self.target_bytes,
            "options": self.index_options,
        }

    def with_model(self, folder: Path) -> PackPlan:
        """Return the same plan with the model for latents in ``folder``."""
        options = replace(self.plans[0].options, latents=str(folder))
        return replace(self, plans=tuple(replace(plan, options=options) for plan in self.plans))


def make_plan(
    shards: Sequence[int],
    files: PlanFiles,
    root: str,
    options: PackOptions,
) -> tuple[ShardPlan, ...]:
    """Return the shards with these numbers of inputs; all inputs are in ``files``."""
    plans, first = [], 0
    for number, count in enumerate(shards):
        inputs = PlannedInputs(files, root, first, count)
        plans.append(ShardPlan(number, shard_name(number), inputs, options, first))
        first += count
    return tuple(plans)


def store_plan(
    pack: PackPlan, folder: Path, destination: Storage, access: S3Access, started_ns: int
) -> tuple[PackPlan, int]:
    """Store a plan, whose files are in ``folder``, in the destination, unless it is there.

    Return the plan as it is read there, and when the pack was started, Unix nanoseconds.
    """
    started_ns = read_start(destination, started_ns)
    document = pack.identity | {
        "started_ns": started_ns,
        "root": pack.root,
        "pack_options": asdict(pack.plans[0].options),
    }
    _write(destination, PLAN_NAME, json.dumps(document).encode())
    header = f"{pack.folder}/{HEADER_FILE}"
    if destination.size(header) is None:

        def copy(name: str) -> None:
            _write(destination, f"{pack.folder}/{name}", (folder / name).read_bytes())

        with ThreadPoolExecutor(_COPIES) as pool:
            for _ in pool.map(copy, pack.partitions):
                pass
        # The header is the last file: with a header, the inputs are complete.
        _write(destination, header, _header(pack))
    return read_plan(destination, access), started_ns


def read_start(destination: Storage, default_ns: int) -> int:
    """Return when the unfinished pack in the destination was started, Unix nanoseconds."""
    try:
        started_ns: int = json.loads(destination.read(PLAN_NAME))["started_ns"]
    except FileNotFoundError:
        return default_ns
    return started_ns


def _write(destination: Storage, name: str, content: bytes) -> None:
    with destination.atomic_writer(name) as sink:
        sink.write(content)


def _header(pack: PackPlan) -> bytes:
    """Return what the folder of a plan says of its inputs; it does not depend on their location."""
    document = {
        "inputs": pack.fingerprint,
        "image_bytes": pack.image_bytes,
        "rejected": len(pack.rejected),
        "shards": [len(plan.inputs) for plan in pack.plans],
    }
    return json.dumps(document).encode()


def read_plan(destination: Storage, access: S3Access) -> PackPlan:
    """Return the plan of the unfinished pack in the destination.

    Raises:
        FileNotFoundError: there is none.
    """
    document: dict[str, Any] = json.loads(destination.read(PLAN_NAME))
    folder = _inputs_folder(document["inputs"])
    header: dict[str, Any] = json.loads(destination.read(f"{folder}/{HEADER_FILE}"))
    files = PlanFiles(destination.address(folder), access)
    root, options = document["root"], PackOptions(**document["pack_options"])
    return PackPlan(
        make_plan(header["shards"], files, root, options),
        PlannedRejections(files, header["rejected"]),
        document["inputs"],
        document["shard_bytes"],
        document["options"],
        header["image_bytes"],
        root,
    )


def _inputs_folder(fingerprint: str) -> str:
    return f"{INPUTS_FOLDER}/{fingerprint[:16]}"


def build_shards(
    pack: PackPlan,
    work: WorkerPlan,
    shared: SharedWork,
    on_progress: Callable[[PackProgress], None],
) -> None:
    """Build the unfinished shards, together with the other nodes of ``shared``.

    Raises:
        OSError: the destination cannot be written, or the disk is full.
        WorkerKilledError: a worker process was killed.
        PackEndedError: another node has written the index.
    """
    total = sum(len(plan.inputs) for plan in pack.plans)
    state = StateFiles(work.destination)
    dropped: DroppedInputs | None = None
    with shared.renewed():
        if pack.plans[0].options.deduplicates:
            for progress in find_duplicates(pack.plans, work, shared, state):
                on_progress(replace(progress, total=total, label="1/2 hashing"))
            dropped = DroppedInputs(pack.plans, work.destination)
        stage = _building(pack.plans, work, shared, state, dropped)
        finished = total - sum(len(plan.inputs) for plan in stage.unfinished(stage.items))
        label = "packing" if dropped is None else "2/2 packing"
        for progress in shared.complete(stage):
            done = progress.done + finished
            on_progress(replace(progress, done=done, total=total, label=label))


def find_duplicates(
    plans: Sequence[ShardPlan], work: WorkerPlan, shared: SharedWork, state: StateFiles
) -> Iterator[PackProgress]:
    """Store the digests of all inputs, then the images to leave out."""
    cores = split_cores(plans, work, max_processes=work.workers)
    yield from shared.complete(
        Stage(
            _parts("digests", plans, shared.num_nodes),
            lambda items: [plan for plan in items if not state.has(digests_name(plan))],
            lambda items: digest_shards(items, work, cores),
        )
    )
    if state.has(DROPPED_NAME):
        return
    search = DuplicateSearch.of(plans, work.destination)
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
            if state.has(record_name(plan)) and read_record(plan, work.destination) is not None:
                built.add(plan.name)
            else:
                missing.append(plan)
        return missing

    def run(items: Iterable[ShardPlan]) -> Generator[PackProgress]:
        def tasks() -> Iterator[ShardTask]:
            for plan in items:
                _abort_uploads(plan, work.destination)
                yield plan, {} if dropped is None else dropped.of_shard(plan)

        return build_in_parallel(tasks(), work, plans)

    return Stage(_parts("shards", plans, shared.num_nodes), unfinished, run)


def _parts(name: str, plans: Sequence[ShardPlan], num_nodes: int) -> list[Part[ShardPlan]]:
    """Return the ranges of shards that a node claims at once."""
    size = max(1, min(_MAX_PART_SHARDS, len(plans) // (num_nodes * _PARTS_PER_NODE)))
    return [
        Part(f"{name}-{first:06d}", plans[first : first + size])
        for first in range(0, len(plans), size)
    ]


def _abort_uploads(plan: ShardPlan, destination: Storage) -> None:
    """Abort the uploads of a shard by a killed process, whose parts S3 bills."""
    if isinstance(destination, S3Prefix):
        from botocore.exceptions import ClientError

        # Not every role may list them.
        with suppress(ClientError):
            destination.abort_uploads(SHARDS_FOLDER, names={plan.name})


class StateFiles:
    """Which files of the pack's state exist. Those in S3 are listed again after a while."""

    def __init__(self, destination: Storage) -> None:
        self._destination = destination
        self._names: set[str] = set()
        self._listed = -_LIST_SECONDS

    def has(self, name: str) -> bool:
        """Return whether a file exists, or existed once."""
        if name in self._names:
            return True
        if isinstance(self._destination, S3Prefix):
            if time.monotonic() - self._listed >= _LIST_SECONDS:
                self._listed = time.monotonic()
                listed = self._destination.list_sizes(PACK_STATE)
                self._names |= {f"{PACK_STATE}/{name}" for name in listed}
        elif self._destination.size(name) is not None:
            self._names.add(name)
        return name in self._names


@dataclass(frozen=True)
class PackTotals:
    """What a pack came to: its samples, and the number of rejected inputs for each reason."""

    samples: int
    rejected: Counter[str]


def finalize(pack: PackPlan, destination: Storage) -> PackTotals | None:
    """Write the index if all shards are finished, and return its totals; otherwise return None.

    No index is written if every input was rejected. Memory holds the record of one shard.
    """
    samples = 0
    reasons = Counter(item.reason for item in pack.rejected)
    with tempfile.TemporaryFile() as index, tempfile.TemporaryFile("w+") as rejected:
        with IndexWriter(
            index,
            target_bytes=pack.target_bytes,
            inputs=pack.fingerprint,
            options=pack.index_options,
        ) as writer:
            for plan in pack.plans:
                record = read_record(plan, destination)
                if record is None:
                    return None
                if record.shard is not None:
                    writer.add(record.shard)
                    samples += record.shard.samples
                for item in sorted(record.rejected, key=_order):
                    rejected.write(json.dumps(list(vars(item).values())) + "\n")
                    reasons[item.reason] += 1
            rejected.seek(0)
            of_shards = (RejectedInput(*json.loads(line)) for line in rejected)
            for item in merge_rejected(pack.rejected, of_shards):
                writer.reject(item)
        if samples:
            index.seek(0)
            with destination.atomic_writer(INDEX_NAME) as sink:
                while content := index.read(PART_BYTES):
                    sink.write(content)
    return PackTotals(samples, reasons)


def _order(item: RejectedInput) -> tuple[str, str, str]:
    return item.source, item.reason, item.detail


def merge_rejected(*sorted_parts: Iterable[RejectedInput]) -> Iterator[RejectedInput]:
    """Merge rejected inputs that are sorted by source; those of one source may be in any order."""
    merged = heapq.merge(*sorted_parts, key=_order)
    for _, items in groupby(merged, key=lambda item: item.source):
        yield from sorted(items, key=_order)


def remove_state(pack: PackPlan, destination: Storage) -> None:
    """Remove what a pack is resumed from; the plan comes last, as it names the other files.

    Only the sign that the pack has ended stays longer, for nodes that look for these files.
    """
    for plan in pack.plans:
        destination.remove(record_name(plan))
        if plan.options.deduplicates:
            destination.remove(digests_name(plan))
    for folder in (DUPLICATES_FOLDER, CLAIMS_FOLDER):
        destination.remove_folder(folder)
    destination.remove(PLAN_NAME)
    destination.remove(ENDED_NAME)


def remove_plan(pack: PackPlan, destination: Storage) -> None:
    """Remove all that an unfinished pack stored besides its shards."""
    destination.remove_folder(pack.folder)
    remove_state(pack, destination)
