"""Finds images that duplicate an earlier one, by their bytes or their perceptual hashes.

The first of several duplicates in input order is kept, so the result does not depend on which node
reads which image. Deduplication is a separate pass over all inputs. It stores the digests of each
shard, which stay for a pack that extends this one, and until the pack is finished

- for large packs, the result of each part of the search: a range of digests, or of the keys of a
  table of perceptual hashes. Any process can search any part;
- the list of all images to leave out.
"""

from __future__ import annotations

import io
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data.shard_index import RejectedInput
from sm_train.entrypoints.deduplication.colors import SIGNATURE_BYTES
from sm_train.entrypoints.deduplication.equal_rows import equal_rows, part_of
from sm_train.entrypoints.deduplication.hamming import (
    NONE,
    Images,
    KeyTable,
    Positions,
    Search,
    choose_tables,
)
from sm_train.entrypoints.deduplication.near_duplicates import (
    DistinctImages,
    near_duplicates,
    resolve,
)
from sm_train.entrypoints.images.decoder_pool import Decoders
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.packing.plan import PackInput, ShardPlan
from sm_train.entrypoints.packing.shard_builder import InputReader, read_metadata
from sm_train.entrypoints.shared_work.storage import Storage, write_file
from sm_train.entrypoints.shared_work.work_stages import STATE_FOLDER
from sm_train.entrypoints.shared_work.worker_pool import (
    ProgressCallback,
    WorkerPlan,
    WorkProgress,
    run_tasks,
)

DIGEST = np.dtype(
    [
        ("sha256", "<u8", (4,)),
        ("phash", "<u8"),
        ("colors", "u1", (SIGNATURE_BYTES,)),
        ("is_readable", "?"),
        ("has_phash", "?"),
    ]
)
"""An image's digests: 90 bytes. Those of an unreadable image match no other. The colors are unknown
if near-duplicates are kept, and in packs of earlier versions."""

DROPPED = np.dtype([("row", "<i8"), ("first", "<i8"), ("is_equal", "?")])
"""An image to leave out: its row among all inputs, that of the image that it duplicates, and
whether both have the same bytes."""

DUPLICATES_FOLDER = f"{STATE_FOLDER}/duplicates"

DROPPED_NAME = f"{DUPLICATES_FOLDER}/dropped.npy"

_PART_ROWS = 2**22
"""Images of a part of the search: a process needs some hundred megabytes for it."""

_SHARED_BYTES = 2**33
"""Memory for the perceptual hashes and colors of all images in all processes of a node."""

_SEARCH_BYTES = 80
"""Of these for each image: a hash, its colors and three positions."""


def digest_shards(
    plans: Iterable[ShardPlan], work: WorkerPlan, cores: tuple[int, int]
) -> Generator[WorkProgress]:
    """Compute and store the digests of all inputs of ``plans``; yield the progress.

    ``cores`` are the processes and the threads in each.
    """
    processes, threads = cores
    task = partial(_digest_shard, work.destination, work.access, threads)
    yield from run_tasks(task, plans, processes, work.decoders(processes))


def _digest_shard(
    destination: Storage,
    access: S3Access,
    threads: int,
    plan: ShardPlan,
    on_progress: ProgressCallback,
    decoders: Decoders,
) -> None:
    reader = InputReader(access, decoders)
    is_near_dropped = plan.options.near_bits is not None
    unknown = np.zeros(SIGNATURE_BYTES, np.uint8)

    def digest_input(item: PackInput) -> tuple[Any, ...]:
        try:
            _, metadata = read_metadata(item, plan.options, reader, colors=is_near_dropped)
        except DecodeError:
            return (0, 0, 0, 0), 0, unknown, False, False
        words = np.frombuffer(bytes.fromhex(metadata.sha256), "<u8")
        colors = np.frombuffer(metadata.colors, np.uint8) if metadata.colors else unknown
        return words, metadata.phash or 0, colors, True, metadata.phash is not None

    digests = np.zeros(len(plan.inputs), DIGEST)
    with ThreadPoolExecutor(threads) as pool:
        for row, digest in enumerate(pool.map(digest_input, plan.inputs)):
            digests[row] = digest
            on_progress(1, 0, 0)
    _save(destination, plan.digests, digests)


