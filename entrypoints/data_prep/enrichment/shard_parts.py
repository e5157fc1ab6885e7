"""Makes columns for the samples of a shard and writes it again with them in its JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from sm_train.entrypoints.data_prep.enrichment.column_maker import (
    ColumnMaker,
    EnrichedItem,
    LoadedImage,
)
from sm_train.entrypoints.data_prep.enrichment.enrichment_batch import EnrichmentError
from sm_train.entrypoints.data_prep.enrichment.enrichment_plan import (
    EnrichmentPlan,
    ShardSource,
    source_index,
)
from sm_train.entrypoints.data_prep.enrichment.part_summary import PartSummary
from sm_train.entrypoints.data_prep.packing.reencode import decode_upright
from sm_train.entrypoints.data_prep.packing.shard_builder import encode_record, record_name
from sm_train.entrypoints.data_prep.packing.shard_samples import read_samples
from sm_train.entrypoints.data_prep.packing.unusable_samples import IMAGE_AND_TEXT
from sm_train.entrypoints.data_prep.work.worker_pool import ProgressCallback
from sm_train.entrypoints.images.decoder_pool import Decoders
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.job_interface.index_location import SHARDS_FOLDER
from sm_train.entrypoints.sample_metadata.column_types import (
    ColumnType,
    as_type,
    common_type,
    type_of,
)
from sm_train.entrypoints.shards.shard_format import Shard
from sm_train.entrypoints.shards.shard_writer import ShardWriter, member_parts
from sm_train.entrypoints.shards.tar_reader import sample_members
from sm_train.entrypoints.storage.storage import open_storage, write_file


@dataclass(frozen=True)
class _ShardSample:
    """A sample of the old shard: its key, its files by extension, and its JSON file."""

    key: str
    members: Mapping[str, bytes]
    document: dict[str, Any]


def enrich_shard(
    plan: EnrichmentPlan,
    maker: ColumnMaker,
    name: str,
    decoders: Decoders,
    threads: int,
    on_progress: ProgressCallback,
) -> None:
    """Write the shard ``name`` with new columns, then its record.

    Samples that were removed from the source are left out. One whose image cannot be decoded keeps
    its files.

    Raises:
        EnrichmentError: the function failed.
        ShardError: the shard is not as its index says.
        OSError: it cannot be read, or the new one not be written.
    """
    assert isinstance(plan.origin, ShardSource)
    index = source_index(plan)
    old = index.shard(index.names.index(name))
    removed = plan.removals.keys_by_shard(pa.array([name])).get(name, frozenset())
    kept = [number for number, key in enumerate(old.keys) if key not in removed]
    shard, summary = None, PartSummary()
    types = dict(index.header.columns)
    if kept:
        with (
            plan.destination.atomic_writer(f"{SHARDS_FOLDER}/{name}") as sink,
            ShardWriter(sink, name) as writer,
        ):
            new: dict[str, list[Any]] = {column: [] for column in plan.origin.index_columns}
            load = partial(_load, decoders, maker)
            samples = _samples(plan.origin, plan, old, kept)
            for batch in maker.make_columns(samples, load, threads):
                for item in batch:
                    writer.append(item.item.key, *_parts(item))
                    for column, values in new.items():
                        values.append(_index_value(maker.function, column, item))
                    summary.add(item, f"{name} {item.item.key}")
                on_progress(len(batch), 0, sum(item.error is not None for item in batch))
            added = _types(maker.function, new)
            types |= added
            shard = writer.finish(
                [old.widths[number] for number in kept if old.widths],
                [old.heights[number] for number in kept if old.heights],
                [old.colors[number] for number in kept if old.colors],
                {
                    column: [values[number] for number in kept]
                    for column, values in old.columns.items()
                }
                | {
                    column: [as_type(value, kind) for value in new[column]]
                    for column, kind in added.items()
                },
            )
    write_file(
        plan.destination,
        record_name(name),
        encode_record(shard, columns=types, options=summary.as_dict()),
    )


def _samples(
    origin: ShardSource, plan: EnrichmentPlan, old: Shard, kept: list[int]
) -> Iterator[_ShardSample]:
    storage = open_storage(origin.address, plan.access)
    for _, part in read_samples(storage, f"{origin.name}/{old.name}", old, kept):
        key, members = sample_members(part)
        contents = {extension: bytes(content) for extension, content in members.items()}
        yield _ShardSample(key, contents, _document(contents.get("json")))


def _document(content: bytes | None) -> dict[str, Any]:
    try:
        document = json.loads(content or b"{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _load(decoders: Decoders, maker: ColumnMaker, sample: _ShardSample) -> LoadedImage:
    """Decode a sample's image.

    Raises:
        DecodeError: it has none, or the image is damaged.
    """
    image = next((name for name in IMAGE_AND_TEXT.image if name in sample.members), None)
    if image is None:
        raise DecodeError("no-image", "the sample has no image")
    pixels = decode_upright(sample.members[image], maker.max_side, decoders, maker.color)
    columns = sample.document.get("columns")
    row = {name: value for name, value in sample.document.items() if name != "columns"}
    row |= columns if isinstance(columns, dict) else {}
    if "txt" in sample.members:
        row["caption"] = sample.members["txt"].decode(errors="replace")
    return LoadedImage(sample.key, pixels, row)


def _parts(enriched: EnrichedItem[_ShardSample]) -> Iterator[bytes]:
    """Yield the sample's files as tar members, with the new columns in the JSON file."""
    sample = enriched.item
    members = dict(sample.members)
    if enriched.columns:
        columns = sample.document.get("columns")
        merged = (columns if isinstance(columns, dict) else {}) | enriched.columns
        members["json"] = json.dumps(sample.document | {"columns": merged}).encode()
    for extension, content in members.items():
        yield from member_parts(f"{sample.key}.{extension}", content)


def _index_value(function: str, column: str, enriched: EnrichedItem[_ShardSample]) -> Any:
    """Return the value of a new column that the index keeps.

    Raises:
        EnrichmentError: the function did not return the column.
    """
    if enriched.error is not None:
        return None
    try:
        return enriched.columns[column]
    except KeyError:
        made = ", ".join(enriched.columns) or "none"
        raise EnrichmentError(
            f"--index-column: {function} returns no column {column}; it returns {made}"
        ) from None


def _types(function: str, columns: Mapping[str, list[Any]]) -> dict[str, ColumnType]:
    """Return the types of the new columns that the index keeps, without those of nulls alone.

    Raises:
        EnrichmentError: a column holds what an index cannot.
    """
    types = {}
    for name, values in columns.items():
        kind: ColumnType | None = None
        for value in values:
            try:
                kind = common_type(kind, type_of(value))
            except ValueError as error:
                raise EnrichmentError(
                    f"--index-column: column {name} of {function} holds {error}; the index takes "
                    "texts, numbers and booleans"
                ) from None
        if kind is not None:
            types[name] = kind
    return types
