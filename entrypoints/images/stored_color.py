"""Reads what an image file states about its colors, without decoding it.

JPEG, PNG and WebP are read from their bytes, of which the first ones suffice for everything but the
profile itself; what other formats state, Pillow and :mod:`nclx` read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sm_train.entrypoints.images.icc_profile import profile_name, profile_transfer
from sm_train.entrypoints.images.image_header import (
    Content,
    DecodeError,
    ImageHeader,
    ends_before_scan,
    jpeg_icc_profile,
    png_chunks,
    read_header,
    webp_chunks,
)

Channels = Literal["gray", "RGB", "CMYK"]

_PQ, _HLG = 16, 18
_TRANSFERS_LIKE_SRGB = frozenset((1, 2, 6, 13, 14, 15))
"""Transfer characteristics of ITU-T H.273. Browsers take those of SDR video (1, 6, 14 and 15) and
an unspecified one (2) for sRGB's (Chromium 156, tried with AVIF)."""

_PRIMARIES = {
    1: "sRGB",
    2: "sRGB",
    5: "BT.601 (625 lines)",
    6: "BT.601 (525 lines)",
    7: "BT.601 (525 lines)",
    9: "BT.2020",
    12: "Display P3",
}
"""Color primaries of ITU-T H.273 with the white of sRGB; 2 is unspecified."""

_SRGB_GAMMA = 45455
_SRGB_CHROMATICITIES = (31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)
"""What a PNG in sRGB states in `gAMA` and `cHRM` (PNG, third edition, 11.3.2.5)."""

_GRAY_COLOR_TYPES = (0, 4)
"""PNG's color types of gray images, without and with alpha."""

_WEBP_PROFILE_FLAG = 0x20
"""The flag of a WebP's first chunk without which decoders ignore its profile."""

_MAX_PROFILE_BYTES = 2**24


@dataclass(frozen=True)
class StoredColor:
    """What an image file states about its colors.

    ``profile`` is its ICC profile; ``primaries`` and ``transfer`` are codes of ITU-T H.273, which
    HEIC and AVIF state in their `nclx` box. ``unconverted`` names another signal, which is counted
    and not applied. ``depth`` is in bits per channel.
    """

    channels: Channels
    depth: int
    profile: bytes | None = None
    primaries: int = 2
    transfer: int = 2
    unconverted: str | None = None

    @property
    def hdr(self) -> str | None:
        """The name of the transfer function of an HDR image; None for others."""
        codes = (self.transfer, profile_transfer(self.profile) if self.profile else 2)
        return next((name for code, name in _HDR.items() if code in codes), None)

    @property
    def name(self) -> str:
        """The name of its profile: that of a known color space, or ``none``, or what it is of."""
        if self.profile is not None:
            return profile_name(self.profile)
        return "none" if self.space is None else self.space

    @property
    def code(self) -> str:
        """Its facts as an index keeps them: `Adobe RGB/RGB/8`, with `HDR` or a signal at the end.

        :mod:`sm_train.entrypoints.sample_metadata.color_counts` reads it.
        """
        signal = f"HDR {self.hdr}" if self.hdr is not None else self.unconverted
        parts = (self.name, self.channels, str(self.depth), *([signal] if signal else []))
        return "/".join(parts)

    @property
    def space(self) -> str | None:
        """The space that codes alone state, if it is none that counts as sRGB; else None."""
        space = _PRIMARIES.get(self.primaries, "sRGB")
        is_known = self.profile is None and self.transfer in _TRANSFERS_LIKE_SRGB
        return space if is_known and space != "sRGB" else None


_HDR = {_PQ: "PQ", _HLG: "HLG"}


