"""Reads a table of images and captions row by row, so that memory does not depend on its length."""

from __future__ import annotations

import csv
import gzip
import json
import os
import posixpath
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from sm_train.entrypoints.base.stored_fields import checked_fields, mapping_of, text
from sm_train.entrypoints.data_prep.enrichment.part_summary import SUMMARY_KEY
from sm_train.entrypoints.data_prep.packing.embedded_images import embedded_address, nested_column
from sm_train.entrypoints.sample_metadata.column_types import (
    SOURCE,
    ColumnType,
    MadeBy,
    common_type,
    declared_type,
)
from sm_train.entrypoints.sample_metadata.row_filter import (
    NUMBER,
    ConditionError,
    RowFilter,
    comparable,
)
from sm_train.entrypoints.sample_metadata.text_columns import is_missing
from sm_train.entrypoints.shards.shard_index import RejectedInput
from sm_train.entrypoints.storage.store import S3Access, open_store
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.input_sorter import InputSorter
from sm_train.toolkit.data_prep.packing.links import SourceFolder, images_inside
from sm_train.toolkit.data_prep.packing.source_image import SourceImage, local_image
from sm_train.toolkit.data_prep.packing.table_columns import CsvTypes, table_fields, unique
from sm_train.toolkit.data_prep.packing.table_files import TableFile

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

HEAD_REQUESTS = 32
"""HEAD requests that are in flight at the same time."""

FILE_NAME, FOLDER_CAPTION = "file_name", "text"
"""Columns of images and captions in the tables of Hugging Face's image folders."""

ALL_COLUMNS = "*"
"""Stands for all columns but those of images, captions and sizes."""

SIZE_COLUMN = "bytes"
"""The column of sizes in bytes that a table may have."""

_ROWS = 2**13
"""Rows of a Parquet table that are decoded at once."""

Reject = Callable[[RejectedInput], None]


@dataclass(frozen=True)
class TableOptions:
    """Which columns and rows of a table are packed.

    The first of the ``caption_columns`` that is not blank is an image's caption; with several, the
    sample's JSON file has them all. Without any, images need no caption. The JSON file also has the
    columns ``keep`` (:data:`ALL_COLUMNS` for all) and ``index_columns``, and the index has the
    latter. ``where`` is the SQL condition of the rows to use.
    """

    image_column: str = "image"
    caption_columns: tuple[str, ...] = ("caption",)
    keep: tuple[str, ...] = ()
    index_columns: tuple[str, ...] = ()
    where: str | None = None


@dataclass(frozen=True)
class ImageTable(TableOptions):
    """A file of a CSV, JSONL or Parquet table of images and captions.

    Of one that ``is_partial`` a row may lack its caption, and cells of CSV stay texts: what it
    lacks, and the types of its columns, are known elsewhere.
    """

    file: TableFile = field(kw_only=True)
    is_partial: bool = field(default=False, kw_only=True)

    def images(self, present: Iterable[str]) -> str:
        """Return the column of images of a table with the columns ``present``."""
        is_default = self.image_column == TableOptions.image_column
        if self.file.of_image_folder and is_default and FILE_NAME in {*present}:
            return FILE_NAME
        return self.image_column

    def captions(self, present: Iterable[str]) -> tuple[str, ...]:
        """Return the columns of captions of a table with the columns ``present``."""
        is_default = self.caption_columns == TableOptions.caption_columns
        names = {*present}
        if self.file.of_image_folder and is_default and names.isdisjoint(self.caption_columns):
            return (FOLDER_CAPTION,) if FOLDER_CAPTION in names else self.caption_columns
        return self.caption_columns

    def kept(self, present: Iterable[str]) -> tuple[str, ...]:
        """Return the columns of a sample's JSON file, of a table with the columns ``present``."""
        present = [*present]
        without = {SOURCE} - {*present}  # every image has a source
        named = self.keep
        if ALL_COLUMNS in named:
            own = {self.images(present), *self.captions(present), SIZE_COLUMN}
            named = tuple(name for name in present if name not in own)
        return unique(name for name in (*named, *self.index_columns) if name not in without)


