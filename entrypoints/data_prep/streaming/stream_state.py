"""The state of a streaming pack: what lies in ``.streaming/`` in its destination.

- ``staged/ID``: a sample as it will be in a tar. ID is a digest of the image's URI and version, so
  a message that is delivered twice stages the same object. It is created only if it is absent.
- ``seen/ID``: an empty object; the image is in a shard, or its rejection is in the index. A
  lifecycle rule may remove it once its message cannot be delivered again (a queue keeps messages
  for at most 14 days).
- ``rejected/ID``: a rejected image, and why. It is not in the index yet.
- ``manifests/NUMBER``: the samples of one shard. It is created only if it is absent, and its number
  is one more than the last. So whoever creates it has seen all earlier manifests, and no two
  manifests claim the same sample.
- ``leases/NUMBER``: one process is writing the shard (:mod:`sm_train.entrypoints.storage`);
  ``leases/index``: one is writing the index.
- ``records/NUMBER``: the shard is written; its own index. It is removed when the shard is in the
  index. ``done/NUMBER``: its samples are seen.
- ``first-open``: a number below which every shard is done. Numbers are listed from there on, so a
  claim takes as many requests after a million shards as after one. It may be behind, and only
  saves requests.

Three kinds of work change it, each of which any number of processes may do at the same time:
staging (:mod:`~sm_train.entrypoints.data_prep.streaming.staging`), sealing
(:mod:`~sm_train.entrypoints.data_prep.streaming.sealing`) and indexing
(:mod:`~sm_train.entrypoints.data_prep.streaming.stream_index`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sm_train.entrypoints.base.stored_fields import text
from sm_train.entrypoints.data_prep.work.plan_documents import read_checked
from sm_train.entrypoints.job_interface.index_location import (
    INDEX_NAME,
    RECORDS_FOLDER,
    STAGED_FOLDER,
    STREAM_STATE,
)
from sm_train.entrypoints.shards.shard_index import RejectedInput, ShardIndex
from sm_train.entrypoints.storage.storage import S3Prefix, write_file

STAGED = STAGED_FOLDER
SEEN = f"{STREAM_STATE}/seen"
REJECTED = f"{STREAM_STATE}/rejected"
MANIFESTS = f"{STREAM_STATE}/manifests"
RECORDS = RECORDS_FOLDER
DONE = f"{STREAM_STATE}/done"
LEASES = f"{STREAM_STATE}/leases"
FIRST_OPEN = f"{STREAM_STATE}/first-open"

S3_REQUESTS = 32
"""Objects that are requested at the same time."""


RESTORE = "restore an earlier version of the object"
"""What helps against a damaged object without which images would be lost."""


def numbered(folder: str, shard: int) -> str:
    """Return the object of a shard in a folder of the state; the names are in order."""
    return f"{folder}/{_digits(shard)}"


def _digits(shard: int) -> str:
    return f"{shard:09d}"


def record_name(shard: int) -> str:
    """Return the object that describes a sealed shard until the index does."""
    return numbered(RECORDS, shard)


def sample_key(shard: int, position: int) -> str:
    """Return the key of a sample in a streamed shard.

    Keys ascend, so an index stores them in two bytes each; digests take 16.
    """
    return f"s{shard:06d}-{position:06d}"


@dataclass(frozen=True)
class ShardNumbers:
    """The numbers of shards with each kind of object.

    Those of ``manifests`` and ``done`` are from ``first`` on; all shards below it are done.
    """

    first: int
    manifests: frozenset[int]
    done: frozenset[int]
    records: frozenset[int]

    @property
    def unfinished(self) -> frozenset[int]:
        """Shards that were claimed and are not done."""
        return self.manifests - self.done

    @property
    def sealed(self) -> list[int]:
        """Shards that are done and wait for the index."""
        return sorted(number for number in self.records if self._is_done(number))

    @property
    def next(self) -> int:
        """The number of the next shard. One whose manifest was deleted keeps its number."""
        return max(self.manifests | self.records | self.done, default=self.first - 1) + 1

    @property
    def next_first(self) -> int:
        """The number below which all shards are done by now."""
        is_open = {number for number in self.manifests | self.records if not self._is_done(number)}
        return min(is_open, default=max(self.next, self.first))

    def _is_done(self, number: int) -> bool:
        return number < self.first or number in self.done


def read_numbers(destination: S3Prefix) -> ShardNumbers:
    """List the numbers of shards: some requests, however many there are."""
    first = _read_first(destination)
    after = _digits(first - 1) if first else None
    return ShardNumbers(
        first,
        _numbers_in(destination, MANIFESTS, after),
        _numbers_in(destination, DONE, after),
        _numbers_in(destination, RECORDS, None),
    )


def _read_first(destination: S3Prefix) -> int:
    try:
        content = destination.read(FIRST_OPEN)
    except FileNotFoundError:
        return 0
    return int(content) if content.isdigit() else 0


def _numbers_in(destination: S3Prefix, folder: str, after: str | None) -> frozenset[int]:
    """Return the numbers that are names of objects in a folder. Other names are not ours."""
    names = (name for name, _ in destination.objects(folder, after=after))
    return frozenset(int(name) for name in names if name.isdecimal())


def advance_first(destination: S3Prefix) -> None:
    """Store the number below which all shards are done."""
    numbers = read_numbers(destination)
    if numbers.next_first > numbers.first:
        write_file(destination, FIRST_OPEN, str(numbers.next_first).encode())


def is_seen(destination: S3Prefix, name: str) -> bool:
    """Return whether an image is in a shard, or its rejection in the index."""
    return destination.size(f"{SEEN}/{name}") is not None


@dataclass(frozen=True)
class StreamCounts:
    """What a streaming pack has, by its objects.

    ``staged`` samples of ``staged_bytes`` wait for a shard. ``claimed`` shards are being sealed, or
    were interrupted; ``sealed`` ones wait for the index, as do ``rejected`` inputs.
    """

    staged: int
    staged_bytes: int
    claimed: int
    sealed: int
    rejected: int


def count_stream(destination: S3Prefix) -> StreamCounts:
    """Count what is staged, sealed and rejected and not in the index; one request for 1,000."""
    samples = staged = 0
    for _, size in destination.objects(STAGED):
        samples += 1
        staged += size
    numbers = read_numbers(destination)
    return StreamCounts(
        samples,
        staged,
        len(numbers.unfinished),
        len(numbers.sealed),
        sum(1 for _ in destination.objects(REJECTED)),
    )


def read_rejected(destination: S3Prefix, name: str) -> RejectedInput | None:
    """Return a rejected input that the index lacks; None if it has it meanwhile.

    Raises:
        PlanError: what is stored is damaged.
    """
    fields = {"source": text, "reason": text, "detail": text}
    try:
        found = read_checked(destination, f"{REJECTED}/{name}", fields, "delete it")
    except FileNotFoundError:
        return None
    return RejectedInput(**{field: found[field] for field in fields})


def rejected_inputs(destination: S3Prefix) -> list[RejectedInput]:
    """Return all rejected inputs of the pack: those of its index, and those that it lacks yet."""
    # First: a rejection goes from its file to the index.
    with ThreadPoolExecutor(S3_REQUESTS) as pool:
        names = [name for name, _ in destination.objects(REJECTED)]
        found = pool.map(lambda name: read_rejected(destination, name), names)
        new = [item for item in found if item is not None]
    try:
        with destination.open(INDEX_NAME) as file:
            indexed = list(ShardIndex(destination.address(INDEX_NAME), file).rejected())
    except FileNotFoundError:
        indexed = []
    return sorted({*indexed, *new}, key=lambda item: (item.source, item.reason))
