"""An image file's bytes → its pixels at the training size, at the speed of the JPEG decoder.

JPEG goes through libjpeg-turbo (simplejpeg), at a half, a quarter or an eighth of its size where
that still covers the target: the decoder then skips most of its work. Everything else, and every
JPEG that libjpeg-turbo has a complaint about, goes through Pillow, which knows more kinds. Scaling
is PyTorch's antialiased one for uint8, which agrees with Pillow's to one level.

What comes out is always sRGB as stored: colour profiles are not applied. An image with
transparency is laid on white. The EXIF orientation is applied.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps
from sm_train.entrypoints.common.rng import random_below
from sm_train.entrypoints.data.image_header import (
    DecodeError,
    corrupt_image_error,
    is_jpeg,
    jpeg_orientation,
    open_image,
)
from torch import Tensor

Pixels = NDArray[np.uint8]

MAX_PIXELS = 2**27
"""134 megapixels: a larger image is refused before anything of it is decoded."""

LARGE_PIXELS = 2**24
"""Of images with more pixels than this a process decodes one at a time, to bound its memory."""

_BUFFER_LIMIT = 3 * LARGE_PIXELS


@dataclass(frozen=True)
class DecodeSpec:
    """What an image becomes: ``height`` × ``width`` pixels, cut from its middle or at random.

    A random cut is a pure function of ``seed`` and of the numbers that :meth:`decode` is given.
    """

    height: int
    width: int
    crop: Literal["center", "random"] = "center"
    mode: Literal["bilinear", "bicubic"] = "bicubic"
    seed: int = 0

    def decode(self, content: bytes | memoryview, out: Tensor, *key: int) -> None:
        """Fill ``out``, uint8 (height, width, 3).

        Raises:
            DecodeError: the image is damaged, of no kind that is known here, or too large.
        """
        pixels, orientation = _decode(content, self)
        turned = orientation >= 5
        height, width = (self.width, self.height) if turned else (self.height, self.width)
        square = _crop(pixels, height, width, self._place(key))
        if orientation == 1:
            _scale(square, out, self.mode)
            return
        upright = torch.empty((height, width, 3), dtype=torch.uint8)
        _scale(square, upright, self.mode)
        out.copy_(_turn(upright, orientation))

    def _place(self, key: tuple[int, ...]) -> float:
        """Where along its play the cut lies: 0 at the start, 1 at the end."""
        if self.crop == "center":
            return 0.5
        return random_below(2**32, self.seed, *key) / (2**32 - 1)


def _decode(content: bytes | memoryview, target: DecodeSpec) -> tuple[Pixels, int]:
    """Pixels (H, W, 3), not yet turned, and the EXIF orientation to turn them by."""
    if is_jpeg(content):
        orientation = jpeg_orientation(content)
        try:
            pixels = _decode_jpeg(content, target, turned=orientation >= 5)
        except (ValueError, KeyError):
            # Damaged, or merely odd: Pillow tells the two apart.
            pixels = None
        if pixels is not None:
            return pixels, orientation
    return _decode_any(content), 1


def _decode_jpeg(content: bytes | memoryview, target: DecodeSpec, *, turned: bool) -> Pixels | None:
    """None for colours that libjpeg-turbo does not turn into RGB.

    Raises:
        ValueError: libjpeg-turbo has something to complain about.
        DecodeError: too many pixels.
    """
    height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    _require_pixels(height, width)
    if colours in ("CMYK", "YCCK"):
        return None
    wanted = (target.width, target.height) if turned else (target.height, target.width)
    factor = 8
    while factor > 1 and not _covers(-(-height // factor), -(-width // factor), *wanted):
        factor //= 2
    scaled = -(-height // factor), -(-width // factor)
    with _alone(height * width):
        pixels: Pixels = simplejpeg.decode_jpeg(
            content,
            min_height=scaled[0],
            min_width=scaled[1],
            min_factor=factor,
            buffer=_buffer(3 * scaled[0] * scaled[1]),
        )
    return pixels


def _covers(height: int, width: int, wanted_height: int, wanted_width: int) -> bool:
    return height >= wanted_height and width >= wanted_width


def _require_pixels(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise DecodeError("image-bomb", f"{width} × {height} pixels; {MAX_PIXELS:,} at most")


_INTO = {
    # What torch.nn.functional.interpolate(antialias=True) calls, which cannot be told where to.
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}

_large = threading.Lock()


def _alone(pixels: int) -> AbstractContextManager[object]:
    return _large if pixels > LARGE_PIXELS else nullcontext()


class _Buffers(threading.local):
    """One for each thread, kept: new memory of this size costs a page fault for each 4 KiB."""

    content: NDArray[np.uint8] | None = None


_buffers = _Buffers()


def _buffer(size: int) -> NDArray[np.uint8] | None:
    if size > _BUFFER_LIMIT:
        return None
    if _buffers.content is None or _buffers.content.size < size:
        _buffers.content = np.empty(size, np.uint8)
    return _buffers.content


def _decode_any(content: bytes | memoryview) -> Pixels:
    """Pillow's way, for every kind: RGB pixels, upright."""
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # whatever other code set
    with open_image(content) as image, _alone(image.width * image.height):
        _require_pixels(image.height, image.width)
        try:
            return np.array(_to_rgb(ImageOps.exif_transpose(image)))
        except (MemoryError, DecodeError):
            raise
        except Exception as error:  # as above, SyntaxError and struct.error among them
            raise corrupt_image_error(error) from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16 bits a pixel; Pillow's own conversion would cut everything above 255.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise DecodeError("image-mode", "floating-point pixels have no agreed range")
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, "white")
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def _crop(pixels: Pixels, height: int, width: int, place: float) -> Pixels:
    """The largest cut of the shape ``height`` : ``width``; ``place`` is 0 to 1 along its play."""
    whole_height, whole_width = pixels.shape[:2]
    cut_height = min(whole_height, max(1, round(whole_width * height / width)))
    cut_width = min(whole_width, max(1, round(whole_height * width / height)))
    top = int((whole_height - cut_height) * place)
    left = int((whole_width - cut_width) * place)
    return pixels[top : top + cut_height, left : left + cut_width]


def _scale(pixels: Pixels, out: Tensor, mode: Literal["bilinear", "bicubic"]) -> None:
    source = torch.from_numpy(pixels)
    if source.shape == out.shape:
        out.copy_(source)
        return
    # With the strides of a batch in channels-last order, one picture too takes PyTorch's
    # vectorised path for uint8, and is written straight to its place.
    planes, into = (one[None].permute(0, 3, 1, 2) for one in (source, out))
    _INTO[mode](planes, list(out.shape[:2]), False, None, None, out=into)


def _turn(upright: Tensor, orientation: int) -> Tensor:
    """EXIF's eight orientations: transposed for 5 to 8, then mirrored along one axis or both."""
    turned = upright.transpose(0, 1) if orientation >= 5 else upright
    flips = {2: [1], 3: [0, 1], 4: [0], 6: [1], 7: [0, 1], 8: [0]}.get(orientation, [])
    return turned.flip(flips) if flips else turned
