"""Finds the images to pack, in a folder, in S3 or in a table, and their captions."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.entrypoints.data.shard_index import RejectedInput
from sm_train.entrypoints.packing.plan import PackInput
from sm_train.entrypoints.packing.storage import S3Access, s3_client
from sm_train.toolkit.aws.errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.packing.file_kinds import FileSelection, SkippedKind, describe_skipped
from sm_train.toolkit.packing.links import SourceFolder
from sm_train.toolkit.packing.source_image import SourceImage

if TYPE_CHECKING:
    from types_boto3_s3.type_defs import ObjectTypeDef

Row = dict[str, Any]

_WILDCARDS = "*?["


@dataclass(frozen=True)
class PackInputs:
    """All images in packing order, and the rejected rows of a table."""

    images: tuple[PackInput, ...]
    caption_bytes: tuple[int, ...]
    rejected: tuple[RejectedInput, ...]
    fingerprint: str
    """SHA-256 of names, sizes and table captions: cheap, and independent of the location."""
    newest_ns: int
    """Latest modification of any file, Unix nanoseconds; reveals edits that keep the size."""
    skipped: dict[str, SkippedKind]
    """Files that are neither images nor captions, by kind."""


def find_inputs(
    source: str,
    captions: Path | None,
    *,
    image_column: str,
    caption_column: str,
    access: S3Access,
    convert: bool,
) -> PackInputs:
    """List the images of ``source``, sorted by path. Only captions in a table are read.

    ``source`` is a folder that is searched recursively, a pattern (``photos/**/*.jpg``), an S3
    prefix, or a table of images and captions with ``s3://`` URIs or paths relative to the table. A
    ``captions`` table selects the images of the source to pack; an image that it lists twice is
    packed twice. With ``convert``, images of more formats are packed.

    Raises:
        UserError: the source does not exist, has no images, or is an invalid table.
    """
    selection = FileSelection(convert=convert)
    if captions is not None:
        if not source.startswith("s3://") and not Path(source).is_dir():
            raise UserError(f"{source}: with --captions, SRC must be the folder of the images")
        rows = _table_inputs(captions, source, image_column, caption_column, access)
        return _collect(str(captions), *rows, selection)
    if source.startswith("s3://"):
        return _collect(source, list_objects(source, access, selection), [], selection)
    rejected: list[RejectedInput] = []
    if any(wildcard in source for wildcard in _WILDCARDS):
        images = list(_glob_images(source, selection, rejected))
        return _collect(source, images, rejected, selection)
    path = Path(source)
    if not path.exists():
        raise UserError(f"{source}: no such folder or table")
    if path.is_dir():
        images = list(_walk_images(path, selection, rejected))
        return _collect(source, images, rejected, selection)
    root = str(path.parent)
    rows = _table_inputs(path, root, image_column, caption_column, access)
    return _collect(source, *rows, selection)


def _collect(
    source: str,
    images: Iterable[SourceImage],
    rejected: list[RejectedInput],
    selection: FileSelection,
) -> PackInputs:
    ordered = sorted(images, key=lambda image: image.source)
    if not ordered and not rejected:
        reasons = [f"{source}: no images in it (jpg, jpeg, png, webp)"]
        raise UserError("; ".join([*reasons, *describe_skipped(selection.skipped)]))
    digest = hashlib.sha256()
    for image in ordered:
        caption = image.caption_bytes if image.caption is None else image.caption
        digest.update(json.dumps([image.source, image.bytes, caption]).encode())
    for item in rejected:
        digest.update(json.dumps([item.source, item.reason, item.detail]).encode())
    numbered = tuple(
        PackInput(
            number, image.source, image.address, image.bytes, image.caption, image.caption_address
        )
        for number, image in enumerate(ordered)
    )
    caption_bytes = tuple(
        len(image.caption.encode("utf-8", "surrogatepass"))
        if image.caption is not None
        else image.caption_bytes or 0
        for image in ordered
    )
    newest = max((image.modified_ns for image in ordered), default=0)
    return PackInputs(
        numbered,
        caption_bytes,
        tuple(rejected),
        digest.hexdigest(),
        newest,
        selection.skipped,
    )


def _local_image(source: str, path: Path, caption: str | None = None) -> SourceImage:
    """Describe a local image. A missing file gets size 0 and is rejected when it is read."""
    size, modified = _size_and_time(path)
    if caption is not None:
        return SourceImage(source, str(path), size or 0, modified, caption)
    caption_path = path.with_suffix(".txt")
    caption_bytes, caption_modified = _size_and_time(caption_path)
    newest = max(modified, caption_modified)
    return SourceImage(source, str(path), size or 0, newest, None, str(caption_path), caption_bytes)


def _size_and_time(path: Path) -> tuple[int | None, int]:
    """Return a file's size and modification time; (None, 0) if it does not exist."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return None, 0
    return status.st_size, status.st_mtime_ns


