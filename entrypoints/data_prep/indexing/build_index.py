"""Describes shards, on one node or several, and writes their index."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from blake3 import blake3
from sm_train.entrypoints.data_prep.indexing.index_plan import (
    IndexPlan,
    decode_unusable,
    encode_unusable,
    read_index_plan,
    read_listing,
    write_listing,
)
from sm_train.entrypoints.data_prep.packing.build_pack import merge_rejected, rejected_order
from sm_train.entrypoints.data_prep.packing.describe_shard import (
    ShardDescription,
    describe_shard,
    describe_tar,
)
from sm_train.entrypoints.data_prep.packing.shard_builder import (
    encode_record,
    read_index,
    record_name,
)
from sm_train.entrypoints.data_prep.packing.unusable_samples import (
    COMPRESSED,
    Unusable,
    UnusableSamples,
    merge_unusable,
)
from sm_train.entrypoints.data_prep.work.state_files import StateFiles
from sm_train.entrypoints.data_prep.work.work_stages import (
    ENDED_NAME,
    LEASES_FOLDER,
    PLAN_NAME,
    STATE_FOLDER,
    SharedWork,
    Stage,
    in_groups,
    split_parts,
)
from sm_train.entrypoints.data_prep.work.worker_pool import (
    S3_THREADS,
    ProgressCallback,
    WorkerPlan,
    WorkProgress,
    process_count,
    run_tasks,
)
from sm_train.entrypoints.images.decoder_pool import Decoders
from sm_train.entrypoints.job_interface.index_location import INDEX_NAME
from sm_train.entrypoints.shards.shard_format import ListedShard, Shard, ShardError
from sm_train.entrypoints.shards.shard_index import (
    IndexHeader,
    IndexWriter,
    RejectedInput,
    ShardIndex,
    read_header,
)
from sm_train.entrypoints.shards.tar_reader import FileBytes
from sm_train.entrypoints.storage.object_file import ObjectBytes
from sm_train.entrypoints.storage.storage import (
    LocalFolder,
    S3Prefix,
    open_storage,
    store_file,
    write_file,
)
from sm_train.entrypoints.storage.store import S3Access, open_store

_READS = 32
"""Records that are read at the same time."""


class IndexChangedError(ShardError):
    """Another command has written the index."""

    def __init__(self, address: str) -> None:
        super().__init__(f"{address}: another command has written it; run this again")


def describe_shards(
    plan: IndexPlan,
    work: WorkerPlan,
    shared: SharedWork,
    on_progress: Callable[[WorkProgress], None],
) -> None:
    """Write the records of all unknown shards, together with the other nodes of ``shared``.

    Raises:
        OSError: a shard cannot be read.
        WorkerKilledError: a worker process was killed.
        WorkEndedError: another node has written the index.
    """
    size = S3_THREADS if plan.headers_only else 1
    groups = [
        tuple(plan.unknown[first : first + size]) for first in range(0, len(plan.unknown), size)
    ]
    processes = process_count(work, len(groups), work.workers)
    task = partial(_describe_group, plan.state.address(""), plan.access)
    state = StateFiles(plan.state, (STATE_FOLDER,))

    intact: set[str] = set()

    def unfinished(items: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
        listed = [*items]
        names = [name for group in listed for name in group if state.has(record_name(name))]
        with ThreadPoolExecutor(_READS) as pool:
            records = pool.map(partial(_read_record, plan), new := [*{*names} - intact])
            intact.update(
                name for name, record in zip(new, records, strict=True) if record is not None
            )
        return [group for group in listed if not intact.issuperset(group)]

    def run(items: Iterable[tuple[str, ...]]) -> Generator[WorkProgress]:
        yield from run_tasks(task, items, processes, 1)

    stage = Stage(split_parts("shards", groups, shared.num_nodes), unfinished, run)
    with shared.renewed():
        left = [name for group in stage.unfinished(groups) for name in group]
        finished = len(plan.unknown) - len(left)
        done_bytes = sum(plan.by_name[name].bytes for name in {*plan.unknown} - {*left})
        for progress in shared.complete(stage):
            on_progress(
                replace(
                    progress,
                    done=progress.done + finished,
                    total=len(plan.unknown),
                    bytes=progress.bytes + done_bytes,
                    label="indexing",
                    unit="shards",
                )
            )


@cache
def _open_plan(state: str, access: S3Access) -> IndexPlan:
    """Return the plan, which each worker process reads once."""
    return read_index_plan(open_storage(state, access), access)


def _describe_group(
    state: str,
    access: S3Access,
    group: Sequence[str],
    on_progress: ProgressCallback,
    decoders: Decoders,
) -> None:
    """Write the records of some shards."""
    try:
        plan = _open_plan(state, access)
        with ThreadPoolExecutor(len(group)) as pool:
            for _ in pool.map(partial(_describe, plan, on_progress), group):
                pass
    except Exception:
        # Another node may have ended the work.
        if open_storage(state, access).size(PLAN_NAME) is not None:
            raise


def _describe(plan: IndexPlan, on_progress: ProgressCallback, name: str) -> None:
    """Write the record of a shard, unless there is one."""
    listed = plan.by_name[name]
    if plan.state.size(record_name(name)) is None:
        found = _read_shard(plan, listed)
        record = encode_record(
            found.shard, found.rejected, options={"unusable": encode_unusable(found.unusable)}
        )
        write_file(plan.state, record_name(name), record)
    on_progress(1, listed.bytes, 0)


def _read_shard(plan: IndexPlan, listed: ListedShard) -> ShardDescription:
    """Describe a shard by its headers or by all of its bytes.

    Raises:
        OSError: it cannot be read.
    """
    storage, check, name = plan.storage, plan.check, listed.name
    described = partial(describe_tar, files=check.files, find_missing=check.find_missing)
    digest = blake3(f"{listed.version} {listed.bytes}".encode()).hexdigest()
    if isinstance(storage, LocalFolder):
        path = storage.path / plan.name / name
        if not plan.headers_only:
            return describe_shard(path, name, check.files, find_missing=check.find_missing)
        with path.open("rb") as file:
            return described(FileBytes(file.fileno()), name, digest)
    assert isinstance(storage, S3Prefix)
    store, key = open_store(plan.access), f"{storage.prefix}{plan.name}/{name}"
    if plan.headers_only:
        return described(ObjectBytes(store, storage.bucket, key, listed.bytes), name, digest)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.tar"
        store.download(storage.bucket, key, path)
        return describe_shard(path, name, check.files, find_missing=check.find_missing)


@dataclass(frozen=True)
class _Entry:
    """What is known of a shard."""

    shard: Shard
    rejected: tuple[RejectedInput, ...]
    unusable: Unusable


def finalize(plan: IndexPlan, write: Callable[[IO[bytes]], None]) -> IndexHeader | None:
    """Write the index with ``write``, and the versions of its shards; None if a record is missing.

    Return its header.

    Raises:
        IndexChangedError: another command has written it meanwhile.
    """
    if (written := _written_header(plan)) is not None:
        return written
    if plan.storage.version(plan.index_file) != plan.version:
        raise IndexChangedError(plan.storage.address(plan.index_file))
    unusable: list[Unusable] = []
    total: Unusable = {}
    if compressed := plan.options["compressed"]:
        total[COMPRESSED] = UnusableSamples(len(compressed), compressed[:3])
    damage: list[RejectedInput] = []
    options = dict(plan.options)
    known = _KnownShards(plan) if plan.known or plan.is_pack else None
    with tempfile.NamedTemporaryFile() as file:
        with _index_writer(file, plan, known, options) as writer:
            for entry in _entries(plan, known):
                if entry is None:
                    return None
                writer.add(entry.shard)
                damage.extend(entry.rejected)
                merge_unusable(total, entry.unusable)
                unusable.append(entry.unusable)
            inputs = known.rejected_inputs() if known is not None and plan.is_pack else ()
            for item in merge_rejected(inputs, sorted(damage, key=rejected_order)):
                writer.reject(item)
            # The header is written last, when this is known.
            options["unusable"] = {reason: asdict(samples) for reason, samples in total.items()}
        file.flush()
        header = ShardIndex(Path(file.name)).header
        write_listing(plan, unusable)
        file.seek(0)
        write(file)
    return header


def _index_writer(
    file: IO[bytes], plan: IndexPlan, known: _KnownShards | None, options: dict[str, Any]
) -> IndexWriter:
    """Return the writer of the index, which keeps how the images of a pack were packed."""
    if known is None or not plan.is_pack:
        return IndexWriter(file, options=options, prefix=plan.name)
    return known.index.rewriter(file, options=options)


def _written_header(plan: IndexPlan) -> IndexHeader | None:
    """Return the header of the index if another node has written it."""
    try:
        with plan.storage.open(plan.index_file) as file:
            header = read_header(file, plan.storage.address(plan.index_file))
    except (FileNotFoundError, ShardError):
        return None
    return header if plan.options.items() <= header.options.items() else None


def replace_index(plan: IndexPlan, file: IO[bytes]) -> None:
    """Store the index in place of the one that the plan knows.

    Raises:
        IndexChangedError: another command has written it meanwhile.
    """
    if plan.version is not None:
        if not plan.storage.replace_if(plan.index_file, file, plan.version):
            raise IndexChangedError(plan.storage.address(plan.index_file))
        return
    store_file(plan.storage, plan.index_file, file)


def _entries(plan: IndexPlan, known: _KnownShards | None) -> Iterator[_Entry | None]:
    """Yield what is known of each shard in order, and what records say; None for a missing one."""
    columns = known.index.header.columns if known is not None and plan.is_pack else {}
    with ThreadPoolExecutor(_READS) as pool:
        for group in in_groups(plan.listed, _READS):
            unknown = [shard.name for shard in group if shard.name not in plan.known]
            found = pool.map(partial(_read_record, plan), unknown)
            records = dict(zip(unknown, found, strict=True))
            for shard in group:
                if shard.name in plan.known:
                    assert known is not None
                    yield known.entry(shard.name)
                else:
                    entry = records[shard.name]
                    if entry is not None:
                        entry = replace(entry, shard=entry.shard.with_columns(columns))
                    yield entry


def _read_record(plan: IndexPlan, name: str) -> _Entry | None:
    try:
        index = read_index(plan.state, record_name(name))
        unusable = decode_unusable(index.header.options["unusable"])
        return _Entry(index.shard(0), tuple(index.rejected()), unusable)
    except (FileNotFoundError, ShardError, ValueError, KeyError, RecursionError):
        return None  # or it is damaged, and made again


class _KnownShards:
    """What the present index says."""

    def __init__(self, plan: IndexPlan) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / INDEX_NAME
        path.write_bytes(plan.storage.read(plan.index_file))
        self.index = ShardIndex(path)
        self._rows = {name: row for row, name in enumerate(self.index.names)}
        self._listing = read_listing(plan.storage, plan.index_file)
        self._damage: dict[str, list[RejectedInput]] = {}
        for item in self.index.rejected():
            if item.source in self._rows:
                self._damage.setdefault(item.source, []).append(item)

    def rejected_inputs(self) -> Iterator[RejectedInput]:
        """Yield the rejected inputs but for damaged regions of shards, sorted."""
        return (item for item in self.index.rejected() if item.source not in self._rows)

    def entry(self, name: str) -> _Entry:
        rejected = tuple(self._damage.get(name, ()))
        # An index of `sm-train pack` has no listing; its samples were checked.
        unusable = self._listing[name][1] if name in self._listing else {}
        return _Entry(self.index.shard(self._rows[name]), rejected, unusable)


def versions_digest(listed: Iterable[ListedShard]) -> str:
    """Return a digest of the names and versions of shards."""
    versions = json.dumps([(shard.name, shard.version) for shard in listed]).encode()
    return hashlib.sha256(versions).hexdigest()


def remove_state(plan: IndexPlan) -> None:
    """Remove what the work is resumed from; the plan comes last."""
    for name in plan.unknown:
        plan.state.remove(record_name(name))
    # Names of shards may have folders.
    for folder in {name.partition("/")[0] for name in plan.unknown if "/" in name}:
        plan.state.remove_folder(f"{STATE_FOLDER}/{folder}")
    plan.state.remove_folder(LEASES_FOLDER)
    plan.state.remove(PLAN_NAME)
    plan.state.remove(ENDED_NAME)


@dataclass(frozen=True)
class IndexWork:
    """An index as the work of several nodes."""

    plan: IndexPlan

    @property
    def parts(self) -> str:
        """The number of shards to describe."""
        return f"{len(self.plan.unknown)} shards"

    def build(
        self, work: WorkerPlan, shared: SharedWork, on_progress: Callable[[WorkProgress], None]
    ) -> None:
        """Describe all shards, together with the other nodes."""
        describe_shards(self.plan, work, shared, on_progress)

    def finalize(self) -> str | None:
        """Write the index."""
        header = finalize(self.plan, partial(replace_index, self.plan))
        if header is None:
            return None
        address = self.plan.storage.address(self.plan.index_file)
        return f"{address}: {header.samples:,} samples, {header.rejected:,} damaged regions"

    def remove_state(self) -> None:
        """Remove what the work is resumed from."""
        remove_state(self.plan)