@dataclass(frozen=True)
class ImageRow:
    """A row of a table, numbered from 1; the cells may have any type.

    ``kept`` are the cells of the sample's JSON file. ``embedded`` is the address of an image that
    is in the table itself. ``fault`` is why the row cannot be read as the columns say.
    """

    number: int
    image: Any
    captions: dict[str, Any]
    size: Any
    kept: dict[str, Any]
    embedded: str | None = None
    fault: str | None = None


def collect_tables(
    options: TableOptions,
    files: Sequence[TableFile],
    root: str | None,
    access: S3Access,
    sorter: InputSorter,
    *,
    is_partial: bool = False,
) -> None:
    """Add the images of a table of several files, ``s3://`` URIs or relative to ``root``.

    Without one they are relative to the folder of their file. An object whose size is not in the
    table costs one HEAD request. ``is_partial`` is that of :class:`ImageTable`.

    Raises:
        UserError: the table or its condition is invalid, or no row is left.
    """
    is_empty = True
    for file in files:
        table = ImageTable(**vars(options), file=file, is_partial=is_partial)
        found = _collect_table(table, root or file.parent, access, sorter)
        is_empty = is_empty and not found
    if not is_empty:
        return
    name = files[0].location if len(files) == 1 else f"{files[0].location} and others"
    if sorter.filtered:
        raise UserError(f"{name}: none of {sorter.filtered:,} rows fulfils --where")
    raise UserError(f"{name}: the table has no rows")


def _collect_table(table: ImageTable, root: str, access: S3Access, sorter: InputSorter) -> bool:
    """Add the images of a file; return whether any of its rows is wanted."""
    folder = None if root.startswith("s3://") else SourceFolder(Path(root))
    rows = _selected_rows(table, sorter)
    is_empty = True
    while chunk := list(islice(rows, HEAD_REQUESTS * 32)):
        is_empty = False
        remote: list[_Found] = []
        for row in chunk:
            if (found := _source(table, row, root, sorter.reject)) is None:
                continue
            source, caption, fields = found
            if row.embedded is not None:
                mean, modified = _size(row) or 0, table.file.modified_ns
                image = SourceImage(
                    source, row.embedded, mean, modified, caption, table_fields=fields
                )
                sorter.add(image)
            elif not source.startswith("s3://"):
                assert folder is not None
                image = local_image(source, Path(root) / source, caption, fields)
                for accepted in images_inside([image], folder, sorter.reject):
                    sorter.add(accepted)
            elif (size := _size(row)) is not None:
                sorter.add(SourceImage(source, source, size, 0, caption, table_fields=fields))
            else:
                remote.append(found)
        for image in _head_objects(remote, access):
            sorter.add(image)
    return not is_empty


def _selected_rows(table: ImageTable, sorter: InputSorter) -> Iterator[ImageRow]:
    """Yield the rows that fulfil the table's condition; count the others."""
    rows = _read_table(table)
    if table.where is None:
        yield from rows
        return
    try:
        with RowFilter(table.file.location, table.where) as row_filter:
            numbers = _matching_numbers(table, row_filter)
            wanted = next(numbers, None)
            for row in rows:
                if row.number == wanted:
                    wanted = next(numbers, None)
                    yield row
                elif row.fault is not None:
                    yield row  # to be rejected
                else:
                    sorter.filtered += 1
    except ConditionError as error:
        raise UserError(str(error)) from None


