"""Looks at one input: a whole image with a caption becomes a sample, anything else is refused.

This runs in worker processes, so it imports little and what it returns can be pickled.
"""

from __future__ import annotations

import hashlib
import io
import stat
import warnings
from pathlib import Path

from sm_train.entrypoints.shard_index import Refused
from sm_train.entrypoints.shard_writer import Sample
from sm_train.toolkit.packing_inputs import Input

MAX_BYTES = 1 << 30
"""Larger files are refused unread: several are in memory at a time."""

_FORMATS = {"JPEG": "jpeg", "MPO": "jpeg", "PNG": "png", "WEBP": "webp"}
"""Pillow's name → ours. An MPO (telephones write it) is a JPEG with more images behind it."""

_PNG_END = b"IEND\xaeB`\x82"


class _RefusedError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def examine(item: Input) -> Sample | Refused:
    """Read, fully decode and describe one input. Never raises for what is wrong with it."""
    try:
        image = _read("image", item.path)
        width, height, kind = _decode(image)
        caption = _caption(item)
    except _RefusedError as refusal:
        return Refused(item.source, refusal.reason, refusal.detail)
    digest = hashlib.sha256(image).hexdigest()
    return Sample(image, caption, width, height, kind, digest, item.source)


def _read(part: str, path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would block
            raise _RefusedError(f"{part}-unreadable", f"{path.name} is not a regular file")
        if status.st_size > MAX_BYTES:
            raise _RefusedError(f"{part}-too-large", f"{status.st_size} bytes; 1 GiB at most")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # ValueError: a zero byte in the name, which no file has.
        raise _RefusedError(f"{part}-missing", f"no file {path.name}") from None
    except OSError as error:
        raise _RefusedError(f"{part}-unreadable", error.strerror or str(error)) from None


def _decode(image: bytes) -> tuple[int, int, str]:
    """Width and height in pixels as stored, and the format; every pixel is decoded."""
    from PIL import Image, ImageFile, UnidentifiedImageError

    if not image:
        raise _RefusedError("image-empty", "zero bytes")
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # whatever other code set
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd but whole files
            with Image.open(io.BytesIO(image), formats=("JPEG", "PNG", "WEBP")) as picture:
                picture.load()
                kind = _FORMATS[picture.format or ""]
                width, height = picture.size
    except Image.DecompressionBombError:
        raise _RefusedError(
            "image-bomb", f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0)} pixels"
        ) from None
    except UnidentifiedImageError:
        raise _RefusedError("image-corrupt", "not a JPEG, PNG or WebP") from None
    except MemoryError:
        raise
    except Exception as error:
        # Pillow's decoders raise almost anything on damaged files (OSError, SyntaxError,
        # struct.error, IndexError …), and none of it may end the run.
        detail = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise _RefusedError("image-corrupt", detail) from None
    if kind == "png" and _PNG_END not in image:
        # Pillow is content once it has every pixel; stricter decoders are not.
        raise _RefusedError("image-corrupt", "the end of the PNG is missing")
    return width, height, kind


def _caption(item: Input) -> str:
    """The caption without the white space and the byte order mark around it."""
    try:
        if item.caption is None:
            raw = _read("caption", item.caption_path)
        else:
            raw = item.caption.encode("utf-8", "surrogateescape")  # the table's own bytes again
        caption = raw.decode("utf-8-sig").strip()
    except UnicodeError:
        raise _RefusedError("caption-not-utf8", "the caption is not UTF-8 text") from None
    if not caption:
        raise _RefusedError("caption-empty", "nothing but white space")
    return caption
