"""Finds what is to be packed: images in a folder or in S3, captions beside them or in a table."""

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
from sm_train.toolkit.aws.session import split_uri, translate_aws_errors
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    from types_boto3_s3.type_defs import ObjectTypeDef

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})

Row = dict[str, Any]


@dataclass(frozen=True)
class SourceImage:
    """An image that was found, with what tells whether it has changed.

    ``source`` is its path below the source with forward slashes, or its address. ``caption``
    comes from a table; otherwise the text at ``caption_address`` is it. ``changed_ns`` is the
    latest modification of either, Unix nanoseconds.
    """

    source: str
    address: str
    bytes: int
    changed_ns: int
    caption: str | None = None
    caption_address: str | None = None
    caption_bytes: int | None = None


@dataclass(frozen=True)
class PackInputs:
    """Everything found, in the order in which it is packed, and rows that name no image."""

    images: tuple[PackInput, ...]
    caption_bytes: tuple[int, ...]
    rejected: tuple[RejectedInput, ...]
    fingerprint: str
    """SHA-256 over names, sizes and table captions: cheap, and the same wherever they lie."""
    newest_ns: int
    """Latest modification of any file, Unix nanoseconds: what the fingerprint cannot see."""


def find_inputs(
    source: str,
    captions: Path | None,
    *,
    image_column: str,
    caption_column: str,
    access: S3Access,
) -> PackInputs:
    """List what ``source`` holds, sorted by path; captions are read only where a table has them.

    ``source`` is a folder, searched to the bottom, a pattern (``photos/**/*.jpg``), an S3 prefix,
    or a table of images and captions whose paths are relative to its own folder or ``s3://``
    addresses. With ``captions`` the table says which images of the source are packed; an image
    that it names twice is packed twice.

    Raises:
        UserError: no such source, no images in it, or a table that cannot be used.
    """
    if captions is not None:
        if not source.startswith("s3://") and not Path(source).is_dir():
            raise UserError(f"{source}: with --captions the source is the images' folder")
        return _inputs(
            str(captions), *_rows(captions, source, image_column, caption_column, access)
        )
    if source.startswith("s3://"):
        return _inputs(source, objects_below(source, access), [])
    if any(mark in source for mark in "*?["):
        return _inputs(source, _matching(source), [])
    path = Path(source)
    if not path.exists():
        raise UserError(f"{source}: no such folder or table")
    if path.is_dir():
        return _inputs(source, _images_below(path), [])
    root = str(path.parent)
    return _inputs(source, *_rows(path, root, image_column, caption_column, access))


def _inputs(where: str, images: Iterable[SourceImage], rejected: list[RejectedInput]) -> PackInputs:
    ordered = sorted(images, key=lambda image: image.source)
    if not ordered and not rejected:
        raise UserError(f"{where}: no images in it (jpg, jpeg, png, webp)")
    digest = hashlib.sha256()
    for image in ordered:
        caption = image.caption_bytes if image.caption is None else image.caption
        digest.update(json.dumps([image.source, image.bytes, caption]).encode())
    for item in rejected:
        digest.update(json.dumps([item.source, item.reason, item.detail]).encode())
    numbered = tuple(
        PackInput(number, one.source, one.address, one.bytes, one.caption, one.caption_address)
        for number, one in enumerate(ordered)
    )
    captions = tuple(
        len(one.caption.encode("utf-8", "surrogatepass"))
        if one.caption is not None
        else one.caption_bytes or 0
        for one in ordered
    )
    newest = max((one.changed_ns for one in ordered), default=0)
    return PackInputs(numbered, captions, tuple(rejected), digest.hexdigest(), newest)


def _local(source: str, path: Path, caption: str | None = None) -> SourceImage:
    """An image of this machine; what is not there is rejected when it is read."""
    size, changed = _size_and_time(path)
    if caption is not None:
        return SourceImage(source, str(path), size or 0, changed, caption)
    beside = path.with_suffix(".txt")
    caption_bytes, caption_changed = _size_and_time(beside)
    newest = max(changed, caption_changed)
    return SourceImage(source, str(path), size or 0, newest, None, str(beside), caption_bytes)


def _size_and_time(path: Path) -> tuple[int | None, int]:
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return None, 0
    return status.st_size, status.st_mtime_ns


def _images_below(folder: Path) -> Iterator[SourceImage]:
    """Images by their suffix; links are followed, but into no folder twice."""
    seen: set[tuple[int, int]] = set()
    for place, subfolders, names in os.walk(folder, followlinks=True, onerror=_raise):
        status = Path(place).stat()
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders.sort()
        for name in names:
            path = Path(place, name)
            if path.suffix.lower() in IMAGE_SUFFIXES:
                yield _local(path.relative_to(folder).as_posix(), path)


def _matching(pattern: str) -> Iterator[SourceImage]:
    """Images that a pattern names, by their paths below its fixed part."""
    parts = Path(pattern).parts
    fixed = next(number for number, part in enumerate(parts) if any(one in part for one in "*?["))
    root = Path(*parts[:fixed])
    for path in root.glob(str(Path(*parts[fixed:]))):
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
            yield _local(path.relative_to(root).as_posix(), path)