def read_stored_color(content: Content, header: ImageHeader | None = None) -> StoredColor:
    """Return what a JPEG, PNG or WebP states about its colors; of one cut short, what is there.

    Raises:
        DecodeError: its header is damaged, or it has another format.
    """
    header = header or read_header(content)
    if header.format == "jpeg":
        channels: dict[int, Channels] = {1: "gray", 4: "CMYK"}
        profile = jpeg_icc_profile(content)
        return StoredColor(channels.get(header.components, "RGB"), header.depth, profile)
    if header.format == "png":
        return _png_color(content, header)
    profile = next((bytes(block) for kind, block in webp_chunks(content) if kind == b"ICCP"), None)
    is_extended = bytes(content[12:16]) == b"VP8X" and bool(content[20] & _WEBP_PROFILE_FLAG)
    return StoredColor("RGB", header.depth, (profile or None) if is_extended else None)


def has_whole_profile(head: Content) -> bool:
    """Return whether the first bytes of a JPEG or WebP hold its profile, if it has one."""
    if bytes(head[:4]) == b"RIFF":
        (length,) = struct.unpack("<I", head[34:38]) if len(head) >= 38 else (0,)
        return bytes(head[30:34]) != b"ICCP" or len(head) >= 38 + length
    return ends_before_scan(head)


ImageFacts = tuple[tuple[int, int], str | None]
"""Height and width of an upright image, and the code of its colors."""

UNKNOWN_FACTS: ImageFacts = ((0, 0), None)
"""Those of an image that cannot be read."""


def image_facts(content: Content) -> ImageFacts:
    """Return what an index keeps of an image, :data:`UNKNOWN_FACTS` if it cannot be read."""
    try:
        header = read_header(content)
        return header.displayed_size, read_stored_color(content, header).code
    except DecodeError:
        return UNKNOWN_FACTS


def check_hdr(color: StoredColor) -> None:
    """Reject an HDR image, whose levels mean other lights than those of all other images.

    Raises:
        DecodeError: it is one.
    """
    if color.hdr is not None:
        raise DecodeError("image-hdr", f"its levels are {color.hdr} (BT.2100)")


def _png_color(content: Content, header: ImageHeader) -> StoredColor:
    channels: Channels = "gray" if content[25] in _GRAY_COLOR_TYPES else "RGB"
    chunks = {kind: bytes(block) for kind, block in _before_pixels(content)}
    # In the order in which a reader that knows all of them obeys them (PNG, third edition, 4.3).
    if len(cicp := chunks.get(b"cICP", b"")) == 4:
        primaries, transfer = cicp[0], cicp[1]
        color = StoredColor(channels, header.depth, transfer=transfer)
        is_srgb = _PRIMARIES.get(primaries) == "sRGB" and transfer in _TRANSFERS_LIKE_SRGB
        if color.hdr is not None or is_srgb:
            return color
        profile = _png_profile(chunks)  # for readers that do not know these codes
        signal = "cICP" if profile is None else None
        return StoredColor(channels, header.depth, profile, unconverted=signal)
    if (profile := _png_profile(chunks)) is not None or b"sRGB" in chunks:
        return StoredColor(channels, header.depth, profile)
    return StoredColor(channels, header.depth, unconverted=_other_signal(chunks))


def _other_signal(chunks: dict[bytes, bytes]) -> str | None:
    """Return the chunk with which a PNG states other colors than those of sRGB."""
    chromaticities = chunks.get(b"cHRM", b"")
    if len(chromaticities) == 32:
        stated = struct.unpack(">8I", chromaticities)
        # Programs round them to three digits.
        if any(abs(a - b) > 100 for a, b in zip(stated, _SRGB_CHROMATICITIES, strict=True)):
            return "cHRM"
    gamma = chunks.get(b"gAMA", b"")
    if len(gamma) == 4 and abs(struct.unpack(">I", gamma)[0] - _SRGB_GAMMA) > 500:
        return "gAMA"
    return None


def _png_profile(chunks: dict[bytes, bytes]) -> bytes | None:
    """Return a PNG's profile: after a name, a zero and the method of compression."""
    _, _, block = chunks.get(b"iCCP", b"").partition(b"\0")
    try:
        return zlib.decompressobj().decompress(block[1:], _MAX_PROFILE_BYTES) or None
    except zlib.error:
        return None


def _before_pixels(content: Content) -> Iterator[tuple[bytes, Content]]:
    for kind, block in png_chunks(content):
        if kind == b"IDAT":
            return
        yield kind, block
