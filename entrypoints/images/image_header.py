"""Reads format, size and orientation of an image file without decoding it.

JPEG, PNG and WebP headers are parsed here, in Python: a damaged file then cannot crash the process,
and packing and loading always agree on an image's size and orientation.

Color codes of HEIC and AVIF and profiles of JPEG 2000, which not all decoders tell, are read from
their boxes. A file is a sequence of boxes: a big-endian length of four bytes, which counts itself,
four letters, and the content, which may consist of boxes (ISO/IEC 14496-12, 4.2). Properties of
images are in `ipco`, and `ipma` says which of them an image has (ISO/IEC 23008-12, 9.3).
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from PIL import Image, UnidentifiedImageError

Content = bytes | memoryview

_ORIENTATION_TAG = 0x0112
"""EXIF's tag of the orientation."""

_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's start-of-frame markers; the three others define tables or are reserved (T.81, B.1.1.3)."""

_SCALABLE_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC9, 0xCA})
"""Frames of DCT blocks, sequential or progressive, which a decoder can reconstruct at a smaller
size. A lossless frame (SOF3) has no blocks: libjpeg-turbo before 3.1.4.1 writes it unscaled, beyond
the end of a buffer for the scaled image (its change log, 3.1.4.1, item 1)."""

_INTEGER_TYPES = {1: "B", 3: "H", 4: "I"}
"""EXIF's unsigned integers, as :mod:`struct` reads them."""

_EXIF_PREFIX = b"Exif\0\0"
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_RAW_PROFILE = b"Raw profile type "
_EXIF_PROFILES = (_RAW_PROFILE + b"exif", _RAW_PROFILE + b"APP1")
_MAX_PROFILE_BYTES = 2**20

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

