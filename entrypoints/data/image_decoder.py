"""Decodes image files to pixels at the training size, at the speed of the JPEG decoder.

JPEG goes through libjpeg-turbo (simplejpeg), at a half, a quarter or an eighth of its size if that
still covers the target: the decoder then skips most of its work. Every other format, and every
JPEG that libjpeg-turbo rejects, goes through Pillow, which supports more variants. Scaling is
PyTorch's antialiased one for uint8, which agrees with Pillow's to one level.

The result is sRGB as stored: color profiles are not applied. Transparent images are laid on
white. The EXIF orientation is applied.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile
from sm_train.entrypoints.common.rng import random_below
from sm_train.entrypoints.data.image_header import (
    DecodeError,
    ImageHeader,
    corrupt_image_error,
    open_image,
    read_header,
)
from torch import Tensor

Pixels = NDArray[np.uint8]
Interpolation = Literal["bilinear", "bicubic"]

MAX_PIXELS = 2**27
"""134 megapixels: a larger image is rejected before anything of it is decoded."""

LARGE_PIXELS = 2**24
"""A process decodes images with more pixels than this one at a time, to bound its memory."""

_MAX_KEPT_BUFFER_BYTES = 3 * LARGE_PIXELS


@dataclass(frozen=True)
class DecodeSpec:
    """How an image becomes ``height`` × ``width`` pixels.

    The largest crop of that shape is cut from the image's middle or from a random place, and
    scaled. A random place is a pure function of ``seed`` and the key given to :meth:`decode`.
    """

    height: int
    width: int
    crop: Literal["center", "random"] = "center"
    mode: Interpolation = "bicubic"
    seed: int = 0

    def decode(self, content: bytes | memoryview, out: Tensor, *key: int) -> None:
        """Decode ``content`` into ``out``, uint8 (height, width, 3).

        Raises:
            DecodeError: the image is damaged, of an unknown format, or too large.
        """
        pixels, orientation = _decode(content, self)
        # Orientations 5 to 8 swap the sides. Crop and scale come first, because turning the
        # small result is cheaper.
        is_transposed = orientation >= 5
        height, width = (self.width, self.height) if is_transposed else (self.height, self.width)
        cropped = _crop(pixels, height, width, self._crop_position(key))
        if orientation == 1:
            _scale(cropped, out, self.mode)
            return
        scaled = torch.empty((height, width, 3), dtype=torch.uint8)
        _scale(cropped, scaled, self.mode)
        out.copy_(_apply_orientation(scaled, orientation))

    def _crop_position(self, key: tuple[int, ...]) -> float:
        """Return where the crop lies along the longer side: 0 at the start, 1 at the end."""
        if self.crop == "center":
            return 0.5
        return random_below(2**32, self.seed, *key) / (2**32 - 1)


def _decode(content: bytes | memoryview, spec: DecodeSpec) -> tuple[Pixels, int]:
    """Return pixels (H, W, 3) as stored, and the EXIF orientation that is left to apply."""
    header = read_header(content)
    _check_pixel_count(header.height, header.width)
    pixels = None
    if header.is_scalable and header.components != 4:  # four are CMYK, which needs a conversion
        # An error of libjpeg-turbo: damaged, or merely unusual. Pillow can distinguish the two.
        with suppress(ValueError, KeyError):
            pixels = _decode_jpeg(content, header, spec)
    if pixels is None:
        pixels = _decode_with_pillow(content)
    return pixels, header.orientation


def _decode_jpeg(content: bytes | memoryview, header: ImageHeader, spec: DecodeSpec) -> Pixels:
    """Decode a JPEG as small as ``spec`` allows.

    Raises:
        ValueError: libjpeg-turbo rejects the image.
    """
    height, width = header.height, header.width
    is_transposed = header.orientation >= 5
    needed = (spec.width, spec.height) if is_transposed else (spec.height, spec.width)
    factor = 8
    while factor > 1 and not _covers(-(-height // factor), -(-width // factor), *needed):
        factor //= 2
    scaled_height, scaled_width = -(-height // factor), -(-width // factor)
    with _one_at_a_time_if_large(height * width):
        pixels: Pixels = simplejpeg.decode_jpeg(
            content,
            min_height=scaled_height,
            min_width=scaled_width,
            min_factor=factor,
            buffer=_buffer(3 * scaled_height * scaled_width),
        )
    return pixels


def _covers(height: int, width: int, needed_height: int, needed_width: int) -> bool:
    return height >= needed_height and width >= needed_width


def _check_pixel_count(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise DecodeError("image-bomb", f"{width} × {height} pixels; {MAX_PIXELS:,} at most")


_SCALE_INTO = {
    # What torch.nn.functional.interpolate(antialias=True) calls; that function has no `out`.
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}

_large_image_lock = threading.Lock()


def _one_at_a_time_if_large(pixels: int) -> AbstractContextManager[object]:
    return _large_image_lock if pixels > LARGE_PIXELS else nullcontext()


class _Buffers(threading.local):
    """A decoding buffer for each thread, kept: new memory costs a page fault for each 4 KiB."""

    content: NDArray[np.uint8] | None = None


_buffers = _Buffers()


def _buffer(size: int) -> NDArray[np.uint8] | None:
    """Return the thread's buffer of at least ``size`` bytes; None if that is too large to keep."""
    if size > _MAX_KEPT_BUFFER_BYTES:
        return None
    if _buffers.content is None or _buffers.content.size < size:
        _buffers.content = np.empty(size, np.uint8)
    return _buffers.content


