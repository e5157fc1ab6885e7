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
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data_prep.deduplication.colors import SIGNATURE_BYTES, Signatures
from sm_train.entrypoints.data_prep.deduplication.compared_images import (
    NONE,
    HashDistance,
    Hashes,
    Images,
    Positions,
    store_images,
)
from sm_train.entrypoints.data_prep.deduplication.equal_rows import equal_rows, part_of
from sm_train.entrypoints.data_prep.deduplication.hamming import KeyTable, choose_tables
from sm_train.entrypoints.data_prep.deduplication.near_duplicates import (
    distinct_rows,
    equal_images,
    near_duplicates,
    resolve,
)
from sm_train.entrypoints.data_prep.deduplication.near_search import PART_ROWS, Search, rows_of_part
from sm_train.entrypoints.data_prep.packing.plan import PackInput, ShardPlan
from sm_train.entrypoints.data_prep.packing.shard_builder import InputReader, read_metadata
from sm_train.entrypoints.data_prep.work.plan_documents import PlanError
from sm_train.entrypoints.data_prep.work.work_stages import STATE_FOLDER
from sm_train.entrypoints.data_prep.work.worker_pool import (
    ProgressCallback,
    WorkerPlan,
    WorkProgress,
    run_tasks,
)
from sm_train.entrypoints.images.decoder_pool import Decoders
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.shards.shard_index import RejectedInput
from sm_train.entrypoints.storage.storage import Storage, write_file
from sm_train.entrypoints.storage.store import S3Access

DIGEST = np.dtype(
    [
        ("sha256", "<u8", (4,)),
        ("phash", "<u8"),
        ("colors", "u1", (SIGNATURE_BYTES,)),
        ("is_readable", "?"),
        ("has_phash", "?"),
    ]
)
"""An image's digests: 90 bytes. Those of an unreadable image match no other. The colors are zeros
if near-duplicates are kept."""

DROPPED = np.dtype([("row", "<i8"), ("first", "<i8"), ("is_equal", "?")])
"""An image to leave out: its row among all inputs, that of the image that it duplicates, and
whether both have the same bytes."""

DUPLICATES_FOLDER = f"{STATE_FOLDER}/duplicates"

DROPPED_NAME = f"{DUPLICATES_FOLDER}/dropped.npy"

_SHARED_BYTES = 2**33
"""Memory for a search in all processes of a node."""

