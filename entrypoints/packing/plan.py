"""Which inputs go into which shard: decided before any image is read, the same on every machine.

Inputs are dealt out in their order, by their sizes, so that all shards come out about equally
large. A shard then depends on its own inputs alone: any process can make it, at any time, and
what is rejected only leaves it a little smaller.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

FACTS_BYTES = 512
"""Of a sample's JSON, padded: nearly always."""


@dataclass(frozen=True)
class PackInput:
    """One image to pack: ``number`` in the order of all, which its sample's key is made of.

    ``source`` names it for people, ``address`` is where it lies, ``bytes`` its size. Its caption
    is ``caption``, or the text at ``caption_address``.
    """

    number: int
    source: str
    address: str
    bytes: int
    caption: str | None = None
    caption_address: str | None = None


@dataclass(frozen=True)
class PackOptions:
    """What decides a sample's content, and whether it is packed; sides are pixels.

    ``max_side`` and ``quality`` encode an image anew, ``pixels`` decodes each wholly.
    ``near_bits`` is how far the hashes of near-duplicates may differ, None keeps them;
    ``duplicates`` drops images of the same bytes. ``latents`` is the folder of a model.
    """

    pixels: bool = True
    min_side: int | None = None
    max_aspect: float | None = None
    max_side: int | None = None
    quality: int | None = None
    duplicates: bool = False
    near_bits: int | None = None
    latents: str | None = None
    latents_resolution: int | None = None

    @property
    def compares(self) -> bool:
        """Whether images must be compared with each other, which takes a pass of its own."""
        return self.duplicates or self.near_bits is not None

    def changed(self) -> dict[str, Any]:
        """The options that are not as they are by default."""
        default = PackOptions()
        return {
            name: value for name, value in vars(self).items() if value != getattr(default, name)
        }


@dataclass(frozen=True)
class ShardPlan:
    """One shard: its name and its inputs."""

    number: int
    name: str
    inputs: Sequence[PackInput]
    options: PackOptions = field(default_factory=PackOptions)


def sample_key(number: int) -> str:
    """The key of the sample made of input ``number``; without dots, which end a key."""
    return f"{number:09d}"


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


def packed_bytes(image: int, caption: int) -> int:
    """What a sample takes in a shard: three members, padded, with their headers."""
    block = tarfile.BLOCKSIZE
    return sum(block + -(-size // block) * block for size in (image, caption, FACTS_BYTES))


def shard_count(total: int, largest: int, *, multiple_of: int = 1) -> int:
    """The least number of shards of at most ``largest`` bytes that ``multiple_of`` divides."""
    count = max(1, -(-total // largest))
    return -(-count // multiple_of) * multiple_of


def plan_shards(sizes: Sequence[int], shards: int) -> list[tuple[int, int]]:
    """First and behind-last input of each shard, so that their bytes are near-equal.

    Each shard's share of all bytes is rounded to whole inputs, so no shard is off by more than
    its largest input; none is empty while there are inputs enough.

    Raises:
        ValueError: there are fewer inputs than shards.
    """
    if len(sizes) < shards:
        raise ValueError(f"{len(sizes)} inputs for {shards} shards")
    ends = np.cumsum(np.asarray(sizes, np.int64))
    wanted = np.arange(1, shards) * (int(ends[-1]) / shards)
    above = np.searchsorted(ends, wanted)
    # The nearer of the two ends between which the wanted place lies.
    before = np.where(above > 0, ends[np.maximum(above - 1, 0)], 0)
    cuts = above + ((ends[above] - wanted) < (wanted - before))
    numbers = np.arange(1, shards)
    cuts = np.maximum.accumulate(cuts - numbers) + numbers  # at least one input each …
    cuts = np.minimum(cuts, len(sizes) - shards + numbers)  # … and some left for the rest
    cuts = np.maximum(cuts, numbers)
    edges = [0, *cuts.tolist(), len(sizes)]
    return list(pairwise(edges))
