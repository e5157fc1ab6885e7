"""Decodes the extra files of a sample: other images, masks, maps such as depth, and arrays.

Images, masks and maps get the crop of the sample's image, from which masks and maps may differ in
size but not in shape. Masks keep their values: they are scaled to the nearest pixel.
"""

from __future__ import annotations

import io

import numpy as np
import torch
from numpy.typing import NDArray
from sm_train.entrypoints.images.decoder_pool import Decoders
from sm_train.entrypoints.images.image_decoder import (
    DecodeSpec,
    apply_orientation,
    check_pixel_count,
    decode_with,
)
from sm_train.entrypoints.images.image_header import (
    Content,
    DecodeError,
    corrupt_image_error,
    open_image,
    read_header,
)
from sm_train.entrypoints.job_interface.job_config import ExtraConfig
from torch import Tensor
from torch.nn.functional import interpolate

Layout = tuple[tuple[int, ...], torch.dtype]


def extra_layout(extra: ExtraConfig, batch_size: int, spec: DecodeSpec) -> Layout:
    """Return the shape and type of an extra in a batch.

    An image is uint8 (B, H, W, 3), a mask uint8 (B, H, W), a map float32 (B, H, W), and an array
    float32 (B, *shape).
    """
    size = (batch_size, spec.height, spec.width)
    if extra.kind == "image":
        return (*size, 3), torch.uint8
    if extra.kind == "mask":
        return size, torch.uint8
    return (size if extra.kind == "map" else (batch_size, *extra.shape)), torch.float32


def decode_extra(
    decoders: Decoders,
    extra: ExtraConfig,
    content: Content,
    image: Content,
    spec: DecodeSpec,
    out: Tensor,
    *key: int,
    flipped: bool,
) -> None:
    """Decode the file ``content`` of a sample into ``out``, with the crop of its ``image``.

    ``out`` is a row of :func:`extra_layout`. ``flipped`` mirrors all but arrays.

    Raises:
        DecodeError: the file cannot be used.
    """
    if extra.kind == "array":
        out.copy_(torch.from_numpy(_array(extra, content)))
        return
    if extra.kind == "image":
        decode_with(decoders, spec, content, out, *key)
    else:
        size = read_header(image).displayed_size
        memory = out.numpy().view(np.uint8)
        decoders.fill(_decode_plane, content, memory, extra, spec, size, *key)
    if flipped:
        out.copy_(out.flip(1))


def _array(extra: ExtraConfig, content: Content) -> NDArray[np.float32]:
    array = _load_npy(extra.member, content)
    if array.shape != extra.shape:
        raise DecodeError(
            "extra-shape", f"{extra.member} is {array.shape}, the run file has {extra.shape}"
        )
    return array.astype(np.float32)


def _decode_plane(
    content: Content,
    out: NDArray[np.uint8],
    extra: ExtraConfig,
    spec: DecodeSpec,
    image_size: tuple[int, int],
    *key: int,
) -> None:
    """Decode a mask or a map into ``out``, the bytes of (height, width) pixels."""
    plane = _plane(extra, content)
    (height, width), (image_height, image_width) = plane.shape, image_size
    # The sides of a smaller map are rounded.
    if abs(height * image_width - width * image_height) > max(*plane.shape, *image_size):
        raise DecodeError(
            "extra-shape",
            f"{extra.member} is {width} × {height}, the image {image_width} × {image_height}",
        )
    top, left, rows, columns = spec.crop_of((height, width), *key)
    cropped = torch.from_numpy(plane[top : top + rows, left : left + columns])[None, None]
    size = (spec.height, spec.width)
    if extra.kind == "mask":
        target = torch.from_numpy(out).view(size)
        target.copy_(interpolate(cropped, size, mode="nearest-exact")[0, 0])
    else:
        scaled = interpolate(cropped, size, mode="bilinear", align_corners=False, antialias=True)
        torch.from_numpy(out.reshape(-1).view(np.float32)).view(size).copy_(scaled[0, 0])


def _plane(extra: ExtraConfig, content: Content) -> NDArray[np.float32]:
    """Return the values of a mask or a map as stored, float32 (H, W), upright."""
    if extra.member.endswith("npy"):
        array = _load_npy(extra.member, content)
        if array.ndim == 3 and 1 in (array.shape[0], array.shape[-1]):
            array = array[0] if array.shape[0] == 1 else array[..., 0]
        orientation = 1
    else:
        array, orientation = _channel(content), read_header(content).orientation
    if array.ndim != 2 or not array.size:
        raise DecodeError("extra-shape", f"{extra.member} is {array.shape}, not one channel")
    if extra.kind == "mask" and not (array.min() >= 0 and array.max() <= 255):
        raise DecodeError("extra-shape", f"{extra.member} has values outside 0 to 255")
    values = torch.from_numpy(np.ascontiguousarray(array, np.float32))
    upright: NDArray[np.float32] = apply_orientation(values, orientation).contiguous().numpy()
    return upright


def _channel(content: Content) -> NDArray[np.generic]:
    """Return the pixels of an image with one channel: levels, palette indices or 16-bit values."""
    with open_image(content) as image:
        check_pixel_count(image.height, image.width)
        try:
            single_channel = (
                image if image.mode in ("L", "P", "1", "I", "F", "I;16") else image.convert("L")
            )
            return np.array(single_channel)
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises almost anything
            raise corrupt_image_error(error) from None


def _load_npy(member: str, content: Content) -> NDArray[np.generic]:
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise DecodeError("extra-corrupt", f"{member}: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "buif":
        raise DecodeError("extra-corrupt", f"{member} is no array of numbers")
    return array
