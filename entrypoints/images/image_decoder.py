"""Decodes image files to pixels at the training size, at the speed of the JPEG decoder.

JPEG goes through libjpeg-turbo (simplejpeg), which returns Pillow's pixels. In mode "fast" it
decodes at a half, a quarter or an eighth of the size where that still covers twice the target: the
decoder then skips most of its work. Every other format, and every JPEG that libjpeg-turbo rejects,
goes through Pillow, which supports more variants. Scaling is PyTorch's antialiased one for uint8,
which agrees with Pillow's to one level.

The crop is a box of whole pixels of the upright image at its full size, whatever size it is decoded
at. Transparent images are laid on white. The EXIF orientation is applied. Colors are converted by
the policy of :mod:`sm_train.entrypoints.images.color`, after cropping and scaling: that costs what
the result's size costs. A transparent image is converted before, because it is laid on white.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile
from sm_train.entrypoints.base.rng import random_below
from sm_train.entrypoints.images.color import find_conversion, stored_pixels
from sm_train.entrypoints.images.conversions import Conversion
from sm_train.entrypoints.images.decoder_pool import Decoders
from sm_train.entrypoints.images.image_header import (
    DecodeError,
    ImageHeader,
    corrupt_image_error,
    open_image,
    read_header,
)
from sm_train.entrypoints.images.stored_color import StoredColor, read_stored_color
from sm_train.entrypoints.job_interface.job_config import (
    DEFAULT_COLOR,
    ColorPolicy,
    Crop,
    DecodeMode,
)
from torch import Tensor

Pixels = NDArray[np.uint8]

MAX_PIXELS = 2**27
"""134 megapixels: a larger image is rejected before anything of it is decoded."""

LARGE_PIXELS = 2**24
"""A rank decodes images with more pixels than this one at a time, to bound its memory."""

_MAX_KEPT_BUFFER_BYTES = 3 * LARGE_PIXELS


@dataclass(frozen=True)
class DecodeSpec:
    """How an image becomes ``height`` × ``width`` pixels.

    The largest crop of that shape is cut from the image's middle or from a random place, and
    scaled. A random place is a pure function of ``seed`` and the key given to :meth:`decode`.
    ``decode_mode`` "fast" may decode a JPEG at a reduced size.
    """

    height: int
    width: int
    crop: Crop = "center"
    seed: int = 0
    decode_mode: DecodeMode = "exact"
    color: ColorPolicy = DEFAULT_COLOR

    def decode(self, content: bytes | memoryview, out: Tensor, *key: int) -> None:
        """Decode ``content`` into ``out``, uint8 (height, width, 3).

        Raises:
            DecodeError: the image is damaged, of an unknown format, or too large.
        """
        header = read_header(content)
        check_pixel_count(header.height, header.width)
        box = _stored_box(_crop_box(header.displayed_size, self, self._crop_position(key)), header)
        # Crop and scale come before turning, because turning the small result is cheaper.
        is_transposed = header.orientation >= 5
        height, width = (self.width, self.height) if is_transposed else (self.height, self.width)
        factor = _factor(header, box, height, width) if self.decode_mode == "fast" else 1
        pixels, factor, conversion = _decode(content, header, factor, self.color)
        is_upright = header.orientation == 1
        if is_upright and conversion is None:
            _scale(pixels, box, factor, out)
            return
        scaled = torch.empty((height, width, pixels.shape[2]), dtype=torch.uint8)
        _scale(pixels, box, factor, scaled)
        if conversion is not None:
            converted = conversion(scaled.numpy(), out.numpy() if is_upright else None)
            scaled = torch.from_numpy(converted)
        if not is_upright:
            out.copy_(apply_orientation(scaled, header.orientation))

    def sizes(
        self, content: bytes | memoryview, *key: int, flipped: bool = False
    ) -> tuple[int, int, int, int]:
        """Return the upright image's height and width, and the top left corner of its crop.

        ``flipped`` if the image is mirrored before it is cropped.

        The corner is in pixels of the image scaled for the crop, as in diffusers' SDXL script
        (examples/text_to_image/train_text_to_image_sdxl.py, 0.42).

        Raises:
            DecodeError: the image's header is damaged.
        """
        header = read_header(content)
        box = _crop_box(header.displayed_size, self, self._crop_position(key))
        top = round(box.top * self.height / box.height)
        height, width = header.displayed_size
        left = width - box.left - box.width if flipped else box.left
        return height, width, top, round(left * self.width / box.width)

    def crop_of(self, size: tuple[int, int], *key: int) -> tuple[int, int, int, int]:
        """Return top, left, height and width of the crop of an upright image of ``size``."""
        box = _crop_box(size, self, self._crop_position(key))
        return box.top, box.left, box.height, box.width

    def _crop_position(self, key: tuple[int, ...]) -> float:
        """Return where the crop lies along the longer side: 0 at the start, 1 at the end."""
        if self.crop == "center":
            return 0.5
        return random_below(2**32, self.seed, *key) / (2**32 - 1)


_large_image_lock = threading.Lock()


def decode_with(
    decoders: Decoders, spec: DecodeSpec, content: bytes | memoryview, out: Tensor, *key: int
) -> None:
    """Decode ``content`` into ``out`` like :meth:`DecodeSpec.decode`, in one of ``decoders``.

    Raises:
        DecodeError: the image cannot be used.
    """
    header = read_header(content)
    is_large = header.height * header.width > LARGE_PIXELS
    with _large_image_lock if is_large else nullcontext():
        decoders.fill(_decode_into, content, out.numpy(), spec, *key)


def _decode_into(content: bytes | memoryview, out: Pixels, spec: DecodeSpec, *key: int) -> None:
    spec.decode(content, torch.from_numpy(out).view(spec.height, spec.width, 3), *key)


@dataclass(frozen=True)
class _Box:
    """A part of an image, in pixels of its full size."""

    top: int
    left: int
    height: int
    width: int


def _crop_box(size: tuple[int, int], spec: DecodeSpec, position: float) -> _Box:
    """Return the largest box of the spec's shape in an upright image of height and width ``size``.

    ``position`` is where it lies along the longer side, from 0 to 1.
    """
    full_height, full_width = size
    height = min(full_height, max(1, round(full_width * spec.height / spec.width)))
    width = min(full_width, max(1, round(full_height * spec.width / spec.height)))
    top, left = int((full_height - height) * position), int((full_width - width) * position)
    return _Box(top, left, height, width)


def _stored_box(box: _Box, header: ImageHeader) -> _Box:
    """Return the box of the image as stored that ``box`` of the upright one shows."""
    full_height, full_width = header.displayed_size
    axes = _MIRRORED_AXES.get(header.orientation, ())
    top = full_height - box.top - box.height if 0 in axes else box.top
    left = full_width - box.left - box.width if 1 in axes else box.left
    if header.orientation >= 5:
        return _Box(left, top, box.width, box.height)
    return _Box(top, left, box.height, box.width)


def _factor(header: ImageHeader, box: _Box, height: int, width: int) -> int:
    """Return by how much to reduce a JPEG, so that ``box`` still covers twice the target."""
    factor = 8 if header.is_scalable else 1
    while factor > 1 and (box.height < 2 * factor * height or box.width < 2 * factor * width):
        factor //= 2
    return factor


def _decode(
    content: bytes | memoryview, header: ImageHeader, factor: int, policy: ColorPolicy
) -> tuple[Pixels, int, Conversion | None]:
    """Return pixels (H, W, channels) as stored, by how much they are reduced, and a conversion.

    They are reduced by ``factor`` or by 1. The conversion makes RGB of them; None if they are.
    """
    color = read_stored_color(content, header)
    # Four channels are CMYK, which only Pillow decodes as its profile expects.
    if header.is_scalable and header.components in _JPEG_MODES:
        mode = _JPEG_MODES[header.components]
        conversion = find_conversion(color, mode, policy)
        colorspace = "GRAY" if mode == "L" and conversion is not None else "RGB"
        # An error of libjpeg-turbo: damaged, or merely unusual. Pillow can distinguish the two.
        with suppress(ValueError, KeyError):
            return _decode_jpeg(content, header, factor, colorspace), factor, conversion
    pixels, conversion = _decode_with_pillow(content, color, policy)
    if pixels.shape[:2] != (header.height, header.width):
        raise DecodeError("image-corrupt", "its pixels differ in number from its header")
    return pixels, 1, conversion


_JPEG_MODES = {1: "L", 3: "RGB"}
"""Pillow's modes of a JPEG's numbers of components that libjpeg-turbo decodes here."""


def _decode_jpeg(
    content: bytes | memoryview, header: ImageHeader, factor: int, colorspace: str
) -> Pixels:
    """Decode a JPEG, reduced by ``factor``, to "RGB" or "GRAY" pixels.

    Raises:
        ValueError: libjpeg-turbo rejects the image.
    """
    height, width = -(-header.height // factor), -(-header.width // factor)
    channels = 1 if colorspace == "GRAY" else 3
    pixels: Pixels = simplejpeg.decode_jpeg(
        content,
        colorspace,
        min_height=height,
        min_width=width,
        min_factor=factor,
        buffer=_buffer(channels * height * width),
    )
    return pixels


def check_pixel_count(height: int, width: int) -> None:
    """Reject an image with more than :data:`MAX_PIXELS`.

    Raises:
        DecodeError: it has more.
    """
    if height * width > MAX_PIXELS:
        raise DecodeError("image-bomb", f"{width} × {height} pixels; {MAX_PIXELS:,} at most")


# What torch.nn.functional.interpolate(antialias=True) calls; that function has no `out`.
_SCALE_INTO = torch.ops.aten._upsample_bicubic2d_aa.out


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


def _decode_with_pillow(
    content: bytes | memoryview, color: StoredColor, policy: ColorPolicy
) -> tuple[Pixels, Conversion | None]:
    """Decode an image of any format: pixels (H, W, channels) as stored, and their conversion."""
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # other code in the process may have set it
    with open_image(content) as image:
        check_pixel_count(image.height, image.width)
        try:
            pixels, conversion = stored_pixels(image, color, policy)
            return np.array(pixels), conversion
        except (MemoryError, DecodeError):
            raise
        except Exception as error:  # Pillow raises almost anything: SyntaxError, struct.error …
            raise corrupt_image_error(error) from None


def _scale(pixels: Pixels, box: _Box, factor: int, out: Tensor) -> None:
    """Scale ``box`` of an image to the size of ``out``, uint8 (height, width, channels).

    ``pixels``, uint8 (H, W, channels), are those of the image reduced by ``factor``.
    """
    bottom, right = box.top + box.height, box.left + box.width
    if any(edge % factor for edge in (box.top, box.left, bottom, right)):
        # The box cuts through reduced pixels, which only Pillow can scale: those of JPEG, gray or
        # RGB.
        image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).resize(
            (out.shape[1], out.shape[0]),
            Image.Resampling.BICUBIC,
            (box.left / factor, box.top / factor, right / factor, bottom / factor),
        )
        out.copy_(torch.from_numpy(np.array(image)).view(out.shape))
        return
    rows = slice(box.top // factor, bottom // factor)
    columns = slice(box.left // factor, right // factor)
    source = torch.from_numpy(pixels[rows, columns])
    if source.shape == out.shape:
        out.copy_(source)
        return
    # As (1, channels, H, W) with the strides of a channels-last batch, a single image also takes
    # PyTorch's vectorized path for uint8, and the result is written straight to its place.
    planes, planes_out = (image[None].permute(0, 3, 1, 2) for image in (source, out))
    _SCALE_INTO(planes, list(out.shape[:2]), False, None, None, out=planes_out)


_MIRRORED_AXES = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}
"""The axes that each EXIF orientation mirrors, after orientations 5 to 8 transpose the image."""


def apply_orientation(pixels: Tensor, orientation: int) -> Tensor:
    """Apply an EXIF orientation to pixels (H, W, …)."""
    transposed = pixels.transpose(0, 1) if orientation >= 5 else pixels
    return transposed.flip(_MIRRORED_AXES.get(orientation, ()))
