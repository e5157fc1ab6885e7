"""What is compared of images: perceptual hashes in memory, and colors in memory or in a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data_prep.deduplication.colors import SIGNATURE_BYTES, Signatures

Hashes = NDArray[np.uint64]
Positions = NDArray[np.int32]
"""Positions of images: four bytes each, since a search holds several for each image."""

NONE = np.iinfo(np.int32).max
"""Stands for the position of no image; a minimum ignores it."""

HASH_BITS = 64

_READ_ROWS = 2**19
"""Signatures that are read from a file at a time: 24 MiB."""


@dataclass(frozen=True, eq=False)
class StoredColors:
    """The signatures of images in a file, by the rows (n,) of the file; None stands for all."""

    file: IO[bytes]
    rows: Positions | None = None

    def __getitem__(self, rows: Any) -> StoredColors:
        if self.rows is None:
            return StoredColors(self.file, np.asarray(rows, np.int32))
        return StoredColors(self.file, self.rows[rows])

    def load(self) -> Signatures:
        """Read the signatures of the rows, which ascend."""
        assert self.rows is not None
        signatures = np.zeros((len(self.rows), SIGNATURE_BYTES), np.uint8)
        done = 0
        while done < len(self.rows):
            first = int(self.rows[done])
            after = int(np.searchsorted(self.rows, first + _READ_ROWS))
            # Processes may share the file's position.
            length = (int(self.rows[after - 1]) + 1 - first) * SIGNATURE_BYTES
            read = os.pread(self.file.fileno(), length, first * SIGNATURE_BYTES)
            block = np.frombuffer(read, np.uint8).reshape(-1, SIGNATURE_BYTES)
            signatures[done:after] = block[self.rows[done:after] - first]
            done = after
        return signatures


@dataclass(frozen=True, eq=False)
class Images:
    """What is compared of images: their hashes (n,) and the signatures (n, 48) of their colors."""

    hashes: Hashes
    colors: Signatures | StoredColors

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def signatures(self) -> Signatures:
        """The colors (n, 48) of images in memory."""
        assert not isinstance(self.colors, StoredColors)
        return self.colors

    def take(self, rows: Any) -> Images:
        """Return the images in ``rows``, which ascend; colors in a file stay there."""
        return Images(self.hashes[rows], self.colors[rows])

    def loaded(self) -> Images:
        """Return the images with their colors in memory."""
        if isinstance(self.colors, StoredColors):
            return Images(self.hashes, self.colors.load())
        return self


def store_images(
    digests: Iterable[tuple[Hashes, Signatures]], rows: int, file: IO[bytes]
) -> Images:
    """Write the colors of ``rows`` images to ``file``; return the images, whose hashes it holds."""
    hashes, first = np.zeros(rows, np.uint64), 0
    for part, colors in digests:
        hashes[first : first + len(part)] = part
        file.write(colors.tobytes())
        first += len(part)
    file.flush()
    return Images(hashes, StoredColors(file))


def _count_bits_portably(values: Hashes) -> NDArray[Any]:
    """Count set bits in parallel within each word (Hacker's Delight, figure 5-2)."""
    ones = values - ((values >> np.uint64(1)) & np.uint64(0x5555555555555555))
    twos = np.uint64(0x3333333333333333)
    ones = (ones & twos) + ((ones >> np.uint64(2)) & twos)
    ones = (ones + (ones >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    counted: NDArray[Any] = (ones * np.uint64(0x0101010101010101)) >> np.uint64(56)
    return counted


# NumPy before 2.0, which some of AWS's images have, has no bitwise_count.
count_bits: Callable[[Hashes], NDArray[Any]] = getattr(np, "bitwise_count", _count_bits_portably)


@dataclass(frozen=True)
class HashDistance:
    """Which hashes are near: those that differ in at most ``bits`` bits.

    Of several tables that unite equal hashes all, only the first compares them.
    """

    bits: int
    skips_equal: bool = False

    def is_near(self, left: Hashes, right: Hashes) -> NDArray[np.bool_]:
        """Return whether hashes are near, with broadcasting."""
        difference = left ^ right
        is_near: NDArray[np.bool_] = count_bits(difference) <= self.bits
        if self.skips_equal:
            is_near &= difference != 0
        return is_near

    def skips_all(self, hashes: Hashes) -> bool:
        """Return whether no pair of ``hashes`` is compared."""
        return self.skips_equal and bool((hashes == hashes[0]).all())