def _matching_numbers(table: ImageTable, row_filter: RowFilter) -> Iterator[int]:
    """Yield the numbers of the rows that fulfil the condition."""
    if table.file.kind == ".parquet":
        with open_parquet(table.file) as file:
            names = file.schema_arrow.names
            used = [name for name in names if name.lower() in row_filter.columns]
            empty = pa.schema([file.schema_arrow.field(name) for name in used]).empty_table()
            fields = [comparable(empty.column(name).combine_chunks()).type for name in used]
            schema = pa.schema(
                [
                    pa.field(NUMBER, pa.int64()),
                    *(pa.field(name, kind) for name, kind in zip(used, fields, strict=True)),
                ]
            )
            row_filter.use_batches(schema, _numbered_batches(file, used, schema))
            yield from row_filter.matching(names)
    elif table.file.kind == ".csv":
        with open_csv(table.file) as reader:
            names = list(reader.fieldnames or ())
            row_filter.use_texts(names, well_formed(reader))
        yield from row_filter.matching(names)
    else:
        present: dict[str, None] = {}
        row_filter.use_documents(json_rows(table.file, present))
        yield from row_filter.matching(list(present))


def _numbered_batches(
    file: ParquetFile, columns: list[str], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    number = 1
    for batch in file.iter_batches(_ROWS, columns=columns, use_threads=False):
        numbers = pa.array(range(number, number + batch.num_rows), pa.int64())
        # Of a column with a dot in its name, Parquet's reader also returns a struct of that name.
        cells = [comparable(batch.column(batch.schema.get_field_index(name))) for name in columns]
        yield pa.RecordBatch.from_arrays([numbers, *cells], schema=schema)
        number += batch.num_rows


class _Found(NamedTuple):
    """What a row names: an image, and what becomes of its sample."""

    source: str
    caption: str
    table_fields: str | None


def _source(table: ImageTable, row: ImageRow, root: str, reject: Reject) -> _Found | None:
    """Return the image and the caption of a row; None if it is rejected."""
    row_name = f"{table.file.name} row {row.number}"
    if row.fault is not None:
        reject(RejectedInput(row_name, "row-malformed", row.fault))
        return None
    if row.embedded is not None:
        # The order of the rows, in which row groups are read once.
        name = f"{table.file.folder}{table.file.name}/{row.number:09d}"
        return _found(table, row, row_name, name, reject)
    if not isinstance(row.image, str) or not row.image:
        reject(RejectedInput(row_name, "image-missing", "the row names no image"))
        return None
    source = row.image
    if source.startswith(("http://", "https://")):
        detail = f"{row_name}: addresses of the web are not downloaded; use img2dataset first"
        reject(RejectedInput(source, "image-address", detail))
        return None
    if not source.startswith("s3://"):
        source = _relative_path(root, table.file.folder + row.image)
    if source == ".." or source.startswith("../"):
        detail = f"{row_name} is outside the folder"
        reject(RejectedInput(row.image, "outside-source", detail))
        return None
    if root.startswith("s3://") and not source.startswith("s3://"):
        source = f"{root.rstrip('/')}/{source}"
    return _found(table, row, row_name, source, reject)


def _found(
    table: ImageTable, row: ImageRow, row_name: str, source: str, reject: Reject
) -> _Found | None:
    """Return an image with its caption; None if the row has none."""
    present = {name: words for name, words in row.captions.items() if words is not None}
    not_text = [value for value in present.values() if not _is_caption(value)]
    if row.captions and not present and not table.is_partial:
        reject(RejectedInput(source, "caption-missing", f"{row_name} has no caption"))
        return None
    if not_text:
        reject(RejectedInput(source, "caption-not-text", f"{row_name}: {not_text[0]!r:.60}"))
        return None
    captions = {
        name: [str(item) for item in value] if isinstance(value, list) else str(value)
        for name, value in present.items()
    }
    texts = [text for value in captions.values() for text in _as_list(value)]
    # A blank caption is rejected when it is packed.
    caption = next(filter(str.strip, texts), "")
    several = captions if len(row.captions) > 1 or len(texts) > len(captions) else {}
    return _Found(source, caption, table_fields(several, row.kept))


def _is_caption(value: Any) -> bool:
    """Return whether a cell is a text or a list of some; numbers are, as CSV has no types."""
    if isinstance(value, list):
        return bool(value) and not any(
            isinstance(item, list) or not _is_caption(item) for item in value
        )
    return isinstance(value, str | int) and not isinstance(value, bool)


def _as_list(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


def _size(row: ImageRow) -> int | None:
    """Return the size of a row's image; None if the table does not have it."""
    size = row.size
    if isinstance(size, str) and size.isascii() and size.isdigit():
        size = int(size)
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    return None


def _relative_path(root: str, name: str) -> str:
    """Return a table's path relative to ``root``; it starts with ``..`` if it is outside."""
    if root.startswith("s3://"):
        return posixpath.relpath(posixpath.join("/root", name), "/root")
    return Path(os.path.relpath(Path(root) / name, root)).as_posix()


def _head_objects(remote: list[_Found], access: S3Access) -> list[SourceImage]:
    """Get the sizes of a table's objects, which the plan needs: one HEAD request for each."""

    def head(row: _Found) -> SourceImage:
        address, caption, fields = row
        found = open_store(access).head(*split_uri(address))
        # A missing object is rejected when it is read.
        size = 0 if found is None else found.bytes
        modified = 0 if found is None else int(found.modified.timestamp() * 1e9)
        return SourceImage(address, address, size, modified, caption, table_fields=fields)

    if not remote:
        return []
    with translate_aws_errors(remote[0][0]), ThreadPoolExecutor(HEAD_REQUESTS) as pool:
        return list(pool.map(head, remote))


def _read_table(table: ImageTable) -> Iterator[ImageRow]:
    """Yield the rows of a table.

    Bytes that are not UTF-8 become lone surrogates, so that they cost one row and not the run.
    """
    readers: dict[str, Callable[[ImageTable], Iterator[ImageRow]]] = {
        ".csv": _read_csv,
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
    }
    return readers[table.file.kind](table)


def _require_columns(table: ImageTable, present: Iterable[str]) -> None:
    present = list(present)
    for options, named in (
        (
            "--image-column, --caption-column",
            (table.images(present), *table.captions(present)),
        ),
        ("--keep, --index-column", table.kept(present)),
    ):
        missing = [column for column in named if column not in present]
        if missing:
            raise UserError(
                f"{table.file.location}: no column {' and no column '.join(map(repr, missing))}; "
                f"it has {', '.join(present) or 'none'} ({options})"
            )


def _read_csv(table: ImageTable) -> Iterator[ImageRow]:
    with open_csv(table.file) as reader:
        names = reader.fieldnames or ()
        _require_columns(table, names)
        kept = table.kept(names)
        types = CsvTypes(well_formed(reader), kept) if kept and not table.is_partial else None
    with open_csv(table.file) as reader:
        for number, row in enumerate(reader, start=1):
            if (further := row.pop(None, None)) is not None:
                count = f"{len(row) + len(further)} cells for {len(row)} columns"
                fault = f"{count}; quote the cells that contain a comma"
                yield ImageRow(number, None, {}, None, {}, fault=fault)
                continue
            cells = {
                name: _text_cell(row[name]) if types is None else types.cell(name, row[name])
                for name in kept
            }
            yield _row(table, number, row, cells)


def _text_cell(text: str | None) -> str | None:
    return None if is_missing(text) else text


def well_formed(reader: csv.DictReader[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the numbered rows of a CSV table that have no more cells than columns.

    The cells of the others, which are rejected, may be those of other columns.
    """
    for number, row in enumerate(reader, start=1):
        if None not in row:
            yield number, row


@contextmanager
def open_csv(table: TableFile) -> Iterator[csv.DictReader[str]]:
    """Open a CSV table.

    Raises:
        UserError: it is invalid, also while it is read.
    """
    with table.open_text() as file:
        header = _header(table, file)
        limit = csv.field_size_limit(_MOST_CHARACTERS)  # of the whole process
        # strict: an unclosed quote would swallow all rows after it.
        reader = csv.DictReader(file, strict=True, delimiter=_delimiter(header))
        try:
            names = list(reader.fieldnames or ())
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise UserError(f"{table.location}: two columns {repeated[0]!r}; rename one")
            yield reader
        except csv.Error as error:
            line = reader.reader.line_num
            raise UserError(f"{table.location}:{line}: not CSV: {error}") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{table.location}: not gzip: {error}") from None
        finally:
            csv.field_size_limit(limit)


_MOST_CHARACTERS = 2**24
"""Characters of a cell: Python's limit of 131,072 is less than some documents have."""


def _header(table: TableFile, file: IO[str]) -> str:
    """Return the first line of a CSV table, which stays to be read.

    Raises:
        UserError: the table is not UTF-8.
    """
    start = file.tell()
    try:
        header = file.readline()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{table.location}: not gzip: {error}") from None
    file.seek(start)
    if "\0" in header:
        raise UserError(f"{table.location}: UTF-16; save it as UTF-8")
    return header


def _delimiter(header: str) -> str:
    """Return what separates the cells: a comma, or what spreadsheets write instead."""
    others = [delimiter for delimiter in ("\t", ";") if delimiter in header]
    return others[0] if others and "," not in header else ","


def _row(table: ImageTable, number: int, row: dict[str, Any], kept: dict[str, Any]) -> ImageRow:
    captions = {name: row.get(name) for name in table.captions(row)}
    return ImageRow(number, row.get(table.images(row)), captions, row.get(SIZE_COLUMN), kept)


def _read_jsonl(table: ImageTable) -> Iterator[ImageRow]:
    present: dict[str, None] = {}
    number = 0
    for number, row in json_rows(table.file, present):
        yield _row(table, number, row, {name: row.get(name) for name in table.kept(row)})
    if number:
        _require_columns(table, present)


def json_rows(table: TableFile, present: dict[str, None]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the numbered objects of a JSONL table; add their keys to ``present``."""
    count, path = 0, table.location
    with table.open_text() as file:
        for number, line in enumerate(_lines(file, path), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: each line must be a JSON object")
            present.update(dict.fromkeys(row))
            count += 1
            yield count, row


def _lines(file: IO[str], name: str) -> Iterator[str]:
    try:
        yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{name}: not gzip: {error}") from None


@contextmanager
def open_parquet(table: TableFile) -> Iterator[ParquetFile]:
    """Open a Parquet table.

    Raises:
        UserError: it is invalid or does not exist, also while it is read.
    """
    from pyarrow import ArrowException, parquet

    try:
        # Reading ahead would keep all row groups in memory.
        source = table.open_parquet()
        with parquet.ParquetFile(source, pre_buffer=False, buffer_size=2**20) as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"{table.location}: no such table") from None
    except ArrowException as error:
        first, *_ = str(error).splitlines()
        raise UserError(f"{table.location}: not parquet: {first}") from None


def declared_types(
    files: Sequence[TableFile], options: TableOptions
) -> dict[str, ColumnType | None]:
    """Return the columns of the index, with the types that the files of a table declare.

    None is the type of a column of CSV or JSONL, of which the cells decide.

    Raises:
        UserError: a file cannot be read, or a column is of a type that an index cannot hold.
    """
    types: dict[str, ColumnType | None] = dict.fromkeys(options.index_columns)
    for file in files:
        if not file.location.endswith(".parquet"):
            return dict.fromkeys(types)
        with open_parquet(file) as parquet:
            schema = parquet.schema_arrow
        for name in {*types} & {*schema.names}:
            try:
                declared = declared_type(schema.field(name).type)
            except ValueError as error:
                raise UserError(not_in_index(name, str(error))) from None
            types[name] = common_type(types[name], declared)
    return types


def not_in_index(column: str, nouns: str) -> str:
    """Return the message on a column whose values, these ``nouns``, an index cannot hold."""
    return (
        f"--index-column: {column} holds {nouns}; the index takes texts, numbers, booleans, dates "
        "and timestamps: use --keep"
    )


def made_columns(file: TableFile, options: TableOptions) -> dict[str, MadeBy]:
    """Return the columns of a table that `sm-train enrich` has made, and what made each.

    Raises:
        UserError: the table cannot be read.
    """
    table = ImageTable(**vars(options), file=file)
    if not table.file.location.endswith(".parquet"):
        return {}
    with open_parquet(table.file) as parquet:
        schema = parquet.schema_arrow
    try:
        summary = json.loads((schema.metadata or {}).get(SUMMARY_KEY, b"{}"))
        checks = {"made": mapping_of(mapping_of(text))}
        made: dict[str, MadeBy] = checked_fields(summary, checks).get("made", {})
        return made
    except ValueError as error:
        raise UserError(
            f"{table.file.location}: metadata {SUMMARY_KEY.decode()} is damaged: {error}; "
            "run `sm-train enrich` again"
        ) from None


def _read_parquet(table: ImageTable) -> Iterator[ImageRow]:
    number = 0
    with open_parquet(table.file) as file:
        schema = file.schema_arrow
        names = schema.names
        _require_columns(table, names)
        # Of all columns those that JSON can hold: thumbnails and the like stay in the table.
        kept = table.kept([field.name for field in schema if not _is_binary(field.type)])
        image = table.images(names)
        embedded = _embedded_column(schema.field(image))
        wanted = unique([*table.captions(names), *kept, SIZE_COLUMN, *_paths(schema.field(image))])
        columns = [name for name in wanted if {name, name.partition(".")[0]} & {*names}]
        for group in range(file.num_row_groups):
            sizes = None if embedded is None else _embedded_sizes(file, group, embedded)
            first = number
            batches = file.iter_batches(
                _ROWS, columns=columns, row_groups=[group], use_threads=False
            )
            for batch in batches:
                for row in _rows(batch):
                    number += 1
                    size = None if sizes is None else sizes[number - 1 - first]
                    if isinstance(row.get(image), dict):
                        row[image] = row[image].get("path")
                    found = _row(table, number, row, {name: row[name] for name in kept})
                    if size is not None:
                        assert embedded is not None
                        address = embedded_address(table.file.location, embedded, number - 1)
                        found = replace(found, size=size, embedded=address)
                    yield found


def _is_binary(kind: pa.DataType) -> bool:
    checks = (
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
        pa.types.is_fixed_size_binary,
    )
    return any(check(kind) for check in checks)


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch; nanoseconds, which Python does not have, are cut off."""
    cells = [
        column.cast(pa.timestamp("us", column.type.tz), safe=False)
        if pa.types.is_timestamp(column.type) and column.type.unit == "ns"
        else column
        for column in batch.columns
    ]
    rows: list[dict[str, Any]] = pa.RecordBatch.from_arrays(
        cells, names=batch.schema.names
    ).to_pylist()
    return rows


def _embedded_column(image: pa.Field) -> str | None:
    """Return the column with the bytes of images; None if a table names files."""
    kind = image.type.value_type if pa.types.is_dictionary(image.type) else image.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return str(image.name)
    if pa.types.is_struct(image.type) and image.type.get_field_index("bytes") >= 0:
        return f"{image.name}.bytes"
    return None


def _paths(image: pa.Field) -> list[str]:
    """Return the columns with the paths of images, without their bytes."""
    if pa.types.is_struct(image.type):
        return [f"{image.name}.path"] if image.type.get_field_index("path") >= 0 else []
    return [] if _embedded_column(image) else [image.name]


def _embedded_sizes(file: ParquetFile, group: int, column: str) -> list[int | None]:
    """Return the sizes of a row group's images, None for rows without bytes.

    If none is missing, it is the mean: the images themselves need not be read.
    """
    metadata = file.metadata.row_group(group)
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    [chunk] = [chunk for chunk in chunks if chunk.path_in_schema == column]
    statistics = chunk.statistics
    if statistics is not None and statistics.has_null_count and not statistics.null_count:
        mean = chunk.total_uncompressed_size // max(1, metadata.num_rows)
        return [mean] * metadata.num_rows
    sizes: list[int | None] = pc.binary_length(nested_column(file, group, column)).to_pylist()
    return sizes
