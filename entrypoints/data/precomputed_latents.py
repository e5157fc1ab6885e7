"""Latents and text states that were computed at packing, so that training need not.

A sample then carries two or three more members, NumPy arrays of float16::

    000000042.moments.npy   the autoencoder's mean and log-variance, (2 × channels, h, w)
    000000042.text.npy      the text encoders' hidden states of the caption, (tokens, width)
    000000042.pooled.npy    their projections of it, (width,), where they have any

They belong to one resolution and one model, which the index names in its options
(``latents``). A stage of another resolution decodes the images as ever.
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
    """A sample's arrays cannot be used: a fixed code, and the detail for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class PrecomputedLatents:
    """What each sample carries: the shapes of the arrays by their extension, and whose they are."""

    shapes: dict[str, tuple[int, ...]]
    model: str

    @classmethod
    def from_options(cls, options: Mapping[str, Any], resolution: int) -> PrecomputedLatents | None:
        """What an index with these ``options`` offers for ``resolution``."""
        latents = options.get("latents")
        if not latents or latents["resolution"] != resolution:
            return None
        names = (name for name in (MOMENTS, TEXT, POOLED) if name.removesuffix(".npy") in latents)
        shapes = {name: tuple(latents[name.removesuffix(".npy")]) for name in names}
        return cls(shapes, latents["model"])

    def layout(self, batch: int) -> BufferLayout:
        """Of a batch: float16, each shape ``batch`` times."""
        return tuple(((batch, *shape), torch.float16) for shape in self.shapes.values())

    def read(self, members: Mapping[str, memoryview], out: Sequence[Tensor]) -> None:
        """Fill one sample's part of each array.

        Raises:
            PrecomputedError: an array is missing, damaged, or of another shape.
        """
        for name, part in zip(self.shapes, out, strict=True):
            if name not in members:
                raise PrecomputedLatentsError("latents-missing", f"no {name}")
            try:
                array = np.load(io.BytesIO(members[name]), allow_pickle=False)
            except (ValueError, EOFError, OSError) as error:
                raise PrecomputedLatentsError("latents-corrupt", f"{name}: {error}") from None
            if array.shape != tuple(part.shape) or array.dtype != np.float16:
                found = f"{array.dtype} {array.shape}"
                raise PrecomputedLatentsError(
                    "latents-shape", f"{name} is {found}, not as in the index"
                )
            part.copy_(torch.from_numpy(array))
