"""Reads latents and text states that packing has computed, so that training need not.

A sample then has two or three more members, NumPy arrays of float16::

    000000042.moments.npy   the autoencoder's mean and log-variance, (2 × channels, h, w)
    000000042.text.npy      the text encoders' hidden states of the caption, (tokens, width)
    000000042.pooled.npy    their pooled projections, (width,), for models that have any

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
from sm_train.entrypoints.data.buffer_pool import BufferLayout
from sm_train.entrypoints.data.shard_format import MOMENTS, POOLED, TEXT
from torch import Tensor


class PrecomputedLatentsError(ValueError):
    """A sample's arrays cannot be used; ``reason`` is a fixed code, the message adds the detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class PrecomputedLatents:
    """The arrays that each sample has: their shapes by extension, and the model they are of."""

    shapes: dict[str, tuple[int, ...]]
    model: str

    @classmethod
    def from_options(cls, options: Mapping[str, Any], resolution: int) -> PrecomputedLatents | None:
        """Return the latents that an index with ``options`` has for ``resolution``, if any."""
        latents = options.get("latents")
        if not latents or latents["resolution"] != resolution:
            return None
        names = (name for name in (MOMENTS, TEXT, POOLED) if name.removesuffix(".npy") in latents)
        shapes = {name: tuple(latents[name.removesuffix(".npy")]) for name in names}
        return cls(shapes, latents["model"])

    def layout(self, batch_size: int) -> BufferLayout:
        """Return the memory layout of a batch's arrays: float16 (batch_size, *shape)."""
        return tuple(((batch_size, *shape), torch.float16) for shape in self.shapes.values())

    def read(self, members: Mapping[str, memoryview], out: Sequence[Tensor]) -> None:
        """Copy one sample's arrays into ``out``, in the order of :attr:`shapes`.

        Raises:
            PrecomputedLatentsError: an array is missing, damaged, or of another shape.
        """
        for name, target in zip(self.shapes, out, strict=True):
            if name not in members:
                raise PrecomputedLatentsError("latents-missing", f"no {name}")
            try:
                array = np.load(io.BytesIO(members[name]), allow_pickle=False)
            except (ValueError, EOFError, OSError) as error:
                raise PrecomputedLatentsError("latents-corrupt", f"{name}: {error}") from None
            if array.shape != tuple(target.shape) or array.dtype != np.float16:
                raise PrecomputedLatentsError(
                    "latents-shape",
                    f"{name} is {array.dtype} {array.shape}, the index has float16 "
                    f"{tuple(target.shape)}",
                )
            target.copy_(torch.from_numpy(array))
