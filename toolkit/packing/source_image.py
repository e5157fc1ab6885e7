"""An image that was found in a source, before it is part of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SourceImage:
    """An image to pack, with the sizes and times that reveal a change.

    ``source`` is its path below the source folder, with forward slashes, or its URI. Its caption is
    ``caption`` if it comes from a table, and otherwise the text at ``caption_address``.
    ``modified_ns`` is the latest modification of image or caption, Unix nanoseconds.
    """

    source: str
    address: str
    bytes: int
    modified_ns: int
    caption: str | None = None
    caption_address: str | None = None
    caption_bytes: int | None = None
