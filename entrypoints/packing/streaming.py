"""Packs images that arrive one by one: stages them in S3 as samples and seals these into shards.

Each image is packed exactly once. The whole state is in ``.streaming/`` in the destination:

- ``staged/ID``: a sample as it will be in a tar. ID is a digest of the image's URI and version, so
  a message that is delivered twice stages the same object. It is created only if it is absent.
- ``seen/ID``: an empty object; the sample is in a shard. A lifecycle rule may remove it once its
  message cannot be delivered again (a queue keeps messages for at most 14 days).
- ``rejected/ID``: a rejected image, and why.
- ``manifests/NUMBER``: the samples of one shard. It is created only if it is absent, and its number
  is one more than the last. So whoever creates it has seen all earlier manifests, and no two
  manifests claim the same sample.
- ``leases/NUMBER``: one invocation is writing the shard (:mod:`sm_train.entrypoints.leases`).
- ``records/NUMBER``: the shard is written; its own index. ``done/NUMBER``: its samples are seen.

A shard depends only on its manifest, so writing it twice gives the same bytes. Interrupted work is
found by its missing ``done`` and finished by the next invocation. A sample is staged or seen at any
time, and a claim skips the seen ones, so no sample is lost and none is packed twice.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from sm_train.entrypoints.common.index_location import (
    INDEX_NAME,
    SHARDS_FOLDER,
    STAGED_FOLDER,
    replaced_index,
)
from sm_train.entrypoints.data.shard_format import Shard
from sm_train.entrypoints.data.shard_index import IndexWriter, RejectedInput, ShardIndex
from sm_train.entrypoints.data.tar_reader import sample_members
from sm_train.entrypoints.images.decoder_pool import Decoders, InProcessDecoders
from sm_train.entrypoints.images.image_header import DecodeError, image_size
from sm_train.entrypoints.leases.holder import Holder
from sm_train.entrypoints.leases.lease import Lease, LeaseHeldError, Renewal
from sm_train.entrypoints.object_store.store import open_store
from sm_train.entrypoints.packing.plan import PackInput, PackOptions
from sm_train.entrypoints.packing.shard_builder import (
    InputReader,
    encode_input,
    encode_record,
    open_index,
)
from sm_train.entrypoints.packing.shard_writer import ShardWriter
from sm_train.entrypoints.shared_work.storage import S3Prefix, write_file

STREAM_STATE = ".streaming"
STAGED = STAGED_FOLDER
SEEN = f"{STREAM_STATE}/seen"
REJECTED = f"{STREAM_STATE}/rejected"
MANIFESTS = f"{STREAM_STATE}/manifests"
RECORDS = f"{STREAM_STATE}/records"
DONE = f"{STREAM_STATE}/done"
LEASES = f"{STREAM_STATE}/leases"

S3_REQUESTS = 32
"""Objects that are requested at the same time."""

ABANDONED_AFTER = timedelta(days=1)
"""Age at which an unfinished upload is aborted; a Lambda function runs for at most 15 minutes."""


class RetryLaterError(Exception):
    """An image cannot be packed yet; its message should be delivered again."""


@dataclass(frozen=True)
class Arrival:
    """An image that arrived: its location, its version (version id or ETag) and its size."""

    bucket: str
    key: str
    version: str
    bytes: int

    @property
    def id(self) -> str:
        """Name of the sample; the same for each delivery of a message about the same version."""
        content = json.dumps([self.bucket, self.key, self.version])
        return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class StreamingPacker:
    """Packs arrivals into ``destination``, in shards of at least ``target_bytes``."""

    destination: S3Prefix
    target_bytes: int
    options: PackOptions = field(default_factory=PackOptions)
    decoders: Decoders = field(default_factory=InProcessDecoders)

    def stage(self, arrival: Arrival) -> str:
        """Stage an image as a sample, or reject it.

        Return ``staged``, ``rejected``, ``known`` or ``overwritten``.

        Raises:
            RetryLaterError: the caption is missing, or access is denied.
        """
        if self._is_seen(arrival.id):
            return "known"
        address = f"s3://{arrival.bucket}/{arrival.key}"
        caption = f"{address.rpartition('.')[0]}.txt"
        item = PackInput(0, address, address, arrival.bytes, caption_address=caption)
        reader = InputReader(self.destination.access, self.decoders)
        result = encode_input(item, arrival.id, self.options, reader)
        missing = isinstance(result, RejectedInput) and result.reason == "image-missing"
        if not missing and not self._is_current(arrival):
            return "overwritten"  # another version was read, which has its own message
        if isinstance(result, RejectedInput):
            if result.reason == "caption-missing":
                raise RetryLaterError(f"{address}: no caption yet")
            if result.reason.endswith("-unreadable"):  # a role or a KMS key that is not set up yet
                raise RetryLaterError(f"{address}: {result.detail}")
            self.reject(arrival.id, result)
            return "rejected"
        created = self.destination.create_if_absent(f"{STAGED}/{arrival.id}", result)
        return "staged" if created else "known"

    def _is_current(self, arrival: Arrival) -> bool:
        """Return whether the object still has the version of the message. Call after reading it."""
        from botocore.exceptions import ClientError

        try:
            head = open_store(self.destination.access).head(arrival.bucket, arrival.key)
        except ClientError as error:
            raise RetryLaterError(f"s3://{arrival.bucket}/{arrival.key}: {error}") from None
        return head is not None and arrival.version in (head.version, head.etag.strip('"'))

    def reject(self, name: str, rejected: RejectedInput) -> None:
        """Record a rejected input once."""
        content = json.dumps(vars(rejected)).encode()
        self.destination.create_if_absent(f"{REJECTED}/{name}", content)

    def seal(self, *, flush: bool = False, may_continue: Callable[[], bool] = lambda: True) -> int:
        """Finish interrupted shards, then build shards while enough samples are staged.

        ``flush`` also builds a shard of the remainder. ``may_continue`` is called before each
        shard. Return the number of finished shards.
        """
        finished = 0
        holder = Holder.of_this_process()
        try:
            with Renewal() as renewal:
                for unfinished in sorted(self._numbers(MANIFESTS) - self._numbers(DONE)):
                    if may_continue():
                        finished += self._finish_alone(unfinished, holder, renewal)
                while may_continue() and (claimed := self._claim(flush)) is not None:
                    finished += self._finish_alone(claimed, holder, renewal)
        finally:
            holder.close()
        return finished

    def _finish_alone(self, number: int, holder: Holder, renewal: Renewal) -> bool:
        """Finish a shard unless another invocation is at it; return whether this one did.

        The lease only saves work: an invocation that was suspended writes the same bytes.
        """
        name = f"{LEASES}/{number:06d}.json"
        lease = Lease(self.destination.lease_files, name, holder)
        try:
            lease.acquire()
        except LeaseHeldError:
            return False
        renewal.add(name, lease)
        try:
            if self.destination.size(f"{DONE}/{number:06d}") is not None:
                return False  # since it was listed
            self._finish(number)
        finally:
            renewal.discard(name)
            lease.release()
        return True

    def _numbers(self, folder: str) -> set[int]:
        return {int(name) for name in self.destination.list_sizes(folder)}

    def _claim(self, flush: bool) -> int | None:
        """Claim the samples of the next shard; return its number, or None if too few are staged."""
        while True:
            numbers = self._numbers(MANIFESTS)
            claimed = {
                name
                for number in numbers - self._numbers(DONE)
                for name in self._read_manifest(number)
            }
            staged = self.destination.list_sizes(STAGED)
            unclaimed = [name for name in sorted(staged) if name not in claimed]
            if not flush and sum(staged[name] for name in unclaimed) < self.target_bytes:
                return None
            chosen, size = self._choose_unseen(unclaimed, staged)
            if not chosen or (size < self.target_bytes and not flush):
                return None
            number = max(numbers, default=-1) + 1
            manifest = json.dumps(chosen).encode()
            if self.destination.create_if_absent(f"{MANIFESTS}/{number:06d}", manifest):
                return number
            # A concurrent invocation created this manifest: choose again without its samples.

    def _choose_unseen(self, names: Sequence[str], sizes: dict[str, int]) -> tuple[list[str], int]:
        """Return the first unseen samples that fill a shard, and their size in bytes."""
        chosen: list[str] = []
        size = 0
        with ThreadPoolExecutor(S3_REQUESTS) as pool:
            for first in range(0, len(names), S3_REQUESTS):
                group = names[first : first + S3_REQUESTS]
                for name, seen in zip(group, pool.map(self._is_seen, group), strict=True):
                    if size >= self.target_bytes:
                        return chosen, size
                    if seen:
                        # Its message was delivered again after the sample had been packed.
                        self.destination.remove(f"{STAGED}/{name}")
                        continue
                    chosen.append(name)
                    size += sizes[name]
        return chosen, size

    def _is_seen(self, name: str) -> bool:
        return self.destination.size(f"{SEEN}/{name}") is not None

    def _read_manifest(self, number: int) -> list[str]:
        names: list[str] = json.loads(self.destination.read(f"{MANIFESTS}/{number:06d}"))
        return names

    def _finish(self, number: int) -> None:
        """Write a claimed shard, its record and the index, then mark its samples as seen."""
        names = self._read_manifest(number)
        record = f"{RECORDS}/{number:06d}"
        if self.destination.size(record) is None:
            try:
                shard = self._write_shard(number, names)
            except FileNotFoundError:
                return  # a concurrent invocation has finished it and removed the staged samples
            write_file(self.destination, record, encode_record(shard))
        # Before the shard is done: if this invocation dies, the next one writes the index.
        self._write_index()
        with ThreadPoolExecutor(S3_REQUESTS) as pool:
            list(pool.map(self._mark_seen, names))
        self.destination.create_if_absent(f"{DONE}/{number:06d}", b"")

    def _mark_seen(self, name: str) -> None:
        self.destination.create_if_absent(f"{SEEN}/{name}", b"")
        self.destination.remove(f"{STAGED}/{name}")

    def _write_shard(self, number: int, names: Sequence[str]) -> Shard:
        file_name = _shard_name(number)
        widths, heights = [], []
        with (
            self.destination.atomic_writer(f"{SHARDS_FOLDER}/{file_name}") as sink,
            ShardWriter(sink, file_name) as writer,
        ):
            for name, encoded in zip(names, self._read_staged(names), strict=True):
                writer.append(name, encoded)
                height, width = _image_size(encoded)
                heights.append(height)
                widths.append(width)
            return writer.finish(widths, heights)

    def _read_staged(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the staged samples in order; groups of them are read in parallel."""
        with ThreadPoolExecutor(S3_REQUESTS) as pool:
            for first in range(0, len(names), S3_REQUESTS):
                group = names[first : first + S3_REQUESTS]
                yield from pool.map(lambda name: self.destination.read(f"{STAGED}/{name}"), group)

    def _write_index(self) -> None:
        """Write an index of all shards that have a record and of those in the current index.

        Another invocation or `sm-train remove` may write the index too. So it is replaced only if
        it is the one that was read, and the last writer checks for new records.
        """
        while True:
            records = self.destination.list_sizes(RECORDS)
            rejected = self.destination.list_sizes(REJECTED)
            is_written = self._write_index_of(sorted(records), sorted(rejected))
            if is_written and self.destination.list_sizes(RECORDS).keys() == records.keys():
                return

    def _write_index_of(self, records: Sequence[str], rejections: Sequence[str]) -> bool:
        """Write the index unless another one has been written meanwhile; return whether."""
        version = self.destination.version(INDEX_NAME)
        current = self._read_index(INDEX_NAME)
        indexed = set(current.names) if current else set()
        # What `sm-train remove` has replaced has a record still.
        replaced = self._read_index(replaced_index(INDEX_NAME))
        indexed |= set(replaced.names) if replaced else set()
        added = [name for name in records if _shard_name(int(name)) not in indexed]
        read = self.destination.read
        with tempfile.TemporaryFile() as file:
            opened = current.rewriter(file) if current else IndexWriter(file)
            # A pack that images are added to may have columns: theirs are unknown.
            columns = current.header.columns if current else {}
            with opened as writer, ThreadPoolExecutor(S3_REQUESTS) as pool:
                for rows in current.shard_rows() if current else ():
                    writer.add_rows(rows)
                for record in pool.map(lambda name: read(f"{RECORDS}/{name}"), added):
                    shard = open_index(record).shard(0)
                    unknown = (None,) * shard.samples
                    writer.add(replace(shard, columns=dict.fromkeys(columns, unknown)))
                written = set()
                for content in pool.map(lambda name: read(f"{REJECTED}/{name}"), rejections):
                    rejected = RejectedInput(**json.loads(content))
                    written.add(rejected)
                    writer.reject(rejected)
                for rejected in current.rejected() if current else ():
                    if rejected not in written:
                        writer.reject(rejected)
            file.seek(0)
            if version is None:
                return self.destination.create_if_absent(INDEX_NAME, file.read())
            return self.destination.replace_if(INDEX_NAME, file, version)

    def abort_abandoned_uploads(self, now: datetime) -> int:
        """Abort uploads that killed invocations left; return their number."""
        return self.destination.abort_uploads(SHARDS_FOLDER, started_before=now - ABANDONED_AFTER)

    def _read_index(self, name: str) -> ShardIndex | None:
        try:
            return open_index(self.destination.read(name))
        except FileNotFoundError:
            return None


def _shard_name(number: int) -> str:
    return f"streamed-{number:06d}.tar"


def _image_size(encoded: bytes) -> tuple[int, int]:
    """Return the height and width of an encoded sample's image; (0, 0) if they are unreadable."""
    _, members = sample_members(memoryview(encoded))
    image = next(iter(members.values()))
    try:
        return image_size(image)
    except DecodeError:
        return 0, 0


def is_image(key: str) -> bool:
    """Return whether an object's key has the extension of an image."""
    return Path(key).suffix.lower() in {".jpg", ".jpeg", ".png", ".webp"}
