"""Makes the columns of a part of a source's images and writes them as a Parquet file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sm_train.entrypoints.data_prep.enrichment.column_maker import (
    ColumnMaker,
    EnrichedItem,
    LoadedImage,
)
from sm_train.entrypoints.data_prep.enrichment.enrichment_batch import EnrichmentError
from sm_train.entrypoints.data_prep.enrichment.enrichment_plan import (
    TABLE_FOLDER,
    EnrichmentPlan,
    TableSource,
)
from sm_train.entrypoints.data_prep.enrichment.part_summary import SUMMARY_KEY, PartSummary
from sm_train.entrypoints.data_prep.packing.plan import PackInput
from sm_train.entrypoints.data_prep.packing.reencode import decode_upright
from sm_train.entrypoints.data_prep.packing.shard_builder import (
    InputReader,
    read_caption,
    read_input,
)
from sm_train.entrypoints.data_prep.work.worker_pool import ProgressCallback
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.sample_metadata.column_types import ColumnTypes, arrow_type, as_type
from sm_train.entrypoints.storage.storage import store_file

_CAPTION = "caption"
"""The column with the caption that an image has."""

_SIZE_COLUMN = "bytes"
"""Column with the sizes of images in S3: with it `sm-train pack` need not ask for them."""


def enrich_part(
    plan: EnrichmentPlan,
    maker: ColumnMaker,
    part: str,
    reader: InputReader,
    threads: int,
    on_progress: ProgressCallback,
) -> None:
    """Write the Parquet file ``part``, with a row for each of its images.

    Raises:
        EnrichmentError: the function failed.
        OSError: an image in S3 cannot be read, or the file not be written.
    """
    assert isinstance(plan.origin, TableSource)
    rows: list[dict[str, Any]] = []
    summary = PartSummary()
    load = partial(_load, reader, maker)
    for batch in maker.make_columns(plan.origin.inputs(part, plan.files), load, threads):
        for item in batch:
            summary.add(item, item.item.source)
            rows.append(_row(item, plan.origin.image_column))
        on_progress(len(batch), 0, sum(item.error is not None for item in batch))
    made = [*summary.columns]
    table = _table(rows, made, maker.function, plan.origin.types).replace_schema_metadata(
        {
            SUMMARY_KEY: json.dumps(
                summary.as_dict()
                | {"made": plan.origin.made | dict.fromkeys(summary.columns, maker.origin)}
            )
        }
    )
    with tempfile.TemporaryFile() as file:
        pq.write_table(table, file, compression="zstd")
        store_file(plan.destination, f"{TABLE_FOLDER}/{part}", file)


def read_summary(plan: EnrichmentPlan, part: str) -> PartSummary | None:
    """Return what a Parquet file says of itself; None if it is missing or damaged."""
    try:
        with (
            plan.destination.open(f"{TABLE_FOLDER}/{part}") as source,
            pq.ParquetFile(source) as file,
        ):
            metadata = file.schema_arrow.metadata or {}
            return PartSummary.from_dict(json.loads(metadata.get(SUMMARY_KEY, b"")))
    except (FileNotFoundError, pa.ArrowException, ValueError, RecursionError):
        return None
    except OSError as error:
        if error.errno is None:  # PyArrow's, of a damaged footer
            return None
        raise


def _load(reader: InputReader, maker: ColumnMaker, item: PackInput) -> LoadedImage:
    """Read and decode an image.

    Raises:
        DecodeError: it is missing or damaged.
    """
    content = read_input("image", item.address, item.bytes, reader.access)
    row = _known(item)
    try:
        row[_CAPTION] = row.get(_CAPTION) or read_caption(item, reader.access)
    except DecodeError:
        row.pop(_CAPTION, None)
    pixels = decode_upright(content, maker.max_side, reader.decoders, maker.color)
    return LoadedImage(item.source, pixels, row)


def _known(item: PackInput) -> dict[str, Any]:
    """Return the columns of a table that an image has."""
    if item.table_fields is None:
        return {}
    columns: dict[str, Any] = json.loads(item.table_fields).get("columns", {})
    return columns


def _row(enriched: EnrichedItem[PackInput], image_column: str) -> dict[str, Any]:
    item = enriched.item
    is_object = item.address.startswith("s3://")
    row: dict[str, Any] = {image_column: item.address if is_object else item.source}
    if is_object:
        row[_SIZE_COLUMN] = item.bytes
    return row | _known(item) | enriched.known | enriched.columns


def _table(
    rows: Sequence[dict[str, Any]], new: Sequence[str], function: str, types: ColumnTypes
) -> pa.Table:
    """Return rows as a table, with the ``new`` columns last; vectors hold 32-bit floats.

    Columns in ``types`` have these in all parts, as the table has that they come from. Each part
    has the column of captions, so that `sm-train pack` finds it also if no image had one.

    Raises:
        EnrichmentError: a column has values of several types.
    """
    known = dict.fromkeys(name for row in rows for name in row if name not in new)
    columns = {}
    if _CAPTION not in new:
        known[_CAPTION] = None
        types = {_CAPTION: "text", **types}
    for name in (*known, *new):
        values = [row.get(name) for row in rows]
        if name in types and name not in new:
            cells = [as_type(value, types[name]) for value in values]
            columns[name] = pa.array(cells, arrow_type(types[name]))
            continue
        try:
            columns[name] = _array([_cell(value) for value in values])
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            kinds = sorted({type(value).__name__ for value in values if value is not None})
            raise EnrichmentError(
                f"{function}: column {name} mixes {' and '.join(kinds)}; return one type"
            ) from None
    return pa.table(columns)


def _array(cells: Sequence[Any]) -> pa.Array:
    try:
        return pa.array(cells)
    except OverflowError:  # whole numbers that only an unsigned type holds
        return pa.array(cells, pa.uint64())


def _cell(value: Any) -> Any:
    is_vector = isinstance(value, list) and all(isinstance(item, float) for item in value)
    return np.asarray(value, np.float32) if is_vector and value else value
