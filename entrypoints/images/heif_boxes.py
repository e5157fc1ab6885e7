"""Reads color codes of HEIC and AVIF and profiles of JPEG 2000, which decoders do not all tell.

A file is a sequence of boxes: a big-endian length of four bytes, which counts itself, four letters,
and the content, which may consist of boxes (ISO/IEC 14496-12, 4.2). Properties of images are in
`ipco`, and `ipma` says which of them an image has (ISO/IEC 23008-12, 9.3).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from sm_train.entrypoints.images.image_header import Content

_FULL_BOX_BYTES = 4
"""A version and flags begin the content of `meta`, `pitm` and `ipma`."""

_WIDE_INDEX_FLAG, _ESSENTIAL_BITS = 1, (0x7F, 0x7FFF)
"""A flag of `ipma`, and the bits of an index that are not the mark of an essential property."""


_MOST_BOXES = 4096
"""Boxes of a level that are looked at; a photo has a dozen, and a damaged file any number."""

_RESTRICTED_PROFILE = 2
"""The method of a `colr` box of JP2 that holds an ICC profile."""


def primary_color_codes(content: Content) -> tuple[int, int] | None:
    """Return primaries and transfer characteristics of ITU-T H.273 of the primary image.

    None if the file states none, or is damaged.
    """
    try:
        return _primary_codes(content)
    except (struct.error, IndexError, StopIteration):
        return None


def _primary_codes(content: Content) -> tuple[int, int] | None:
    meta = dict(_boxes(_first(memoryview(content), b"meta")[_FULL_BOX_BYTES:]))
    properties = list(_boxes(meta.get(b"iprp", b"")))
    listed = list(_boxes(next(block for kind, block in properties if kind == b"ipco")))
    primary = _item_id(meta.get(b"pitm", b""))
    associations = (block for kind, block in properties if kind == b"ipma")
    for index in (index for ipma in associations for index in _property_indexes(ipma, primary)):
        kind, block = listed[index - 1]
        if kind == b"colr" and bytes(block[:4]) == b"nclx":
            primaries, transfer = struct.unpack(">HH", block[4:8])
            return primaries, transfer
    return None


def jpeg_2000_profile(content: Content) -> bytes | None:
    """Return the ICC profile of a JP2 file, which Pillow does not tell (ITU-T T.800, I.5.3.3)."""
    try:
        for kind, block in _boxes(_first(memoryview(content), b"jp2h")):
            if kind == b"colr" and block[0] == _RESTRICTED_PROFILE:
                return bytes(block[3:]) or None
    except (struct.error, IndexError):
        pass
    return None


def _first(content: Content, wanted: bytes) -> Content:
    return next((block for kind, block in _boxes(content) if kind == wanted), b"")


def _boxes(content: Content) -> Iterator[tuple[bytes, Content]]:
    offset = 0
    for _ in range(_MOST_BOXES):
        if offset + 8 > len(content):
            return
        (size,) = struct.unpack(">I", content[offset : offset + 4])
        start = offset + 8
        if size == 1:
            (size,) = struct.unpack(">Q", content[start : start + 8])
            start += 8
        stop = len(content) if size == 0 else offset + size
        if stop < start:  # damaged: a box is no smaller than its header
            return
        yield bytes(content[offset + 4 : offset + 8]), content[start:stop]
        offset = stop


def _item_id(pitm: Content) -> int:
    """Return the number of the primary image, of 2 bytes in version 0 and 4 in version 1."""
    start = _FULL_BOX_BYTES
    (number,) = struct.unpack_from(">I" if pitm[0] else ">H", pitm, start)
    return int(number)


def _property_indexes(ipma: Content, item: int) -> list[int]:
    """Return the numbers of an image's properties in `ipco`, from 1 on."""
    version, is_wide = ipma[0], bool(ipma[3] & _WIDE_INDEX_FLAG)
    (count,) = struct.unpack_from(">I", ipma, _FULL_BOX_BYTES)
    offset = _FULL_BOX_BYTES + 4
    size = 2 if is_wide else 1
    for _ in range(count):
        (found,) = struct.unpack_from(">H" if version < 1 else ">I", ipma, offset)
        offset += 2 if version < 1 else 4
        number = ipma[offset]
        offset += 1
        if found == item:
            indexes = struct.unpack_from(f">{number}{'H' if is_wide else 'B'}", ipma, offset)
            masked = [index & _ESSENTIAL_BITS[is_wide] for index in indexes]
            return [index for index in masked if index]
        offset += size * number
    return []
