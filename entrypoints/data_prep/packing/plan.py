"""Assigns inputs to shards before any image is read, identically on every node.

Inputs keep their order and are partitioned by size, so that all shards are about equally large. A
shard depends only on its own inputs: any process can build it at any time, and a rejected input
only makes it a little smaller.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.job_interface.job_config import (
    DEFAULT_COLOR,
    UNRECORDED_COLOR,
    ColorPolicy,
    Hdr,
    IccProfile,
)
from sm_train.entrypoints.sample_metadata.column_types import ColumnType

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
"""The extensions of images that are packed as they are."""

CAPTION_SUFFIXES = (".txt", ".caption")
"""The extensions of captions, first the one that is used if both are there. Trainers of kohya's
sd-scripts write ``.caption``."""

METADATA_BYTES = 512
"""Size of a sample's metadata JSON with padding, in nearly all cases, without fields of a table."""


@dataclass(frozen=True)
class PackInput:
    """One image to pack.

    ``number`` is its position among all inputs and becomes its sample's key. ``source`` names it in
    messages, ``address`` is its path or URI, ``bytes`` its size. Its caption is ``caption``, or the
    text at ``caption_address``. ``table_fields`` is a JSON object with what a table says of it; it
    becomes part of the sample's JSON file.
    """

    number: int
    source: str
    address: str
    bytes: int
    caption: str | None = None
    caption_address: str | None = None
    table_fields: str | None = None


@dataclass(frozen=True)
class PackOptions:
    """Options that filter samples or change their content; sides are in pixels.

    ``pixels`` decodes every image completely. ``max_side`` and ``quality`` re-encode images.
    ``convert`` encodes images of other formats than JPEG, PNG and WebP as JPEG.
    ``duplicates`` drops images with the same bytes. ``near_bits`` is the number of bits by which
    the hashes of near-duplicates may differ; None keeps near-duplicates. ``latents`` is the folder
    of the model that encodes latents. ``index_columns`` are the columns of samples in the index.
    ``icc_profile`` and ``hdr`` are the :class:`ColorPolicy` of everything that decodes pixels.
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
    index_columns: dict[str, ColumnType] = field(default_factory=dict)
    icc_profile: IccProfile = UNRECORDED_COLOR.icc_profile
    hdr: Hdr = UNRECORDED_COLOR.hdr

    @property
    def color(self) -> ColorPolicy:
        """How stored colors become RGB."""
        return ColorPolicy(self.icc_profile, self.hdr)

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


DEFAULT_OPTIONS = PackOptions(
    icc_profile=DEFAULT_COLOR.icc_profile,
    hdr=DEFAULT_COLOR.hdr,
)
"""Those of a new pack of which nothing is stated, and of every stream."""


class Inputs(Protocol):
    """The inputs of a shard in order: a list, or what a plan's files contain of them.

    Each iteration may read them from a file.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[PackInput]: ...


@dataclass(frozen=True)
class ShardPlan:
    """One shard to build: its name and its inputs, which are numbered from ``first`` on.

    ``digests`` is the file in the destination with the digests of its inputs, for deduplication.
    """

    number: int
    name: str
    inputs: Inputs
    options: PackOptions = field(default_factory=PackOptions)
    first: int = 0
    digests: str = ""


def next_to(address: str, suffix: str = CAPTION_SUFFIXES[0]) -> str:
    """Return the address of a file of an image's name, by default of its caption."""
    return address.rpartition(".")[0] + suffix


def sample_key(number: int) -> str:
    """Return the key of the sample of input ``number``; a key ends at its first dot."""
    return f"{number:09d}"


def shard_name(number: int) -> str:
    """Return the file name of shard ``number``."""
    return f"shard-{number:06d}.tar"


_Sizes = TypeVar("_Sizes", int, NDArray[np.int64])


def packed_bytes(image: _Sizes, caption: _Sizes, table_fields: _Sizes) -> _Sizes:
    """Return a sample's size in a shard: three members with headers and padding.

    Takes the sizes of an image, its caption and its fields of a table, or those of several, int64
    (num_images,) each.
    """
    block = tarfile.BLOCKSIZE
    blocks = -(-image // block) + -(-caption // block)
    blocks += -(-(METADATA_BYTES + table_fields) // block)
    return (3 + blocks) * block


def shard_count(total: int, max_bytes: int, *, multiple_of: int = 1) -> int:
    """Return the smallest multiple of ``multiple_of`` with shards of at most ``max_bytes``."""
    count = max(1, -(-total // max_bytes))
    return -(-count // multiple_of) * multiple_of


def plan_shards(sizes: Iterable[NDArray[np.int64]], total: int, shards: int) -> list[int]:
    """Return the number of inputs of each shard, with near-equal sizes in bytes.

    ``sizes`` are the sizes of all inputs in order, int64 (any,) each, and ``total`` is their sum;
    one part of them is in memory at a time. Each boundary is rounded to the nearest input, so no
    shard deviates from the mean by more than its largest input. No shard is empty.

    Raises:
        ValueError: there are fewer inputs than shards.
    """
    ideal = np.arange(1, shards) * (total / shards)  # (shards - 1,): exact boundaries
    cuts = np.empty(shards - 1, np.int64)
    found = count = end = 0  # boundaries, inputs and bytes before this part
    for part in sizes:
        ends = end + np.cumsum(part)  # int64 (num_inputs,): end offset of each input
        last = int(np.searchsorted(ideal, ends[-1], side="right")) if len(ends) else found
        here = ideal[found:last]
        # Round each ideal boundary to the nearer of the two input ends around it.
        above = np.searchsorted(ends, here)
        below = np.where(above > 0, ends[np.maximum(above - 1, 0)], end)
        cuts[found:last] = count + above + ((ends[above] - here) < (here - below))
        found, count = last, count + len(ends)
        end = int(ends[-1]) if len(ends) else end
    if count < shards:
        raise ValueError(f"{count} inputs for {shards} shards")
    # One huge input may attract several boundaries: move them apart, so that every shard gets at
    # least one input and enough inputs are left for the shards after it.
    numbers = np.arange(1, shards)
    cuts = np.maximum.accumulate(cuts - numbers) + numbers
    cuts = np.minimum(cuts, count - shards + numbers)
    cuts = np.maximum(cuts, numbers)
    return [stop - start for start, stop in pairwise([0, *cuts.tolist(), count])]