def _walk_images(
    folder: Path, selection: FileSelection, rejected: list[RejectedInput]
) -> Iterator[SourceImage]:
    """Find images by their extension; add those that lie outside the folder to ``rejected``.

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
            rejected.append(rejection)
            continue
        visited.add((status.st_dev, status.st_ino))
        subfolders.sort()
        files = [Path(parent, name) for name in names]
        paths = selection.images([(path.relative_to(folder).as_posix(), path) for path in files])
        images = (_local_image(path.relative_to(folder).as_posix(), path) for path in paths)
        yield from _inside(images, root, rejected)


def _inside(
    images: Iterable[SourceImage], folder: SourceFolder, rejected: list[RejectedInput]
) -> Iterator[SourceImage]:
    """Yield the images that lie in ``folder`` with their captions; add others to ``rejected``."""
    for image in images:
        if rejection := folder.reject(image):
            rejected.append(rejection)
        else:
            yield image


def _glob_images(
    pattern: str, selection: FileSelection, rejected: list[RejectedInput]
) -> Iterator[SourceImage]:
    """Find the images that match a pattern; sources are relative to its part without wildcards.

    Those that lie outside that part are added to ``rejected``.
    """
    parts = Path(pattern).parts
    fixed = next(
        index
        for index, part in enumerate(parts)
        if any(wildcard in part for wildcard in _WILDCARDS)
    )
    root = Path(*parts[:fixed])
    files = [path for path in root.glob(str(Path(*parts[fixed:]))) if path.is_file()]
    paths = selection.images([(path.relative_to(root).as_posix(), path) for path in files])
    images = (_local_image(path.relative_to(root).as_posix(), path) for path in paths)
    yield from _inside(images, SourceFolder(root), rejected)


def list_objects(uri: str, access: S3Access, selection: FileSelection) -> list[SourceImage]:
    """Find the images below an S3 prefix, each with the ``.txt`` object of the same name."""
    bucket, prefix = split_uri(uri)
    listed: dict[str, ObjectTypeDef] = {}
    with translate_aws_errors(uri):
        pages = s3_client(access).get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=bucket, Prefix=prefix):
            listed |= {entry["Key"]: entry for entry in page.get("Contents", [])}
    parent = prefix if prefix.endswith("/") or not prefix else prefix.rpartition("/")[0] + "/"
    images = []
    objects = [(key, image) for key, image in listed.items() if not key.endswith("/")]
    for image in selection.images([(key.removeprefix(parent), image) for key, image in objects]):
        key = image["Key"]
        stem = key.rpartition(".")[0]
        caption = listed.get(f"{stem}.txt")
        entries = [image, caption] if caption else [image]
        images.append(
            SourceImage(
                source=key.removeprefix(parent),
                address=f"s3://{bucket}/{key}",
                bytes=image["Size"],
                modified_ns=max(int(entry["LastModified"].timestamp() * 1e9) for entry in entries),
                caption_address=f"s3://{bucket}/{stem}.txt",
                caption_bytes=caption["Size"] if caption else None,
            )
        )
    return images


def _raise(error: OSError) -> None:
    """Fail on a folder that cannot be listed: os.walk would silently skip its images."""
    raise error


def _table_inputs(
    table: Path, root: str, image_column: str, caption_column: str, access: S3Access
) -> tuple[list[SourceImage], list[RejectedInput]]:
    images: list[SourceImage] = []
    remote: list[tuple[str, str]] = []
    rejected: list[RejectedInput] = []
    for number, row in enumerate(_read_table(table, (image_column, caption_column)), start=1):
        name, caption = row.get(image_column), row.get(caption_column)
        row_name = f"{table.name} row {number}"
        if not isinstance(name, str) or not name:
            rejected.append(RejectedInput(row_name, "image-missing", "the row names no image"))
            continue
        source = name
        if not name.startswith("s3://"):
            source = _relative_path(root, name)
        if source == ".." or source.startswith("../"):
            rejected.append(
                RejectedInput(name, "outside-source", f"{row_name} is outside the folder")
            )
        elif caption is None:
            rejected.append(RejectedInput(source, "caption-missing", f"{row_name} has no caption"))
        elif not isinstance(caption, str | int):
            rejected.append(
                RejectedInput(source, "caption-not-text", f"{row_name}: {caption!r:.60}")
            )
        elif source.startswith("s3://"):
            remote.append((source, str(caption)))
        elif root.startswith("s3://"):
            remote.append((f"{root.rstrip('/')}/{source}", str(caption)))
        else:
            images.append(_local_image(source, Path(root) / source, str(caption)))
    if not images and not rejected and not remote:
        raise UserError(f"{table}: the table has no rows")
    if images:
        images = list(_inside(images, SourceFolder(Path(root)), rejected))
    return images + _head_objects(remote, access), rejected


def _relative_path(root: str, name: str) -> str:
    """Return a table's path relative to ``root``; it starts with ``..`` if it is outside."""
    if root.startswith("s3://"):
        return posixpath.relpath(posixpath.join("/root", name), "/root")
    return Path(os.path.relpath(Path(root) / name, root)).as_posix()


