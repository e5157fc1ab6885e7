"""Makes all columns of an enrichment, on one node or several, and writes what it came to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from sm_train.entrypoints.data_prep.enrichment.column_maker import ColumnMaker
from sm_train.entrypoints.data_prep.enrichment.enrichment_batch import EnrichmentError
from sm_train.entrypoints.data_prep.enrichment.enrichment_plan import (
    ENRICHED_SHARDS,
    KEPT_RESULT,
    RESULT_NAME,
    TABLE_FOLDER,
    EnrichmentPlan,
    ShardSource,
    encode_hashes,
    read_enrichment,
    remove_state,
    source_index,
)
from sm_train.entrypoints.data_prep.enrichment.part_summary import (
    RESULT_FIELDS,
    EnrichmentResult,
    PartSummary,
)
from sm_train.entrypoints.data_prep.enrichment.shard_parts import enrich_shard
from sm_train.entrypoints.data_prep.enrichment.table_parts import enrich_part, read_summary
from sm_train.entrypoints.data_prep.packing.shard_builder import (
    BuiltShard,
    InputReader,
    read_index,
    read_record,
    record_name,
)
from sm_train.entrypoints.data_prep.packing.stored_plan import copy_packed_inputs
from sm_train.entrypoints.data_prep.work.plan_documents import read_checked
from sm_train.entrypoints.data_prep.work.state_files import StateFiles
from sm_train.entrypoints.data_prep.work.work_stages import (
    PLAN_NAME,
    STATE_FOLDER,
    SharedWork,
    Stage,
    in_groups,
    split_parts,
)
from sm_train.entrypoints.data_prep.work.worker_pool import (
    ProgressCallback,
    WorkerPlan,
    WorkProgress,
    process_count,
    run_tasks,
    thread_count,
    visible_gpus,
)
from sm_train.entrypoints.images.decoder_pool import Decoders
from sm_train.entrypoints.job_interface.index_location import INDEX_NAME
from sm_train.entrypoints.job_interface.job_config import ColorPolicy
from sm_train.entrypoints.sample_metadata.column_types import (
    ENRICHED,
    ColumnType,
    ColumnTypes,
    as_type,
    common_type,
    type_of,
)
from sm_train.entrypoints.shards.shard_format import Shard
from sm_train.entrypoints.shards.shard_index import IndexWriter, ShardIndex, rows_with_types
from sm_train.entrypoints.storage.aws_session import is_aborted_upload
from sm_train.entrypoints.storage.storage import open_storage, store_file, write_file
from sm_train.entrypoints.storage.store import S3Access

_READS = 32
"""Finished files that are read at the same time."""

_NAMED_FAILURES = 20
"""Images without columns that the result names; the files name all of them."""


def make_parts(
    plan: EnrichmentPlan,
    maker: ColumnMaker,
    work: WorkerPlan,
    shared: SharedWork,
    on_progress: Callable[[WorkProgress], None],
) -> None:
    """Make the unfinished files, together with the other nodes of ``shared``.

    Raises:
        EnrichmentError: the function failed.
        OSError: the destination cannot be written.
        WorkerKilledError: a worker process was killed.
        WorkEndedError: another node has written the result.
    """
    if not plan.parts:
        return  # shards were added without any sample
    gpus = visible_gpus()
    processes = process_count(work, len(plan.parts), len(gpus) or work.workers)
    threads = thread_count(work, processes, uses_s3=True)
    cores = thread_count(work, processes, uses_s3=False)
    maker = replace(maker, device="cuda" if gpus else "cpu", cores=cores)
    task = partial(_make_part, plan.destination.address(""), plan.access, maker, threads)
    state = StateFiles(plan.destination, (STATE_FOLDER, TABLE_FOLDER))

    intact: set[str] = set()

    def unfinished(parts: Iterable[str]) -> list[str]:
        listed = [*parts]
        found = [part for part in listed if state.has(finished_name(plan, part))]
        with ThreadPoolExecutor(_READS) as pool:
            checked = pool.map(partial(_is_intact, plan), new := [*{*found} - intact])
            intact.update(part for part, is_intact in zip(new, checked, strict=True) if is_intact)
        return [part for part in listed if part not in intact]

    def run(parts: Iterable[str]) -> Generator[WorkProgress]:
        yield from run_tasks(task, parts, processes, work.decoders(processes), gpus)

    stage = Stage(split_parts("parts", plan.parts, shared.num_nodes), unfinished, run)
    total = plan.images
    with shared.renewed():
        finished = _images_of(plan, {*plan.parts} - {*stage.unfinished(plan.parts)})
        for progress in shared.complete(stage):
            done = min(total, progress.done + finished)
            on_progress(replace(progress, done=done, total=total, label="enriching"))


def _is_intact(plan: EnrichmentPlan, part: str) -> bool:
    """Return whether a finished part can be read; a damaged one is made again."""
    if isinstance(plan.origin, ShardSource):
        return read_record(part, plan.destination) is not None
    return read_summary(plan, part) is not None


def finished_name(plan: EnrichmentPlan, part: str) -> str:
    """Return the file that exists once a part is finished: it, or the record of a shard."""
    return record_name(part) if isinstance(plan.origin, ShardSource) else f"{TABLE_FOLDER}/{part}"


def _images_of(plan: EnrichmentPlan, parts: set[str]) -> int:
    """Return the number of images of finished parts."""
    if isinstance(plan.origin, ShardSource):
        index = source_index(plan)
        counts = zip(index.names, index.samples.tolist(), strict=True)
        return sum(count for name, count in counts if name in parts)
    return sum(len(plan.origin.inputs(part, plan.files)) for part in parts)


@cache
def _open_plan(address: str, access: S3Access) -> EnrichmentPlan:
    """Return the plan, which each worker process reads once."""
    return read_enrichment(open_storage(address, access), access)


def _make_part(
    address: str,
    access: S3Access,
    maker: ColumnMaker,
    threads: int,
    part: str,
    on_progress: ProgressCallback,
    decoders: Decoders,
) -> None:
    try:
        plan = _open_plan(address, access)
        if isinstance(plan.origin, ShardSource):
            enrich_shard(plan, maker, part, decoders, threads, on_progress)
        else:
            reader = InputReader(access, decoders)
            enrich_part(plan, maker, part, reader, threads, on_progress)
    except Exception as error:
        # Another node took the part over from this one, which was paused, or has ended the work.
        has_ended = open_storage(address, access).size(PLAN_NAME) is None
        if not has_ended and not is_aborted_upload(error):
            raise


def finalize(plan: EnrichmentPlan) -> EnrichmentResult | None:
    """Write the result, for shards with their index; return None if a part is missing.

    Raises:
        EnrichmentError: a column of the index has different types in several shards.
    """
    result = (
        _finalize_shards(plan) if isinstance(plan.origin, ShardSource) else _read_summaries(plan)
    )
    if result is None:
        return None
    document = plan.identity | {"code": list(plan.code)} | asdict(result)
    write_file(plan.destination, RESULT_NAME, (json.dumps(document, indent=2) + "\n").encode())
    return result


def _read_summaries(plan: EnrichmentPlan) -> EnrichmentResult | None:
    """Return what all Parquet files say."""
    with ThreadPoolExecutor(_READS) as pool:
        summaries = list(pool.map(partial(read_summary, plan), plan.parts))
    found = [summary for summary in summaries if summary is not None]
    return EnrichmentResult.of(found, _NAMED_FAILURES) if len(found) == len(plan.parts) else None


def _finalize_shards(plan: EnrichmentPlan) -> EnrichmentResult | None:
    """Write the index of the new shards."""
    assert isinstance(plan.origin, ShardSource)
    kept = read_index(plan.destination, INDEX_NAME) if plan.kept else None
    types = _index_types(plan, plan.origin, kept)
    if types is None:
        return None
    source = source_index(plan)
    summaries: list[PartSummary] = []
    with tempfile.TemporaryFile() as file:
        with IndexWriter(
            file,
            target_bytes=source.header.target_bytes,
            inputs=source.header.inputs or plan.inputs,
            appended=source.header.appended,
            options=source.header.options | {ENRICHED: _enrichments(plan, source, kept)},
            columns=types,
        ) as writer:
            for rows in () if kept is None else kept.shard_rows():
                others = dict.fromkeys({*rows["name"].to_pylist()} - {*plan.kept})
                writer.add_rows(rows_with_types(rows, types), others)
            for built in _records(plan):
                if built is None:
                    return None
                summaries.append(PartSummary.from_dict(built.options))
                if built.shard is not None:
                    writer.add(_with_columns(built.shard, types, plan))
            for item in source.rejected():
                writer.reject(item)
        if source.header.inputs is not None:
            packed = open_storage(plan.origin.address, plan.access)
            fingerprints = source.header.fingerprints
            copy_packed_inputs(packed, plan.destination, plan.access, fingerprints)
        store_file(plan.destination, INDEX_NAME, file)
    write_file(plan.destination, ENRICHED_SHARDS, encode_hashes(source))
    result = EnrichmentResult.of(summaries, _NAMED_FAILURES)
    if kept is None:
        return result
    document = read_checked(plan.destination, KEPT_RESULT, RESULT_FIELDS, "use another destination")
    return EnrichmentResult.from_dict(document).plus(result, _NAMED_FAILURES)


def _enrichments(
    plan: EnrichmentPlan, source: ShardIndex, kept: ShardIndex | None
) -> list[dict[str, Any]]:
    """Return all enrichments of the new shards, as their index records them."""
    columns: dict[str, None] = {}
    if kept is not None:
        columns = dict.fromkeys(kept.header.options[ENRICHED][-1]["columns"])
    for built in _records(plan):
        if built is not None:
            columns |= dict.fromkeys(PartSummary.from_dict(built.options).columns)
    names = ("function", *vars(ColorPolicy()))
    made = {name: plan.function[name] for name in names} | {"columns": [*columns]}
    return [*source.header.options.get(ENRICHED, []), made]


def _records(plan: EnrichmentPlan) -> Iterator[BuiltShard | None]:
    with ThreadPoolExecutor(_READS) as pool:
        for group in in_groups(plan.parts, _READS):
            yield from pool.map(partial(read_record, destination=plan.destination), group)


def _index_types(
    plan: EnrichmentPlan, origin: ShardSource, kept: ShardIndex | None
) -> dict[str, ColumnType] | None:
    """Return the types of the columns of the index; None if a record is missing.

    Shards in which a new column holds nothing say nothing of its type, nor do ``kept`` ones.
    """
    types: dict[str, ColumnType] = {} if kept is None else dict(kept.header.columns)
    types |= source_index(plan).header.columns
    unknown = set(origin.index_columns)
    if kept is not None:
        unknown = {name for name in unknown if not _has_values(kept, name)}
    for built in _records(plan) if unknown else ():
        if built is None:
            return None
        for name in list(unknown):
            if (kind := _stored_type(built.shard, name)) is not None:
                types[name] = kind
                unknown.remove(name)
        if not unknown:
            break
    return types | dict.fromkeys(unknown, "text")


def _has_values(index: ShardIndex, column: str) -> bool:
    parts = (values for _, _, values in index.values_by_group(column))
    return any(len(values) > values.null_count for values in parts)


def _stored_type(shard: Shard | None, column: str) -> ColumnType | None:
    values = () if shard is None else shard.columns.get(column, ())
    return next((type_of(value) for value in values if value is not None), None)


def _with_columns(shard: Shard, types: ColumnTypes, plan: EnrichmentPlan) -> Shard:
    """Return a shard with all columns of the index; those of the source have their types.

    Raises:
        EnrichmentError: a new column holds values of another type.
    """
    assert isinstance(plan.origin, ShardSource)
    shard = shard.with_columns(types)
    made = {}
    for name in plan.origin.index_columns:
        kind, stored = types[name], _stored_type(shard, name)
        if common_type(kind, stored) != kind:
            raise EnrichmentError(
                f"--index-column: column {name} of {plan.function['function']} is {stored} in "
                f"{shard.name} and {kind} in others; return one type"
            )
        made[name] = tuple(as_type(value, kind) for value in shard.columns[name])
    return replace(shard, columns={**shard.columns, **made})


@dataclass(frozen=True)
class EnrichmentWork:
    """An enrichment as the work of several nodes."""

    plan: EnrichmentPlan
    maker: ColumnMaker

    @property
    def parts(self) -> str:
        """The number of files to make."""
        return f"{len(self.plan.parts)} parts"

    def build(
        self, work: WorkerPlan, shared: SharedWork, on_progress: Callable[[WorkProgress], None]
    ) -> None:
        """Make all files, together with the other nodes."""
        make_parts(self.plan, self.maker, work, shared, on_progress)

    def finalize(self) -> str | None:
        """Write the result."""
        result = finalize(self.plan)
        if result is None:
            return None
        failed = sum(result.failed.values())
        address = self.plan.destination.address(RESULT_NAME)
        return f"{address}: {result.images:,} images, {failed:,} without columns"

    def remove_state(self) -> None:
        """Remove what the work is resumed from."""
        records = []
        if isinstance(self.plan.origin, ShardSource):
            with suppress(FileNotFoundError):  # an earlier command has begun with it
                records = [record_name(part) for part in self.plan.parts]
        remove_state(self.plan, records)
