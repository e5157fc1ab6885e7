"""Finds the images to pack, in a folder, in S3 or in a table, and their captions.

Images are sorted on disk and written to the files of the plan, so memory does not depend on their
number.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sm_train.entrypoints.data_prep.packing.plan import packed_bytes
from sm_train.entrypoints.data_prep.packing.plan_files import (
    INPUT_SCHEMA,
    INPUTS,
    REJECTED,
    REJECTED_SCHEMA,
    PartitionWriter,
    PlanFiles,
    batch_rows,
    decode,
)
from sm_train.entrypoints.data_prep.packing.stored_plan import PackedInputs
from sm_train.entrypoints.sample_metadata.column_types import (
    COLUMN_TYPES,
    SOURCE,
    ColumnType,
    MadeBy,
)
from sm_train.entrypoints.shards.shard_index import RejectedInput
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.data_prep.packing.append import Comparison, NewInputs
from sm_train.toolkit.data_prep.packing.file_kinds import (
    MAX_NAMED,
    FileSelection,
    SkippedKind,
    describe_skipped,
    fixed_part,
    is_pattern,
    matching_files,
)
from sm_train.toolkit.data_prep.packing.input_sorter import InputSorter
from sm_train.toolkit.data_prep.packing.links import SourceFolder, images_inside
from sm_train.toolkit.data_prep.packing.s3_inventory import (
    MANIFEST_NAME,
    list_inventory,
    read_manifest,
)
from sm_train.toolkit.data_prep.packing.s3_listing import collect_objects, listing_root
from sm_train.toolkit.data_prep.packing.source_image import SourceImage, local_image
from sm_train.toolkit.data_prep.packing.table_files import (
    KINDS,
    TableFile,
    find_image_folder,
    find_tables,
    no_table,
)
from sm_train.toolkit.data_prep.packing.table_preview import ColumnPreview, preview_tables
from sm_train.toolkit.data_prep.packing.tables import (
    ALL_COLUMNS,
    TableOptions,
    collect_tables,
    declared_types,
    made_columns,
    not_in_index,
)


@dataclass(frozen=True)
class InputSource:
    """Where images and captions come from, as ``sm-train pack`` takes it.

    ``source`` is a folder that is searched recursively, a pattern (``photos/**/*.jpg``), an S3
    prefix, the ``manifest.json`` of an S3 Inventory, or a table of images and captions with
    ``s3://`` URIs or paths relative to the table. A ``captions`` table selects the images of the
    source to pack; an image that it lists twice is packed twice. ``table`` selects
    columns and rows of a table. With ``convert``, images of more formats are packed. ``removed``
    are the sources of images that must not be packed.
    """

    source: str
    captions: str | None = None
    table: TableOptions = field(default_factory=TableOptions)
    convert: bool = False
    access: S3Access = field(default_factory=S3Access)
    removed: frozenset[str] = frozenset()
    preview: bool = False
    """Whether the columns of a table are described."""
    is_partial: bool = False
    """Whether the table adds to what images have (:class:`ImageTable`)."""


@dataclass(frozen=True)
class PackInputs:
    """What was found: all images in packing order, and those that were rejected, in files.

    ``packed_bytes`` is the size of all samples in shards, ``image_bytes`` that of the images.
    ``local`` is one of the images that are local files. ``has_heic`` if any is a HEIC file. An
    append has only the new inputs, and ``comparison`` has what became of the others.
    """

    folder: Path
    root: str
    images: int
    image_bytes: int
    packed_bytes: int
    rejected: int
    fingerprint: str
    """SHA-256 of names, sizes and table captions: cheap, and independent of the location."""
    newest_ns: int
    """Latest modification of any file, Unix nanoseconds; reveals edits that keep the size."""
    skipped: dict[str, SkippedKind]
    """Files that are neither images nor captions, by kind."""
    local: str | None
    has_heic: bool
    filtered: int
    """Rows of a table that do not fulfil its condition."""
    index_columns: dict[str, ColumnType | None]
    """The types of the columns that the index keeps; None for a column without any value."""
    comparison: Comparison | None = None
    made_columns: dict[str, MadeBy] = field(default_factory=dict)
    """The columns of the table that `sm-train enrich` has made, and what made each."""
    preview: tuple[ColumnPreview, ...] = ()
    """The columns of a table, if they are to be described."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to pack; only an append may be empty."""
        return self.images + self.rejected == 0

    @property
    def files(self) -> PlanFiles:
        """The files with the images and the rejected inputs."""
        return PlanFiles(str(self.folder))


def find_inputs(
    source: InputSource, folder: Path, packed: PackedInputs | None = None
) -> PackInputs:
    """Find the images, sort them by path and write them to ``folder``.

    Those that are ``packed`` are left out. Of the captions only those in a table are read.

    Raises:
        UserError: the source does not exist, has no images, or is an invalid table; or there is not
            enough space to sort it.
    """
    try:
        with TemporaryDirectory(dir=folder) as temporary:
            return _find_inputs(source, Path(temporary), folder, packed)
    except sqlite3.Error as error:
        raise UserError(
            f"{source.source}: cannot be sorted in {folder.parent}: {error}; "
            "set TMPDIR to a folder with more space",
            ExitCode.UNEXPECTED,
        ) from None