HEAD_REQUESTS = 32
"""HEAD requests that are in flight at the same time."""


def _head_objects(remote: list[tuple[str, str]], access: S3Access) -> list[SourceImage]:
    """Get the sizes of a table's objects, which the plan needs: one HEAD request for each."""
    from botocore.exceptions import ClientError

    def head(row: tuple[str, str]) -> SourceImage:
        address, caption = row
        bucket, key = split_uri(address)
        try:
            response = s3_client(access).head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response["Error"].get("Code") not in ("404", "NoSuchKey"):
                raise
            return SourceImage(address, address, 0, 0, caption)  # rejected when it is read
        modified = int(response["LastModified"].timestamp() * 1e9)
        return SourceImage(address, address, response["ContentLength"], modified, caption)

    if not remote:
        return []
    with translate_aws_errors(remote[0][0]), ThreadPoolExecutor(HEAD_REQUESTS) as pool:
        return list(pool.map(head, remote))


def _read_table(table: Path, columns: tuple[str, str]) -> list[Row]:
    """Return the two columns of all rows of a table.

    Bytes that are not UTF-8 become lone surrogates, so that they cost one row and not the run.
    """
    readers: dict[str, Callable[[Path, tuple[str, str]], list[Row]]] = {
        ".csv": _read_csv,
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
    }
    if not table.is_file():
        raise UserError(f"{table}: no such table")
    reader = readers.get(table.suffix.lower())
    if reader is None:
        raise UserError(f"{table}: neither a folder of images nor a table ({', '.join(readers)})")
    return reader(table, columns)


def _require_columns(table: Path, wanted: Iterable[str], present: Iterable[str]) -> None:
    present = list(present)
    missing = [column for column in wanted if column not in present]
    if missing:
        raise UserError(
            f"{table}: no column {' and no column '.join(map(repr, missing))}; it has "
            f"{', '.join(present) or 'none'} (--image-column, --caption-column)"
        )


def _read_csv(table: Path, columns: tuple[str, str]) -> list[Row]:
    with table.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        # strict: an unclosed quote would swallow all rows after it.
        reader = csv.DictReader(file, strict=True)
        try:
            _require_columns(table, columns, reader.fieldnames or ())
            return [{column: row[column] for column in columns} for row in reader]
        except csv.Error as error:
            raise UserError(f"{table}:{reader.reader.line_num}: not CSV: {error}") from None


def _read_jsonl(table: Path, columns: tuple[str, str]) -> list[Row]:
    rows: list[Row] = []
    present: dict[str, None] = {}
    with table.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{table}:{number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f"{table}:{number}: each line must be a JSON object")
            present.update(dict.fromkeys(row))
            rows.append({column: row.get(column) for column in columns})
    if rows:
        _require_columns(table, columns, present)
    return rows


def _read_parquet(table: Path, columns: tuple[str, str]) -> list[Row]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(table) as file:
            _require_columns(table, columns, file.schema_arrow.names)
            batches = file.iter_batches(columns=list(columns))
            return [row for batch in batches for row in batch.to_pylist()]
    except ArrowException as error:
        raise UserError(f"{table}: not parquet: {str(error).splitlines()[0]}") from None
