"""Reads latents and text states that packing has computed, so that training need not.

A sample then has three or four more members, NumPy arrays of float16::

    000000042.moments.npy   the autoencoder's mean and log-variance, (2 × channels, h, w)
    000000042.text.npy      the text encoders' hidden states of the caption, (tokens, width)
    000000042.pooled.npy    their pooled projections, (width,), for models that have any
    000000042.sizes.npy     the image's size and the crop's corner, int32 (4,): Batch.sizes

They belong to one resolution and one model, which the index names in its options (``latents``).
A stage of another resolution decodes the images as usual.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sm_train.entrypoints.images.buffer_pool import BufferLayout
from sm_train.entrypoints.shards.shard_format import MOMENTS, POOLED, SIZES, TEXT
from torch import Tensor


class PrecomputedLatentsError(ValueError):
    """A sample's arrays cannot be used; ``reason`` is a fixed code, the message adds the detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class PrecomputedLatents:
    """The arrays that each sample has: their shapes by extension, and what components made them.

    Shards of earlier versions have no sizes.
    """

    shapes: dict[str, tuple[int, ...]]
    model: Mapping[str, str]
    has_sizes: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any], resolution: int) -> PrecomputedLatents | None:
        """Return the latents that an index with ``options`` has for ``resolution``, if any."""
        latents = options.get("latents")
        if not latents or latents["resolution"] != resolution:
            return None
        names = (name for name in (MOMENTS, TEXT, POOLED) if name.removesuffix(".npy") in latents)
        shapes = {name: tuple(latents[name.removesuffix(".npy")]) for name in names}
        return cls(shapes, latents["model"], "sizes" in latents)

    def layout(self, batch_size: int) -> BufferLayout:
        """Return the memory layout of a batch's arrays: float16 (batch_size, *shape)."""
        return tuple(((batch_size, *shape), torch.float16) for shape in self.shapes.values())

    def read(self, members: Mapping[str, memoryview], out: Sequence[Tensor]) -> None:
        """Copy one sample's arrays into ``out``, in the order of :attr:`shapes`.

        Raises:
            PrecomputedLatentsError: an array is missing, damaged, or of another shape.
        """
        for name, target in zip(self.shapes, out, strict=True):
            _read_array(name, members, target, np.dtype(np.float16))

    def read_sizes(self, members: Mapping[str, memoryview], out: Tensor) -> None:
        """Copy one sample's sizes into ``out``, int32 (4,).

        Raises:
            PrecomputedLatentsError: they are missing or damaged.
        """
        _read_array(SIZES, members, out, np.dtype(np.int32))


def _read_array(
    name: str, members: Mapping[str, memoryview], out: Tensor, dtype: np.dtype[Any]
) -> None:
    if name not in members:
        raise PrecomputedLatentsError("latents-missing", f"no {name}")
    try:
        array = np.load(io.BytesIO(members[name]), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise PrecomputedLatentsError("latents-corrupt", f"{name}: {error}") from None
    if array.shape != tuple(out.shape) or array.dtype != dtype:
        raise PrecomputedLatentsError(
            "latents-shape",
            f"{name} is {array.dtype} {array.shape}, the index has {dtype} {tuple(out.shape)}",
        )
    out.copy_(torch.from_numpy(array))