def _decode_with_pillow(content: bytes | memoryview) -> Pixels:
    """Decode an image of any format: RGB pixels (H, W, 3) as stored."""
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # other code in the process may have set it
    with open_image(content) as image, _one_at_a_time_if_large(image.width * image.height):
        _check_pixel_count(image.height, image.width)
        try:
            return np.array(_to_rgb(image))
        except (MemoryError, DecodeError):
            raise
        except Exception as error:  # Pillow raises almost anything: SyntaxError, struct.error …
            raise corrupt_image_error(error) from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16 bits per channel; Pillow's own conversion would clip everything above 255.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise DecodeError("image-mode", "floating-point pixels have no agreed range")
    if image.has_transparency_data:
        foreground = image.convert("RGBA")
        white = Image.new("RGBA", foreground.size, "white")
        return Image.alpha_composite(white, foreground).convert("RGB")
    return image.convert("RGB")


def _crop(pixels: Pixels, height: int, width: int, position: float) -> Pixels:
    """Return the largest crop of aspect ``height`` : ``width``; ``position`` is from 0 to 1."""
    full_height, full_width = pixels.shape[:2]
    crop_height = min(full_height, max(1, round(full_width * height / width)))
    crop_width = min(full_width, max(1, round(full_height * width / height)))
    top = int((full_height - crop_height) * position)
    left = int((full_width - crop_width) * position)
    return pixels[top : top + crop_height, left : left + crop_width]


def _scale(pixels: Pixels, out: Tensor, mode: Interpolation) -> None:
    """Scale ``pixels`` (H, W, 3) to the size of ``out``, uint8 (height, width, 3)."""
    source = torch.from_numpy(pixels)
    if source.shape == out.shape:
        out.copy_(source)
        return
    # As (1, 3, H, W) with the strides of a channels-last batch, a single image also takes
    # PyTorch's vectorized path for uint8, and the result is written straight to its place.
    planes, planes_out = (image[None].permute(0, 3, 1, 2) for image in (source, out))
    _SCALE_INTO[mode](planes, list(out.shape[:2]), False, None, None, out=planes_out)


def _apply_orientation(pixels: Tensor, orientation: int) -> Tensor:
    """Apply an EXIF orientation to pixels (H, W, 3).

    5 to 8 transpose the image; then each mirrors one axis, both, or none.
    """
    transposed = pixels.transpose(0, 1) if orientation >= 5 else pixels
    axes = {2: [1], 3: [0, 1], 4: [0], 6: [1], 7: [0, 1], 8: [0]}.get(orientation, [])
    return transposed.flip(axes) if axes else transposed
