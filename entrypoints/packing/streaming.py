"""Images that come one by one: staged in S3 as samples, sealed into shards, each exactly once.

Everything below ``.trickle/`` in the destination, and nothing else, is the state:

- ``staged/ID``: a sample as it stands in a tar. ID is a digest of the image's address and version,
  so a message that comes twice stages the same object; it is put only if it is not there.
- ``seen/ID``: an empty object; the sample is in a shard. A lifecycle rule may remove it when no
  message can come again (a queue keeps one for 14 days at most).
- ``rejected/ID``: an image that was left out, and why.
- ``manifests/NUMBER``: the samples of one shard. It is put only if it is not there, and its number
  is one more than the last: so whoever puts it has seen all before it, and nobody else claims a
  sample of theirs.
- ``records/NUMBER``: the shard is there; its own index. ``done/NUMBER``: its samples are seen.

A shard depends on its manifest alone, so it may be written twice, with the same bytes. Whatever
was broken off is found by its missing ``done`` and finished by the next invocation. A sample is
always staged or seen, at a claim the seen ones are left out: none is lost, none comes twice.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from sm_train.entrypoints.common.index_location import INDEX_NAME, SHARDS_FOLDER
from sm_train.entrypoints.data.image_header import DecodeError, image_size
from sm_train.entrypoints.data.shard_format import Shard
from sm_train.entrypoints.data.shard_index import IndexWriter, RejectedInput, ShardIndex
from sm_train.entrypoints.data.tar_reader import sample_members
from sm_train.entrypoints.packing.plan import PackInput, PackOptions
from sm_train.entrypoints.packing.shard_builder import encode_input, encode_record, open_index
from sm_train.entrypoints.packing.shard_writer import ShardFile
from sm_train.entrypoints.packing.storage import S3Prefix, is_missing, s3_client

STATE = ".trickle"
STAGED, SEEN, REJECTED = f"{STATE}/staged", f"{STATE}/seen", f"{STATE}/rejected"
MANIFESTS, RECORDS, DONE = f"{STATE}/manifests", f"{STATE}/records", f"{STATE}/done"

READERS = 32
"""Objects that are asked for at the same time."""

ABANDONED = timedelta(days=1)
"""Uploads that were begun before that are nobody's: a function runs for a quarter of an hour."""


class RetryLaterError(Exception):
    """An image cannot be packed yet; the message should come again."""


