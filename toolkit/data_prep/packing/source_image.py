"""An image that was found in a source, before it is part of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.data_prep.packing.plan import CAPTION_SUFFIXES


@dataclass(frozen=True)
class SourceImage:
    """An image to pack, with the sizes and times that reveal a change.

    ``source`` is its path below the source folder, with forward slashes, or its URI. Its caption is
    ``caption`` if it comes from a table, and otherwise the text at ``caption_address``.
    ``table_fields`` is a JSON object with what the table says of it.
    ``modified_ns`` is the latest modification of image or caption, Unix nanoseconds.
    """

    source: str
    address: str
    bytes: int
    modified_ns: int
    caption: str | None = None
    caption_address: str | None = None
    caption_bytes: int | None = None
    table_fields: str | None = None


def local_image(
    source: str, path: Path, caption: str | None = None, table_fields: str | None = None
) -> SourceImage:
    """Describe a local image. A missing file gets size 0 and is rejected when it is read."""
    size, modified = _size_and_time(path)
    if caption is not None:
        return SourceImage(
            source, str(path), size or 0, modified, caption, table_fields=table_fields
        )
    for suffix in CAPTION_SUFFIXES:
        caption_path = path.with_suffix(suffix)
        caption_bytes, caption_modified = _size_and_time(caption_path)
        if caption_bytes is not None:
            break
    else:
        caption_path = path.with_suffix(CAPTION_SUFFIXES[0])
    newest = max(modified, caption_modified)
    return SourceImage(source, str(path), size or 0, newest, None, str(caption_path), caption_bytes)


def _size_and_time(path: Path) -> tuple[int | None, int]:
    """Return a file's size and modification time; (None, 0) if it does not exist."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return None, 0
    return status.st_size, status.st_mtime_ns