_FILE_KINDS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"GIF8", "GIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "TIFF"),
    (0, b"MM\0+", "TIFF"),
    (0, b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"),
    (4, b"ftyphei", "HEIC"),
    (4, b"ftyphev", "HEIC"),
    (4, b"ftypmif1", "HEIC"),
    (4, b"ftypmsf1", "HEIC"),
    (4, b"ftyp", "MP4"),
    (0, b"8BPS", "PSD"),
    (0, b"%PDF", "PDF"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"qoif", "QOI"),
    (0, b"<svg", "SVG"),
    (0, b"<?xml", "SVG or other XML"),
    (0, b"<!DOCTYPE", "HTML"),
    (0, b"<!doctype", "HTML"),
    (0, b"<html", "HTML"),
    (0, b"PK\3\4", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
)
"""Offset, content and name of the signatures of other file formats; the first match counts."""


class DecodeError(ValueError):
    """An image cannot be used; ``reason`` is a fixed code, the message adds the detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[DecodeError], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


@dataclass(frozen=True)
class ImageHeader:
    """An image's format and its size in pixels as stored, before EXIF rotation.

    ``orientation`` is EXIF's, 1 to 8; 1 if there is none that can be read. ``components`` are a
    JPEG's channels. ``is_scalable`` is true for a JPEG that can be decoded at a smaller size.
    ``depth`` is in bits per channel.
    """

    format: Literal["jpeg", "png", "webp"]
    height: int
    width: int
    orientation: int
    components: int = 0
    is_scalable: bool = False
    depth: int = 8

    @property
    def displayed_size(self) -> tuple[int, int]:
        """Height and width with the orientation applied: 5 to 8 swap the sides."""
        if self.orientation >= 5:
            return self.width, self.height
        return self.height, self.width


def read_header(content: Content) -> ImageHeader:
    """Return an image's header.

    A PNG may carry its orientation after the pixels; ``content`` that ends before it has none.

    Raises:
        DecodeError: the content is not a JPEG, PNG or WebP, or its header is damaged.
    """
    if bytes(content[:3]) == b"\xff\xd8\xff":
        return _jpeg_header(content)
    if is_png(content):
        return _png_header(content)
    if bytes(content[:4]) == b"RIFF" and bytes(content[8:12]) == b"WEBP":
        return _webp_header(content)
    kind = file_kind(content)
    if kind is not None:
        raise DecodeError("image-kind", f"{kind}; not JPEG, PNG or WebP")
    raise DecodeError("image-corrupt", "not a JPEG, PNG or WebP")


def image_size(content: Content) -> tuple[int, int]:
    """Return height and width in pixels after EXIF rotation, from the header alone.

    Raises:
        DecodeError: the content is not a JPEG, PNG or WebP, or its header is damaged.
    """
    return read_header(content).displayed_size


def is_png(content: Content) -> bool:
    """Return whether the content starts like a PNG."""
    return bytes(content[:8]) == _PNG_SIGNATURE


def file_kind(content: Content) -> str | None:
    """Return the name of another file format that the content starts like; None if unknown."""
    head = bytes(content[:32]).lstrip() if bytes(content[:1]).isspace() else bytes(content[:32])
    for offset, signature, kind in _FILE_KINDS:
        if head[offset : offset + len(signature)] == signature:
            return kind
    return None


def _damaged(detail: str) -> DecodeError:
    return DecodeError("image-corrupt", detail)


# ------------------------------------------------------------------------------------ JPEG


def _jpeg_header(content: Content) -> ImageHeader:
    orientation = 1
    for marker, start, stop in _jpeg_segments(content):
        if marker == 0xE1 and orientation == 1:
            block = bytes(content[start:stop])
            if block.startswith(_EXIF_PREFIX):
                orientation = exif_orientation(block)
        if marker in _FRAME_MARKERS:
            if stop - start < 6 or stop > len(content):
                raise _damaged("the frame header is cut short")
            height, width, components = struct.unpack(">HHB", content[start + 1 : start + 6])
            if not height or not width:
                raise _damaged(f"{width} × {height} pixels")
            is_scalable = marker in _SCALABLE_FRAMES
            depth = content[start]
            return ImageHeader("jpeg", height, width, orientation, components, is_scalable, depth)
    # Bytes between the segments: Pillow, whose parser is Python as well, skips some of them.
    with open_image(content) as image:
        return ImageHeader("jpeg", image.height, image.width, orientation)


def _jpeg_segments(content: Content) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and stop of the segments' contents, up to the first scan.

    A segment is 0xFF, its marker, and a big-endian length of two bytes, which counts itself. Any
    number of 0xFF may precede a marker. Other bytes between segments are damage: a tolerant decoder
    might see other segments behind them than these, so nothing after them counts.
    """
    offset = 2  # after the start-of-image marker
    while offset + 4 <= len(content) and content[offset] == 0xFF:
        marker = content[offset + 1]
        if marker == 0xFF:
            offset += 1
            continue
        if marker < 0xC0 or 0xD0 <= marker <= 0xDA:  # no length, or a scan before any frame
            return
        length = content[offset + 2] << 8 | content[offset + 3]
        if length < 2:
            return
        yield marker, offset + 4, offset + 2 + length
        offset += 2 + length


def jpeg_icc_profile(content: Content) -> bytes | None:
    """Return a JPEG's ICC profile; None without one, or if a segment is missing or there twice.

    Each segment has its number, from 1 on, and how many there are (ICC.1:2022, B.4).
    """
    parts: dict[int, bytes] = {}
    counts: set[int] = set()
    segments = 0
    for marker, start, stop in _jpeg_segments(content):
        block = bytes(content[start:stop]) if marker == 0xE2 else b""
        if block.startswith(b"ICC_PROFILE\0") and len(block) > 14:
            parts[block[12]] = block[14:]
            counts.add(block[13])
            segments += 1
    if not parts or counts != {segments} or sorted(parts) != [*range(1, segments + 1)]:
        return None
    return b"".join(parts[number] for number in sorted(parts))


def ends_before_scan(head: Content) -> bool:
    """Return whether the first bytes of a JPEG hold all segments before its first scan."""
    end = 2
    for _, _, stop in _jpeg_segments(head):
        end = stop
    return bytes(head[end : end + 2]) == b"\xff\xda"


# ------------------------------------------------------------------------------------ PNG, WebP


def _png_header(content: Content) -> ImageHeader:
    if len(content) < 33 or bytes(content[12:16]) != b"IHDR":
        raise _damaged("the header is cut short")
    width, height = struct.unpack(">II", content[16:24])
    if not height or not width:
        raise _damaged(f"{width} × {height} pixels")
    orientation = 1
    for kind, block in png_chunks(content):
        if kind == b"eXIf":
            orientation = exif_orientation(bytes(block))
            break
        if kind in _PNG_TEXTS and bytes(block[: len(_RAW_PROFILE)]) == _RAW_PROFILE:
            orientation = exif_orientation(_raw_profile(kind, bytes(block)))
    return ImageHeader("png", height, width, orientation, depth=content[24])


def png_chunks(content: Content) -> Iterator[tuple[bytes, Content]]:
    """Yield kind and content of the chunks after a PNG's header, up to its end or that of a part.

    A chunk is a big-endian length, four letters, the content and a checksum of four bytes.
    """
    offset = 33
    while offset + 8 <= len(content):
        (length,) = struct.unpack(">I", content[offset : offset + 4])
        kind = bytes(content[offset + 4 : offset + 8])
        yield kind, content[offset + 8 : offset + 8 + length]
        if kind == b"IEND":
            return
        offset += 12 + length


def _raw_profile(kind: bytes, block: bytes) -> bytes:
    """Return the EXIF block in a PNG's text, as ImageMagick writes it; empty if it is none.

    The text is a name, a number of bytes, and so many in hexadecimal, each on lines of their own.
    """
    keyword, _, text = block.partition(b"\0")
    if keyword not in _EXIF_PROFILES:
        return b""
    is_compressed = kind == b"zTXt"
    if kind == b"iTXt":
        # A flag and the method of compression, a language and a translated keyword.
        is_compressed, (*_, text) = text[:1] == b"\1", text[2:].split(b"\0", 2)
    try:
        if is_compressed:
            start = 1 if kind == b"zTXt" else 0
            text = zlib.decompressobj().decompress(text[start:], _MAX_PROFILE_BYTES)
        _, _, _, *lines = text.split(b"\n")
        return bytes.fromhex(b"".join(lines).decode("ascii"))
    except (ValueError, zlib.error):  # the text is damaged; the image may still be intact
        return b""


def _webp_header(content: Content) -> ImageHeader:
    size, orientation = None, 1
    for kind, block in webp_chunks(content):
        if size is None:
            size = _webp_size(kind, bytes(block[:10]))
            if kind != b"VP8X":  # only the extended format carries EXIF
                break
        if kind == b"EXIF":
            orientation = exif_orientation(bytes(block))
            break
    if size is None:
        raise _damaged("the header is cut short")
    return ImageHeader("webp", *size, orientation)


def webp_chunks(content: Content) -> Iterator[tuple[bytes, Content]]:
    """Yield kind and content of a WebP's chunks; the last may be cut short.

    A chunk is four letters, a little-endian length and the content, padded to an even length.
    https://developers.google.com/speed/webp/docs/riff_container, read November 2026.
    """
    offset = 12
    while offset + 8 <= len(content):
        (length,) = struct.unpack("<I", content[offset + 4 : offset + 8])
        yield bytes(content[offset : offset + 4]), content[offset + 8 : offset + 8 + length]
        offset += 8 + length + length % 2


def _webp_size(kind: bytes, head: bytes) -> tuple[int, int]:
    """Return height and width from the first ten bytes of the first chunk."""
    if len(head) == 10:
        if kind == b"VP8X":  # 24 bits each, less one, after four bytes of flags
            width = int.from_bytes(head[4:7], "little") + 1
            return int.from_bytes(head[7:10], "little") + 1, width
        if kind == b"VP8 " and head[3:6] == b"\x9d\x01\x2a":  # 14 bits each, after a start code
            width, height = struct.unpack("<HH", head[6:10])
            if width & 0x3FFF and height & 0x3FFF:
                return height & 0x3FFF, width & 0x3FFF
        if kind == b"VP8L" and head[0] == 0x2F:  # 14 bits each, less one, after a signature
            bits = int.from_bytes(head[1:5], "little")
            return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    raise _damaged("the header is damaged")


# ------------------------------------------------------------------------------------ EXIF, Pillow


def exif_orientation(block: bytes) -> int:
    """Return the orientation in an EXIF block, 1 to 8; 1 if there is none that can be read.

    The block is a TIFF without pixels: byte order, offset of its first directory, and there a count
    and entries of 12 bytes: tag, type, number of values, and the value or its offset.
    """
    while block.startswith(_EXIF_PREFIX):
        block = block[len(_EXIF_PREFIX) :]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(block[:4])
    try:
        if order is None:
            return 1
        (start,) = struct.unpack_from(order + "I", block, 4)
        (count,) = struct.unpack_from(order + "H", block, start)
        for entry in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, values = struct.unpack_from(order + "HHI", block, entry)
            if tag == _ORIENTATION_TAG and values == 1 and kind in _INTEGER_TYPES:
                (value,) = struct.unpack_from(order + _INTEGER_TYPES[kind], block, entry + 8)
                return value if 1 <= value <= 8 else 1
    except struct.error:  # the block is damaged; the image may still be intact
        pass
    return 1


def open_image(content: Content) -> Image.Image:
    """Open an image with Pillow, without decoding it.

    Raises:
        DecodeError: the content is not a JPEG, PNG or WebP, or has too many pixels.
    """
    try:
        return Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP"))
    except UnidentifiedImageError:
        raise DecodeError("image-corrupt", "not a JPEG, PNG or WebP") from None
    except Image.DecompressionBombError as error:
        raise DecodeError("image-bomb", str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        raise corrupt_image_error(error) from None


def corrupt_image_error(error: Exception) -> DecodeError:
    """Wrap an error of a decoder, reduced to its first line."""
    detail = next(iter(str(error).splitlines()), "") or type(error).__name__
    return DecodeError("image-corrupt", detail)


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