@dataclass(frozen=True)
class Arrival:
    """An image that came: where it lies, its size, and what tells this version from others."""

    bucket: str
    key: str
    version: str
    bytes: int

    @property
    def id(self) -> str:
        """The name of the sample: the same for the same version, however often it is told of."""
        content = json.dumps([self.bucket, self.key, self.version])
        return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class StreamingPacker:
    """Packs arrivals into ``destination`` in shards of at least ``target_bytes``."""

    destination: S3Prefix
    target_bytes: int
    options: PackOptions = field(default_factory=PackOptions)

    def stage(self, arrival: Arrival) -> str:
        """Make a sample of an image, or reject it; returns ``staged``, ``rejected`` or ``known``.

        Raises:
            LaterError: its caption is not there yet.
        """
        if self._is_seen(arrival.id):
            return "known"
        address = f"s3://{arrival.bucket}/{arrival.key}"
        caption = f"{address.rpartition('.')[0]}.txt"
        item = PackInput(0, address, address, arrival.bytes, caption_address=caption)
        outcome = encode_input(item, arrival.id, self.options, self.destination.access)
        missing = isinstance(outcome, RejectedInput) and outcome.reason == "image-missing"
        if not missing and not self._is_current(arrival):
            return "overwritten"  # what was read is another version, which has its own message
        if isinstance(outcome, RejectedInput):
            if outcome.reason == "caption-missing":
                raise RetryLaterError(f"{address}: no caption yet")
            if outcome.reason.endswith("-unreadable"):  # a role or a key that is not right yet
                raise RetryLaterError(f"{address}: {outcome.detail}")
            self.reject(arrival.id, outcome)
            return "rejected"
        new = self.destination.create_if_absent(f"{STAGED}/{arrival.id}", outcome)
        return "staged" if new else "known"

    def _is_current(self, arrival: Arrival) -> bool:
        """Whether the object is still the one that the message tells of, after it was read."""
        from botocore.exceptions import ClientError

        client = s3_client(self.destination.access)
        try:
            head = client.head_object(Bucket=arrival.bucket, Key=arrival.key)
        except ClientError as error:
            if is_missing(error):
                return False
            raise RetryLaterError(f"s3://{arrival.bucket}/{arrival.key}: {error}") from None
        return arrival.version in (head.get("VersionId"), head["ETag"].strip('"'))

    def reject(self, name: str, rejected: RejectedInput) -> None:
        """Write down what was left out, once."""
        self.destination.create_if_absent(f"{REJECTED}/{name}", json.dumps(vars(rejected)).encode())

    def seal(self, *, all_of_it: bool = False, may_go_on: Callable[[], bool] = lambda: True) -> int:
        """Finish what was broken off, then make shards while there is enough staged.

        ``all_of_it`` makes a shard of the remainder, too; ``may_go_on`` is asked before each.
        Returns how many shards were finished.
        """
        finished = 0
        for begun in sorted(self._numbers(MANIFESTS) - self._numbers(DONE)):
            if may_go_on():
                self._finish(begun)
                finished += 1
        while may_go_on() and (claimed := self._claim(all_of_it)) is not None:
            self._finish(claimed)
            finished += 1
        return finished

    def _numbers(self, folder: str) -> set[int]:
        return {int(name) for name in self.destination.list_sizes(folder)}

    def _claim(self, all_of_it: bool) -> int | None:
        """Claim the samples of the next shard; None where there are not enough."""
        while True:
            numbers = self._numbers(MANIFESTS)
            claimed = {
                name for number in numbers - self._numbers(DONE) for name in self._manifest(number)
            }
            staged = self.destination.list_sizes(STAGED)
            free = [name for name in sorted(staged) if name not in claimed]
            if not all_of_it and sum(staged[name] for name in free) < self.target_bytes:
                return None
            chosen, size = self._unseen(free, staged)
            if not chosen or (size < self.target_bytes and not all_of_it):
                return None
            number = max(numbers, default=-1) + 1
            if self.destination.create_if_absent(
                f"{MANIFESTS}/{number:06d}", json.dumps(chosen).encode()
            ):
                return number
            # Another invocation was quicker: what it claimed is out of reach now.

    def _unseen(self, names: Sequence[str], sizes: dict[str, int]) -> tuple[list[str], int]:
        """The first of ``names`` that make a shard, those left out that are in one already."""
        chosen: list[str] = []
        size = 0
        with ThreadPoolExecutor(READERS) as pool:
            for first in range(0, len(names), READERS):
                group = names[first : first + READERS]
                for name, seen in zip(group, pool.map(self._is_seen, group), strict=True):
                    if size >= self.target_bytes:
                        return chosen, size
                    if seen:
                        self.destination.remove(f"{STAGED}/{name}")  # its message came once more
                        continue
                    chosen.append(name)
                    size += sizes[name]
        return chosen, size

    def _is_seen(self, name: str) -> bool:
        return self.destination.size(f"{SEEN}/{name}") is not None

    def _manifest(self, number: int) -> list[str]:
        names: list[str] = json.loads(self.destination.read(f"{MANIFESTS}/{number:06d}"))
        return names

    def _finish(self, number: int) -> None:
        names = self._manifest(number)
        record = f"{RECORDS}/{number:06d}"
        if self.destination.size(record) is None:
            try:
                shard = self._write(number, names)
            except FileNotFoundError:
                return  # another invocation has finished it in the meantime
            with self.destination.atomic_writer(record) as sink:
                sink.write(encode_record(shard))
        # Before it is done: whatever dies in between, the next invocation writes the index.
        self._write_index()
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(self._mark_seen, names))
        self.destination.create_if_absent(f"{DONE}/{number:06d}", b"")

    def _mark_seen(self, name: str) -> None:
        self.destination.create_if_absent(f"{SEEN}/{name}", b"")
        self.destination.remove(f"{STAGED}/{name}")

    def _write(self, number: int, names: Sequence[str]) -> Shard:
        file_name = _shard_name(number)
        widths, heights = [], []
        with (
            self.destination.atomic_writer(f"{SHARDS_FOLDER}/{file_name}") as sink,
            ShardFile(sink, file_name) as file,
        ):
            for name, encoded in zip(names, self._read(names), strict=True):
                file.append(name, encoded)
                height, width = _sides(encoded)
                heights.append(height)
                widths.append(width)
            return file.finish(widths, heights)

    def _read(self, names: Sequence[str]) -> Iterator[bytes]:
        """The staged samples in order, some read ahead."""
        with ThreadPoolExecutor(READERS) as pool:
            for first in range(0, len(names), READERS):
                group = names[first : first + READERS]
                yield from pool.map(lambda name: self.destination.read(f"{STAGED}/{name}"), group)

    def _write_index(self) -> None:
        """All shards that have a record, beside those of the index that is there.

        Another invocation may write one at the same time; whoever writes last looks again.
        """
        while True:
            records = self.destination.list_sizes(RECORDS)
            rejected = self.destination.list_sizes(REJECTED)
            self._write_index_of(sorted(records), sorted(rejected))
            if self.destination.list_sizes(RECORDS).keys() == records.keys():
                return

    def _write_index_of(self, records: Sequence[str], rejected: Sequence[str]) -> None:
        before = self._index()
        there = set(before.names) if before else set()
        new = [name for name in records if _shard_name(int(name)) not in there]
        with tempfile.TemporaryFile() as file:
            with IndexWriter(file) as writer, ThreadPoolExecutor(READERS) as pool:
                if before:
                    for number in range(len(before)):
                        writer.add(before.shard(number))
                for record in pool.map(lambda one: self._get(f"{RECORDS}/{one}"), new):
                    writer.add(open_index(record).shard(0))
                told = set()
                for content in pool.map(lambda one: self._get(f"{REJECTED}/{one}"), rejected):
                    told.add(one := RejectedInput(**json.loads(content)))
                    writer.reject(one)
                for one in before.rejected() if before else ():
                    if one not in told:
                        writer.reject(one)
            file.seek(0)
            with self.destination.atomic_writer(INDEX_NAME) as sink:
                sink.write(file.read())

    def tidy(self, now: datetime) -> int:
        """Give up what invocations leave that are ended in the middle of a shard; how many."""
        return self.destination.abort_uploads(SHARDS_FOLDER, started_before=now - ABANDONED)

    def _get(self, name: str) -> bytes:
        return self.destination.read(name)

    def _index(self) -> ShardIndex | None:
        try:
            return open_index(self._get(INDEX_NAME))
        except FileNotFoundError:
            return None


def _shard_name(number: int) -> str:
    return f"trickle-{number:06d}.tar"


def _sides(encoded: bytes) -> tuple[int, int]:
    _, members = sample_members(memoryview(encoded))
    image = next(iter(members.values()))
    try:
        return image_size(image)
    except DecodeError:
        return 0, 0


def is_image(key: str) -> bool:
    """Whether an object's name says that it is an image."""
    return Path(key).suffix.lower() in {".jpg", ".jpeg", ".png", ".webp"}