def objects_below(uri: str, access: S3Access) -> list[SourceImage]:
    """Images below an S3 prefix, each with the ``.txt`` object beside it."""
    bucket, prefix = split_uri(uri)
    listed: dict[str, ObjectTypeDef] = {}
    with translate_aws_errors(uri):
        pages = s3_client(access).get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=bucket, Prefix=prefix):
            listed |= {one["Key"]: one for one in page.get("Contents", [])}
    above = prefix if prefix.endswith("/") or not prefix else prefix.rpartition("/")[0] + "/"
    found = []
    for key, one in listed.items():
        stem, dot, suffix = key.rpartition(".")
        if f"{dot}{suffix}".lower() not in IMAGE_SUFFIXES:
            continue
        caption = listed.get(f"{stem}.txt")
        both = [one, caption] if caption else [one]
        found.append(
            SourceImage(
                source=key.removeprefix(above),
                address=f"s3://{bucket}/{key}",
                bytes=one["Size"],
                changed_ns=max(int(each["LastModified"].timestamp() * 1e9) for each in both),
                caption_address=f"s3://{bucket}/{stem}.txt",
                caption_bytes=caption["Size"] if caption else None,
            )
        )
    return found


def _raise(error: OSError) -> None:
    """A folder that cannot be listed ends the run: its images would be missed in silence."""
    raise error


def _rows(
    table: Path, root: str, image_column: str, caption_column: str, access: S3Access
) -> tuple[list[SourceImage], list[RejectedInput]]:
    images: list[SourceImage] = []
    remote: list[tuple[str, str]] = []
    rejected: list[RejectedInput] = []
    for number, row in enumerate(_read_table(table, (image_column, caption_column)), start=1):
        name, caption = row.get(image_column), row.get(caption_column)
        place = f"{table.name} row {number}"
        if not isinstance(name, str) or not name:
            rejected.append(RejectedInput(place, "image-missing", "the row names no image"))
            continue
        source = name
        if not name.startswith("s3://"):
            source = _below(root, name)
        if source == ".." or source.startswith("../"):
            rejected.append(
                RejectedInput(name, "outside-source", f"{place} leads out of the folder")
            )
        elif caption is None:
            rejected.append(RejectedInput(source, "caption-missing", f"{place} has no caption"))
        elif not isinstance(caption, str | int):
            rejected.append(RejectedInput(source, "caption-not-text", f"{place}: {caption!r:.60}"))
        elif source.startswith("s3://"):
            remote.append((source, str(caption)))
        elif root.startswith("s3://"):
            remote.append((f"{root.rstrip('/')}/{source}", str(caption)))
        else:
            images.append(_local(source, Path(root) / source, str(caption)))
    if not images and not rejected and not remote:
        raise UserError(f"{table}: a table without rows")
    return images + _sized(remote, access), rejected


def _below(root: str, name: str) -> str:
    """The path ``name`` of a table as a path below ``root``; begins with ``..`` if it is not."""
    if root.startswith("s3://"):
        return posixpath.relpath(posixpath.join("/root", name), "/root")
    return Path(os.path.relpath(Path(root) / name, root)).as_posix()


HEADS = 32
"""Objects that are asked for their sizes at the same time."""


def _sized(remote: list[tuple[str, str]], access: S3Access) -> list[SourceImage]:
    """Objects of a table with their sizes, which shards are planned by: one HEAD for each."""
    from botocore.exceptions import ClientError

    def head(row: tuple[str, str]) -> SourceImage:
        address, caption = row
        bucket, key = split_uri(address)
        try:
            said = s3_client(access).head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response["Error"].get("Code") not in ("404", "NoSuchKey"):
                raise
            return SourceImage(address, address, 0, 0, caption)  # rejected when it is read
        changed = int(said["LastModified"].timestamp() * 1e9)
        return SourceImage(address, address, said["ContentLength"], changed, caption)

    if not remote:
        return []
    with translate_aws_errors(remote[0][0]), ThreadPoolExecutor(HEADS) as pool:
        return list(pool.map(head, remote))


def _read_table(table: Path, columns: tuple[str, str]) -> list[Row]:
    """All rows of the table, the first row's number being 1.

    Bytes that are not UTF-8 come as lone surrogates, so that they cost one row and not the run.
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
        raise UserError(f"{table}: not a folder of images, nor a table ({', '.join(readers)})")
    return reader(table, columns)


def _require_columns(table: Path, wanted: Iterable[str], present: Iterable[str]) -> None:
    present = list(present)
    missing = [column for column in wanted if column not in present]
    if missing:
        raise UserError(
            f"{table}: no column {' and none '.join(map(repr, missing))}; it has "
            f"{', '.join(present) or 'none'} (--image-column, --caption-column)"
        )


def _read_csv(table: Path, columns: tuple[str, str]) -> list[Row]:
    with table.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        # strict: a quote that is never closed would swallow the rows behind it.
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
            except ValueError as error:
                raise UserError(f"{table}:{number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f"{table}:{number}: each line is an object of columns")
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