def _find_inputs(
    source: InputSource, temporary: Path, folder: Path, packed: PackedInputs | None
) -> PackInputs:
    selection = FileSelection(convert=source.convert)
    downloads = temporary / "tables"
    downloads.mkdir()
    tables = _find_tables(source, downloads)
    with InputSorter(temporary, _root(source, tables), source.removed) as sorter:
        _collect(source, tables, sorter, selection)
        sorter.flush()
        for stray in sorter.stray_texts(MAX_NAMED):
            selection.skip_texts(*stray)
        if not sorter.images and not sorter.rejected:
            reasons = [f"{source.source}: no images in it (jpg, jpeg, png, webp)"]
            raise UserError("; ".join([*reasons, *describe_skipped(selection.skipped)]))
        declared = declared_types(tables, source.table)
        # Of a table that declares its types no cell has to be read for them.
        reads_cells = source.preview or None in declared.values()
        preview = preview_tables(tables) if reads_cells else ()
        types = _column_types(declared, preview)
        new = None if packed is None else NewInputs(packed, sorter.root, source.removed)
        found = _write_inputs(sorter, folder, selection.skipped, new, types)
        made = [made_columns(table, source.table) for table in tables]
        made_by = {name: by for part in made for name, by in part.items()}
        shown = preview if source.preview else ()
        return replace(found, made_columns=made_by, preview=shown)


def _column_types(
    declared: Mapping[str, ColumnType | None], preview: Sequence[ColumnPreview]
) -> dict[str, ColumnType | None]:
    """Return the types of the columns of the index, of all rows, also of those that are not packed.

    None is the type of a column without any value.

    Raises:
        UserError: a column holds what an index cannot.
    """
    types = dict(declared)
    for column in preview:
        if column.values and types.get(column.name, "") is None:
            if column.type not in COLUMN_TYPES:
                raise UserError(not_in_index(column.name, _nouns(column.type)))
            types[column.name] = cast("ColumnType", column.type)
    return types


def _nouns(kind: str) -> str:
    """Return what the values of a column are that an index cannot hold."""
    name = kind.partition("<")[0]
    if "list" in name:
        return "lists"
    if name in ("object", "struct", "map"):
        return "objects"
    return "values of several types" if kind == "mixed" else f"values of the type {kind}"


def _root(source: InputSource, tables: Sequence[TableFile]) -> str:
    """Return what precedes the path of an image below the source, in most addresses."""
    if source.source.startswith("s3://"):
        return "" if tables else listing_root(source.source)
    if source.captions is not None:
        folder = Path(source.source)
    elif is_pattern(source.source):
        folder = fixed_part(source.source)
    else:
        path = Path(source.source)
        folder = path if path.is_dir() else path.parent
    return "" if folder == Path() else f"{folder}/".replace("//", "/")


def _find_tables(source: InputSource, folder: Path) -> list[TableFile]:
    """Return the tables of the source, none if it is images with ``.txt`` captions.

    Raises:
        UserError: ``captions`` is no table.
    """
    name, access = source.source, source.access
    if source.captions is not None:
        if not name.startswith("s3://") and not Path(name).is_dir():
            raise UserError(f"{name}: with --captions, SRC must be the folder of the images")
        tables = find_tables(source.captions, access, folder)
        if not tables:
            raise UserError(no_table(source.captions))
        return tables
    if name.endswith(MANIFEST_NAME) and name.startswith("s3://"):
        return []
    is_folder = not name.startswith("s3://") and Path(name).is_dir()
    of_folder = find_image_folder(Path(name), access) if is_folder else []
    return of_folder or find_tables(name, access, folder)


def _collect(
    source: InputSource, tables: Sequence[TableFile], sorter: InputSorter, selection: FileSelection
) -> None:
    """Add all images of the source to ``sorter``."""
    name = source.source
    if tables:
        is_below_source = source.captions is not None or tables[0].of_image_folder
        root = name if is_below_source else None
        collect_tables(
            source.table, tables, root, source.access, sorter, is_partial=source.is_partial
        )
        return
    table = source.table
    for option, value in (
        ("--where", table.where),
        ("--keep", {*table.keep} - {ALL_COLUMNS}),
        ("--index-column", {*table.index_columns} - {SOURCE}),
    ):
        if value:
            raise UserError(f"{option}: needs a table; pass one as SRC or --captions")
    if name.endswith(MANIFEST_NAME) and name.startswith("s3://"):
        inventory = read_manifest(name, source.access)
        sorter.root = f"s3://{inventory.bucket}/"
        list_inventory(inventory, source.access, selection, sorter)
    elif name.startswith("s3://"):
        collect_objects(name, source.access, selection, sorter)
    elif is_pattern(name):
        _add_all(sorter, _glob_images(name, selection, sorter.reject))
    elif Path(name).is_dir():
        _add_all(sorter, _walk_images(Path(name), selection, sorter.reject))
    elif Path(name).exists():
        raise UserError(f"{name}: neither a folder of images nor a table ({', '.join(KINDS)})")
    elif name.startswith(("http://", "https://")):
        raise UserError(f"{name}: addresses of the web are not read; download it first")
    else:
        raise UserError(f"{name}: no such folder or table")


