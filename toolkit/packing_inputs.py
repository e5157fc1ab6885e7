"""Finds what is to be packed: images in a folder, captions beside them or in a table."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm_train.entrypoints.shard_index import Refused
from sm_train.toolkit.errors import UserError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})

Row = dict[str, Any]


@dataclass(frozen=True)
class Input:
    """One image to pack.

    ``source`` is its path below the source folder, with forward slashes. ``caption`` comes from
    a table; None stands for the ``.txt`` file beside the image.
    """

    source: str
    path: Path
    caption: str | None = None

    @property
    def caption_path(self) -> Path:
        return self.path.with_suffix(".txt")


@dataclass(frozen=True)
class Inputs:
    """Everything found, in the order in which it is packed, and rows that name no image."""

    images: tuple[Input, ...]
    refused: tuple[Refused, ...]
    fingerprint: str
    """SHA-256 over names, sizes and table captions: cheap, and the same wherever they lie."""
    newest_ns: int
    """Latest modification of any file, Unix nanoseconds: what the fingerprint cannot see."""


def find_inputs(
    source: Path, captions: Path | None, *, image_column: str, caption_column: str
) -> Inputs:
    """List what ``source`` holds, sorted by path; captions are read only where a table has them.

    ``source`` is a folder, searched to the bottom, or a table of images and captions whose paths
    are relative to its own folder. With ``captions`` the table says which images of the folder
    are packed; an image that it names twice is packed twice.

    Raises:
        UserError: no such source, no images in it, or a table that cannot be used.
    """
    if not source.exists():
        raise UserError(f"{source}: no such folder or table")
    if source.is_dir() and captions is None:
        return _inputs(source, _images_below(source), [])
    table, root = (captions, source) if captions else (source, source.parent)
    if not root.is_dir():
        raise UserError(f"{source}: with --captions the source is the images' folder")
    images, refused = _rows_as_inputs(table, root, image_column, caption_column)
    return _inputs(table, images, refused)


def _inputs(where: Path, images: Iterable[Input], refused: list[Refused]) -> Inputs:
    ordered = tuple(sorted(images, key=lambda image: image.source))
    if not ordered and not refused:
        raise UserError(f"{where}: no images in it (jpg, jpeg, png, webp)")
    digest = hashlib.sha256()
    newest = 0
    for image in ordered:
        size, changed = _size_and_time(image.path)
        caption: str | int | None = image.caption
        if caption is None:
            caption, caption_changed = _size_and_time(image.caption_path)
            changed = max(changed, caption_changed)
        digest.update(json.dumps([image.source, size, caption]).encode())
        newest = max(newest, changed)
    for item in refused:
        digest.update(json.dumps([item.source, item.reason, item.detail]).encode())
    return Inputs(ordered, tuple(refused), digest.hexdigest(), newest)


def _size_and_time(path: Path) -> tuple[int | None, int]:
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return None, 0
    return status.st_size, status.st_mtime_ns


def _images_below(folder: Path) -> Iterator[Input]:
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
                yield Input(path.relative_to(folder).as_posix(), path)


def _raise(error: OSError) -> None:
    """A folder that cannot be listed ends the run: its images would be missed in silence."""
    raise error


def _rows_as_inputs(
    table: Path, root: Path, image_column: str, caption_column: str
) -> tuple[list[Input], list[Refused]]:
    images: list[Input] = []
    refused: list[Refused] = []
    for number, row in enumerate(_read_table(table, (image_column, caption_column)), start=1):
        name, caption = row.get(image_column), row.get(caption_column)
        place = f"{table.name} row {number}"
        if not isinstance(name, str) or not name:
            refused.append(Refused(place, "image-missing", "the row names no image"))
            continue
        source = Path(os.path.relpath(root / name, root)).as_posix()
        if source == ".." or source.startswith("../"):
            refused.append(Refused(name, "outside-source", f"{place} leads out of the folder"))
        elif caption is None:
            refused.append(Refused(source, "caption-missing", f"{place} has no caption"))
        elif not isinstance(caption, str | int):
            refused.append(Refused(source, "caption-not-text", f"{place}: {caption!r:.60}"))
        else:
            images.append(Input(source, root / source, str(caption)))
    if not images and not refused:
        raise UserError(f"{table}: a table without rows")
    return images, refused


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