@dataclass(frozen=True)
class DuplicateSearch:
    """The search for duplicates among the stored digests of ``plans``; it can be pickled."""

    destination: Storage
    digests: tuple[str, ...]
    counts: tuple[int, ...]
    near_bits: int | None

    @classmethod
    def of(
        cls, plans: Sequence[ShardPlan], destination: Storage, near_bits: int | None
    ) -> DuplicateSearch:
        """Return the search among all inputs of ``plans``, in order."""
        names = tuple(plan.digests for plan in plans)
        counts = tuple(len(plan.inputs) for plan in plans)
        return cls(destination, names, counts, near_bits)

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def processes(self, workers: int) -> int:
        """Return how many processes have enough memory for the search."""
        return max(1, min(workers, _SHARED_BYTES // (_SEARCH_BYTES * max(1, self.rows))))

    @property
    def _num_parts(self) -> int:
        return -(-self.rows // _PART_ROWS)

    def part_names(self) -> list[str]:
        """Return the files of the parts of the search; a small pack is searched at once."""
        parts = range(self._num_parts)
        if len(parts) <= 1:
            return []
        names = [self._bytes_name(part) for part in parts]
        if self.near_bits is not None:
            for table in range(len(_tables(self))):
                names += [self._near_name(table, part) for part in parts]
        return names

    @staticmethod
    def _bytes_name(part: int) -> str:
        return f"{DUPLICATES_FOLDER}/bytes-{part:06d}.npy"

    @staticmethod
    def _near_name(table: int, part: int) -> str:
        return f"{DUPLICATES_FOLDER}/near-{table:03d}-{part:06d}.npy"

    def search_part(self, name: str, _: ProgressCallback, __: Decoders) -> None:
        """Search one part and store its result."""
        kind, *numbers = name.rpartition("/")[2].removesuffix(".npy").split("-")
        if kind == "bytes":
            found = self._equal_bytes(int(numbers[0]))
        else:
            found = self._near(int(numbers[0]), int(numbers[1]))
        _save(self.destination, name, np.stack(found))

    def _equal_bytes(self, part: int) -> tuple[Positions, Positions]:
        """Return the images of a part that have the bytes of an earlier one, and that one each."""
        words, rows, first_row = [], [], 0
        for digests in self.read_digests():
            sha256 = digests["sha256"]
            is_of_part = digests["is_readable"] & (
                part_of(sha256[:, 0], max(1, self._num_parts)) == part
            )
            words.append(sha256[is_of_part])
            rows.append(first_row + np.flatnonzero(is_of_part))
            first_row += len(digests)
        every = np.concatenate(rows)
        equal, firsts = equal_rows(np.concatenate(words))
        return every[equal], every[firsts]

    def _near(self, table: int, part: int) -> tuple[Positions, Positions]:
        """Return the hashes of a part with an earlier one nearby, and the first such one each."""
        assert self.near_bits is not None
        images, chosen = _distinct_images(self).in_order, _tables(self)[table]
        rows = np.flatnonzero(part_of(chosen.keys(images.hashes), self._num_parts) == part)
        every, first = np.ones(len(rows), np.bool_), np.full(len(rows), NONE)
        Search(images.take(rows), every, every, self.near_bits).search_table(chosen, first)
        found = first != NONE
        return rows[found], rows[first[found]]

    def find_dropped(self, _: str, __: ProgressCallback, ___: Decoders) -> None:
        """Store which images are left out. All parts must be stored."""
        if names := self.part_names():
            near_parts = [name for name in names if "/near-" in name]
            rows, firsts = self._read_pairs([name for name in names if name not in near_parts])
            near = self._resolve_near(near_parts) if self.near_bits is not None else None
        else:
            rows, firsts = self._equal_bytes(0)
            near = None
            if self.near_bits is not None:
                near = near_duplicates(_hashed_images(self)[0], self.near_bits)
        duplicate_of = np.full(self.rows, NONE)
        if near is not None:
            hashed, is_near = _hashed_images(self)[1], near != NONE
            duplicate_of[hashed[is_near]] = hashed[near[is_near]]
        duplicate_of[rows] = firsts
        is_equal = np.zeros(self.rows, np.bool_)
        is_equal[rows] = True
        dropped = np.flatnonzero(duplicate_of != NONE)
        result = np.zeros(len(dropped), DROPPED)
        result["row"], result["first"] = dropped, duplicate_of[dropped]
        result["is_equal"] = is_equal[dropped]
        _save(self.destination, DROPPED_NAME, result)

    def _resolve_near(self, names: Sequence[str]) -> Positions:
        assert self.near_bits is not None
        distinct = _distinct_images(self)
        earlier = np.full(len(distinct.in_order), NONE)
        for name in names:
            rows, firsts = self._read_pairs([name])
            earlier[rows] = np.minimum(earlier[rows], firsts)
        return distinct.name_all(resolve(distinct.in_order, earlier, self.near_bits))

    def _read_pairs(self, names: Sequence[str]) -> tuple[Positions, Positions]:
        rows, firsts = np.concatenate([_load(self.destination, name) for name in names], axis=1)
        return rows, firsts

    def read_digests(self) -> Iterator[NDArray[Any]]:
        """Yield the digests of each shard."""
        for name in self.digests:
            stored = _load(self.destination, name)
            if stored.dtype != DIGEST:  # of an earlier version
                digests = np.zeros(len(stored), DIGEST)
                for field in stored.dtype.names or ():
                    digests[field] = stored[field]
                stored = digests
            yield stored


# Each process reads these once, whatever number of parts it searches.


@lru_cache(maxsize=1)
def _hashed_images(search: DuplicateSearch) -> tuple[Images, Positions]:
    """Return all images that have a perceptual hash, and their rows."""
    hashes, colors, rows, first_row = [], [], [], 0
    for digests in search.read_digests():
        with_hash = np.flatnonzero(digests["has_phash"])
        hashes.append(digests["phash"][with_hash])
        colors.append(digests["colors"][with_hash])
        rows.append(first_row + with_hash)
        first_row += len(digests)
    return Images(np.concatenate(hashes), np.concatenate(colors)), np.concatenate(rows)


@lru_cache(maxsize=1)
def _distinct_images(search: DuplicateSearch) -> DistinctImages:
    return DistinctImages.of(_hashed_images(search)[0])


@lru_cache(maxsize=1)
def _tables(search: DuplicateSearch) -> list[KeyTable]:
    assert search.near_bits is not None
    return choose_tables(_distinct_images(search).in_order.hashes, search.near_bits)


def forget_hashes() -> None:
    """Free the memory of a search in this process."""
    _hashed_images.cache_clear()
    _distinct_images.cache_clear()


class DroppedInputs:
    """The images of a pack to leave out, by shard.

    Memory holds their rows, and the names of the images that they duplicate, which are read once.
    """

    def __init__(self, plans: Sequence[ShardPlan], destination: Storage) -> None:
        self._dropped = _load(destination, DROPPED_NAME)
        self._sources = dict(self._read_sources(plans))

    def of_shard(self, plan: ShardPlan) -> dict[int, RejectedInput]:
        """Return the rejected inputs of a shard by number."""
        low, high = np.searchsorted(self._dropped["row"], _row_range(plan))
        if low == high:
            return {}
        by_row = {int(entry["row"]): entry for entry in self._dropped[low:high]}
        rejected = {}
        for row, item in enumerate(plan.inputs, plan.first):
            if (entry := by_row.get(row)) is not None:
                first = self._sources[int(entry["first"])]
                rejected[item.number] = _rejection(item, entry, first)
        return rejected

    def _read_sources(self, plans: Sequence[ShardPlan]) -> Iterator[tuple[int, str]]:
        firsts = np.unique(self._dropped["first"])
        for plan in plans:
            low, high = np.searchsorted(firsts, _row_range(plan))
            wanted = set(firsts[low:high].tolist())
            for row, item in enumerate(plan.inputs, plan.first) if wanted else ():
                if row in wanted:
                    yield row, item.source


def _row_range(plan: ShardPlan) -> tuple[int, int]:
    return plan.first, plan.first + len(plan.inputs)


def _rejection(item: PackInput, entry: Any, first: str) -> RejectedInput:
    if entry["is_equal"]:
        return RejectedInput(item.source, "duplicate", f"has the same bytes as {first}")
    return RejectedInput(item.source, "near-duplicate", f"looks like {first}")


def _save(destination: Storage, name: str, array: NDArray[Any]) -> None:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_file(destination, name, content.getvalue())


def _load(destination: Storage, name: str) -> NDArray[Any]:
    array: NDArray[Any] = np.load(io.BytesIO(destination.read(name)), allow_pickle=False)
    return array