def _add_all(sorter: InputSorter, images: Iterable[SourceImage]) -> None:
    for image in images:
        sorter.add(image)


def _write_inputs(
    sorter: InputSorter,
    folder: Path,
    skipped: dict[str, SkippedKind],
    new: NewInputs | None,
    types: dict[str, ColumnType | None],
) -> PackInputs:
    """Write all inputs, or the ``new`` ones, in order; compute their digest and their size."""
    images, rejected = sorter.sorted_images(), sorter.sorted_rejected()
    if new is not None:
        images, rejected = new.images(images), new.rejected(rejected)
    digest = hashlib.sha256()
    image_bytes = all_packed = 0
    with PartitionWriter(folder, INPUTS, INPUT_SCHEMA) as writer:
        for batch in images:
            digest.update(_describe(batch))
            fields = batch.column("table_fields")
            columns = batch.column("bytes"), batch.column("caption_bytes"), pc.binary_length(fields)
            sizes, text_sizes, field_sizes = (
                column.fill_null(0).to_numpy().astype(np.int64) for column in columns
            )
            sample_bytes = packed_bytes(sizes, text_sizes, field_sizes)
            planned = batch.append_column("packed_bytes", pa.array(sample_bytes))
            writer.write(planned.select(INPUT_SCHEMA.names))
            image_bytes += int(sizes.sum())
            all_packed += int(sample_bytes.sum())
    with PartitionWriter(folder, REJECTED, REJECTED_SCHEMA) as rejected_writer:
        for batch in rejected:
            for row in batch_rows(batch):
                digest.update(json.dumps([decode(cell) for cell in row]).encode())
            rejected_writer.write(batch.cast(REJECTED_SCHEMA))
    return PackInputs(
        folder,
        sorter.root,
        writer.rows,
        image_bytes,
        all_packed,
        rejected_writer.rows,
        digest.hexdigest(),
        sorter.newest_ns,
        skipped,
        sorter.local,
        sorter.has_heic,
        sorter.filtered,
        types,
        None if new is None else new.comparison,
    )


def _describe(batch: pa.RecordBatch) -> bytes:
    """Return the images of a batch as the fingerprint takes them.

    That is source, size, caption and, if there are any, the fields of a table; of a caption in a
    file its size, and its extension if that is not the usual one.
    """
    columns = ("source", "bytes", "caption", "caption_bytes", "table_fields", "caption_address")
    cells = zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
    return "".join(
        json.dumps(
            [
                decode(source),
                size,
                length if caption is None else decode(caption),
                *([] if fields is None else [decode(fields)]),
                *([] if address is None else [PurePosixPath(decode(address)).suffix]),
            ]
        )
        for source, size, caption, length, fields, address in cells
    ).encode()


def _walk_images(
    folder: Path, selection: FileSelection, reject: Callable[[RejectedInput], None]
) -> Iterator[SourceImage]:
    """Find images by their extension; call ``reject`` with those outside the folder.

    Links inside the folder are followed, but each folder is visited only once.
    """
    root = SourceFolder(folder)
    visited: set[tuple[int, int]] = set()
    for parent, subfolders, names in os.walk(folder, followlinks=True, onerror=_raise):
        status = Path(parent).stat()
        if (status.st_dev, status.st_ino) in visited:
            subfolders.clear()
            continue
        name = Path(parent).relative_to(folder).as_posix()
        if rejection := root.reject_subfolder(Path(parent), name):
            subfolders.clear()
            reject(rejection)
            continue
        visited.add((status.st_dev, status.st_ino))
        subfolders.sort()
        files = [Path(parent, name) for name in names]
        paths = selection.images([(path.relative_to(folder).as_posix(), path) for path in files])
        images = (local_image(path.relative_to(folder).as_posix(), path) for path in paths)
        yield from images_inside(images, root, reject)


def _glob_images(
    pattern: str, selection: FileSelection, reject: Callable[[RejectedInput], None]
) -> Iterator[SourceImage]:
    """Find the images that match a pattern; sources are relative to its part without wildcards.

    ``reject`` is called with those that lie outside that part.
    """
    root = fixed_part(pattern)
    source_folder = SourceFolder(root)
    found = matching_files(pattern)
    # One folder at a time: a caption lies next to its image.
    for _, group in groupby(found, key=lambda path: path.parent):
        files = [entry for entry in group if entry.is_file()]
        paths = selection.images([(file.relative_to(root).as_posix(), file) for file in files])
        images = (local_image(path.relative_to(root).as_posix(), path) for path in paths)
        yield from images_inside(images, source_folder, reject)


def _raise(error: OSError) -> None:
    """Fail on a folder that cannot be listed: os.walk would silently skip its images."""
    raise error
