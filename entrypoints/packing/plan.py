"""Assigns inputs to shards before any image is read, identically on every node.

Inputs keep their order and are partitioned by size, so that all shards are about equally large. A
shard depends only on its own inputs: any process can build it at any time, and a rejected input
only makes it a little smaller.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

METADATA_BYTES = 512
"""Size of a sample's metadata JSON with padding, in nearly all cases."""


@dataclass(frozen=True)
class PackInput:
    """One image to pack.

    ``number`` is its position among all inputs and becomes its sample's key. ``source`` names it in
    messages, ``address`` is its path or URI, ``bytes`` its size. Its caption is ``caption``, or the
    text at ``caption_address``.
    """

    number: int
    source: str
    address: str
    bytes: int
    caption: str | None = None
    caption_address: str | None = None


@dataclass(frozen=True)
class PackOptions:
    """Options that filter samples or change their content; sides are in pixels.

    ``pixels`` decodes every image completely. ``max_side`` and ``quality`` re-encode images.
    ``convert`` encodes images of other formats than JPEG, PNG and WebP as JPEG.
    ``duplicates`` drops images with the same bytes. ``near_bits`` is the number of bits by which
    the hashes of near-duplicates may differ; None keeps near-duplicates. ``latents`` is the folder
    of the model that encodes latents.
    """

    pixels: bool = True
    min_side: int | None = None
    max_aspect: float | None = None
    max_side: int | None = None
    quality: int | None = None
    convert: bool = False
    duplicates: bool = False
    near_bits: int | None = None
    latents: str | None = None
    latents_resolution: int | None = None

    @property
    def deduplicates(self) -> bool:
        """Whether duplicates are dropped, which takes a separate pass over all inputs."""
        return self.duplicates or self.near_bits is not None

    def non_defaults(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        default = PackOptions()
        return {
            name: value for name, value in vars(self).items() if value != getattr(default, name)
        }


@dataclass(frozen=True)
class ShardPlan:
    """One shard to build: its name and its inputs."""

    number: int
    name: str
    inputs: Sequence[PackInput]
    options: PackOptions = field(default_factory=PackOptions)


def sample_key(number: int) -> str:
    """Return the key of the sample of input ``number``; a key ends at its first dot."""
    return f"{number:09d}"


def shard_name(number: int) -> str:
    """Return the file name of shard ``number``."""
    return f"shard-{number:06d}.tar"


def packed_bytes(image: int, caption: int) -> int:
    """Return a sample's size in a shard: three members with headers and padding."""
    block = tarfile.BLOCKSIZE
    return sum(block + -(-size // block) * block for size in (image, caption, METADATA_BYTES))


def shard_count(total: int, max_bytes: int, *, multiple_of: int = 1) -> int:
    """Return the smallest multiple of ``multiple_of`` with shards of at most ``max_bytes``."""
    count = max(1, -(-total // max_bytes))
    return -(-count // multiple_of) * multiple_of


def plan_shards(sizes: Sequence[int], shards: int) -> list[tuple[int, int]]:
    """Return the half-open input range of each shard, with near-equal sizes in bytes.

    Each boundary is rounded to the nearest input, so no shard deviates from the mean by more than
    its largest input. No shard is empty.

    Raises:
        ValueError: there are fewer inputs than shards.
    """
    if len(sizes) < shards:
        raise ValueError(f"{len(sizes)} inputs for {shards} shards")
    ends = np.cumsum(np.asarray(sizes, np.int64))  # int64 (num_inputs,): end offset of each input
    ideal = np.arange(1, shards) * (int(ends[-1]) / shards)  # (shards - 1,): exact boundaries
    # Round each ideal boundary to the nearer of the two input ends around it.
    above = np.searchsorted(ends, ideal)
    below = np.where(above > 0, ends[np.maximum(above - 1, 0)], 0)
    cuts = above + ((ends[above] - ideal) < (ideal - below))
    # One huge input may attract several boundaries: move them apart, so that every shard gets at
    # least one input and enough inputs are left for the shards after it.
    numbers = np.arange(1, shards)
    cuts = np.maximum.accumulate(cuts - numbers) + numbers
    cuts = np.minimum(cuts, len(sizes) - shards + numbers)
    cuts = np.maximum(cuts, numbers)
    edges = [0, *cuts.tolist(), len(sizes)]
    return list(pairwise(edges))