_SEARCH_BYTES, _PART_BYTES = 16, 2**30
"""Of these a process needs some for each image, its hash and some positions, and others for the
part that it searches."""


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
        """Return the search among all inputs of ``plans``, in order.

        Raises:
            PlanError: there are too many.
        """
        names = tuple(plan.digests for plan in plans)
        counts = tuple(len(plan.inputs) for plan in plans)
        if sum(counts) >= NONE:
            raise PlanError(
                f"duplicates are found among fewer than {NONE:,} images, not {sum(counts):,}"
            )
        return cls(destination, names, counts, near_bits)

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def processes(self, workers: int) -> int:
        """Return how many processes have enough memory for the search."""
        needed = _SEARCH_BYTES * self.rows + min(_PART_BYTES, 512 * self.rows + 1)
        return max(1, min(workers, _SHARED_BYTES // needed))

    @property
    def _num_parts(self) -> int:
        return -(-self.rows // PART_ROWS)

    def part_names(self) -> list[str]:
        """Return the files of the parts of the search; a small pack is searched at once."""
        parts = range(self._num_parts)
        if len(parts) <= 1:
            return []
        names = [f"bytes-{part:06d}" for part in parts]
        if self.near_bits is not None:
            names += [f"looks-{part:06d}" for part in parts]
            for table in range(len(_tables(self))):
                names += [f"near-{table:03d}-{part:06d}" for part in parts]
        return [f"{DUPLICATES_FOLDER}/{name}.npy" for name in names]

    def search_part(self, name: str, _: ProgressCallback, __: Decoders) -> None:
        """Search one part and store its result."""
        kind, *numbers = name.rpartition("/")[2].removesuffix(".npy").split("-")
        searches: dict[str, Callable[..., tuple[Positions, Positions]]] = {
            "bytes": self._equal_bytes,
            "looks": self._equal_looks,
            "near": self._near,
        }
        _save(self.destination, name, np.stack(searches[kind](*map(int, numbers))))

    def _equal_bytes(self, part: int) -> tuple[Positions, Positions]:
        """Return the images of a part that have the bytes of an earlier one, and that one each."""
        words, rows, first_row = [], [], 0
        for digests in self.read_digests():
            sha256 = digests["sha256"]
            is_of_part = digests["is_readable"] & (
                part_of(sha256[:, 0], max(1, self._num_parts)) == part
            )
            words.append(sha256[is_of_part])
            rows.append(first_row + np.flatnonzero(is_of_part).astype(np.int32))
            first_row += len(digests)
        every = np.concatenate(rows)
        equal, firsts = equal_rows(np.concatenate(words))
        return every[equal], every[firsts]

    def _equal_looks(self, part: int) -> tuple[Positions, Positions]:
        """Return the images of a part that have hash and colors of an earlier one, and that one."""
        rows, images = self._read_part(_WHOLE_HASH, part)
        equal, firsts = equal_images(images)
        return rows[equal], rows[firsts]

    def _near(self, table: int, part: int) -> tuple[Positions, Positions]:
        """Return the images of a part that are near an earlier one, and the first such one each.

        Of images that are equal, only the first one is searched.
        """
        assert self.near_bits is not None
        chosen = _tables(self)[table]
        rows, images = self._read_part(chosen, part)
        is_distinct = distinct_rows(len(rows), equal_images(images)[0])
        rows, images = rows[is_distinct], images.take(is_distinct)
        every, first = np.ones(len(rows), np.bool_), np.full(len(rows), NONE, np.int32)
        search = Search(images, every, every, HashDistance(self.near_bits))
        search.search_table(chosen, first, table)
        has_found = first != NONE
        return rows[has_found], rows[first[has_found]]

    def _read_part(self, table: KeyTable, part: int) -> tuple[Positions, Images]:
        images, has_hash = _images(self)
        rows = rows_of_part(images, table, part, self._num_parts)
        rows = rows[has_hash[rows]]
        return rows, images.take(rows).loaded()

    def find_dropped(self, _: str, __: ProgressCallback, ___: Decoders) -> None:
        """Store which images are left out. All parts must be stored."""
        names = self.part_names()
        duplicate_of = np.full(self.rows, NONE, np.int32)
        if self.near_bits is not None:
            duplicate_of = self._near_parts(names) if names else self._near_at_once()
        rows, firsts = self._read_pairs(names, "bytes") if names else self._equal_bytes(0)
        duplicate_of[rows] = firsts
        is_equal = np.zeros(self.rows, np.bool_)
        is_equal[rows] = True
        dropped = np.flatnonzero(duplicate_of != NONE)
        result = np.zeros(len(dropped), DROPPED)
        result["row"], result["first"] = dropped, duplicate_of[dropped]
        result["is_equal"] = is_equal[dropped]
        _save(self.destination, DROPPED_NAME, result)

    def _near_at_once(self) -> Positions:
        """Return for each image the kept one that it looks like, or NONE."""
        assert self.near_bits is not None
        images, has_hash = _images(self)
        rows = np.flatnonzero(has_hash).astype(np.int32)
        near = near_duplicates(images.take(rows).loaded(), self.near_bits)
        result = np.full(self.rows, NONE, np.int32)
        result[rows[near != NONE]] = rows[near[near != NONE]]
        return result

    def _near_parts(self, names: Sequence[str]) -> Positions:
        """Return the same from the stored results of the parts."""
        assert self.near_bits is not None
        images, has_hash = _images(self)
        equal = self._read_pairs(names, "looks")
        is_distinct = has_hash & distinct_rows(self.rows, equal[0])
        earlier = np.full(self.rows, NONE, np.int32)
        for name in names:
            if _kind(name) == "near":
                rows, firsts = self._read_pairs([name], "near")
                earlier[rows] = np.minimum(earlier[rows], firsts)
        return resolve(images, earlier, is_distinct, self.near_bits, equal=equal)

    def _read_pairs(self, names: Sequence[str], kind: str) -> tuple[Positions, Positions]:
        pairs = [_load(self.destination, name) for name in names if _kind(name) == kind]
        rows, firsts = np.concatenate(pairs, axis=1)
        return rows, firsts

    def read_digests(self) -> Iterator[NDArray[Any]]:
        """Yield the digests of each shard.

        Raises:
            PlanError: they are of another version of sm-train.
        """
        for name in self.digests:
            digests = _load(self.destination, name)
            if digests.dtype != DIGEST:
                raise PlanError(
                    f"{self.destination.address(name)}: of another version of sm-train; "
                    "sm-train pack without --append packs all images again"
                )
            yield digests


def _kind(name: str) -> str:
    """Return what a part searches: ``bytes``, ``looks`` or ``near``."""
    return name.rpartition("/")[2].partition("-")[0]


_WHOLE_HASH = KeyTable(tuple(range(64)))

# Each process reads these once, whatever number of parts it searches.


@lru_cache(maxsize=1)
def _images(search: DuplicateSearch) -> tuple[Images, NDArray[np.bool_]]:
    """Return all images, and whether each has a perceptual hash."""
    has_hash, first = np.zeros(search.rows, np.bool_), 0

    def read() -> Iterator[tuple[Hashes, Signatures]]:
        nonlocal first
        for digests in search.read_digests():
            has_hash[first : first + len(digests)] = digests["has_phash"]
            first += len(digests)
            yield digests["phash"], digests["colors"]

    # It has no name, and is gone with the process.
    file = tempfile.TemporaryFile()  # noqa: SIM115
    return store_images(read(), search.rows, file), has_hash


@lru_cache(maxsize=1)
def _tables(search: DuplicateSearch) -> list[KeyTable]:
    assert search.near_bits is not None
    images, has_hash = _images(search)
    hashes = images.hashes if has_hash.all() else images.hashes[has_hash]
    return choose_tables(hashes, search.near_bits)


def forget_hashes() -> None:
    """Free the memory of a search in this process."""
    _images.cache_clear()
    _tables.cache_clear()


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
