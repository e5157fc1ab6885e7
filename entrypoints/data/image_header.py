"""What an image file says of itself before it is decoded: its kind, sides and orientation."""

from __future__ import annotations

import io

import simplejpeg
from PIL import Image, UnidentifiedImageError

_ORIENTATION = 0x0112  # EXIF's tag


class DecodeError(ValueError):
    """An image cannot be used: a fixed code, and the detail for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def image_size(content: bytes | memoryview) -> tuple[int, int]:
    """Height and width in pixels after EXIF's rotation, from the header alone.

    Raises:
        DecodeError: no JPEG, PNG or WebP begins here.
    """
    if is_jpeg(content):
        height, width = jpeg_size(content)
        return (width, height) if jpeg_orientation(content) >= 5 else (height, width)
    with open_image(content) as image:
        turned = exif_orientation(image.info.get("exif", b"")) >= 5
        return (image.width, image.height) if turned else (image.height, image.width)


def is_jpeg(content: bytes | memoryview) -> bool:
    """Whether a JPEG begins here."""
    return bytes(content[:3]) == b"\xff\xd8\xff"


def jpeg_size(content: bytes | memoryview) -> tuple[int, int]:
    """Height and width of a JPEG as stored.

    Raises:
        DecodeError: its header is damaged.
    """
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(content, strict=False)
    except ValueError as error:
        raise corrupt_image_error(error) from None
    except KeyError:  # it looks colours up that a header cut short does not name
        raise DecodeError("image-corrupt", "the header is cut short") from None
    return height, width


def jpeg_orientation(content: bytes | memoryview) -> int:
    """The EXIF orientation of a JPEG, 1 to 8; 1 where it has none."""
    place = 2
    # Through the application segments, which stand first, to the one that holds EXIF.
    while len(content) >= place + 10 and content[place] == 0xFF and content[place + 1] >= 0xE0:
        behind = place + 2 + content[place + 2] * 256 + content[place + 3]
        if content[place + 1] == 0xE1 and content[place + 4 : place + 10] == b"Exif\0\0":
            return exif_orientation(bytes(content[place + 4 : behind]))
        place = behind
    return 1


def exif_orientation(block: bytes) -> int:
    """The orientation that an EXIF block tells, 1 to 8; 1 where there is none that can be read."""
    exif = Image.Exif()
    try:
        exif.load(block)
        value = exif.get(_ORIENTATION)
    except Exception:  # a damaged block: whatever Pillow raises, the image may be whole
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def open_image(content: bytes | memoryview) -> Image.Image:
    """Pillow's image, not yet decoded.

    Raises:
        DecodeError: no JPEG, PNG or WebP begins here, or it has too many pixels.
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
    """What a decoder's complaint becomes."""
    detail = next(iter(str(error).splitlines()), "") or type(error).__name__
    return DecodeError("image-corrupt", detail)
