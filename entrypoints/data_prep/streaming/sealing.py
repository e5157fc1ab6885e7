"""Seals staged samples into shards, each image exactly once, with any number of sealers.

A shard depends only on its manifest, so writing it twice gives the same bytes. Interrupted work is
found by its missing ``done`` and finished by the next sealer. A sample is staged or seen at any
time, and a claim skips the seen ones, so no sample is lost and none is packed twice.

See :mod:`sm_train.entrypoints.data_prep.streaming.stream_state` for what is stored.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from sm_train.entrypoints.base.stored_fields import list_of, record_of, text
from sm_train.entrypoints.data_prep.packing.shard_builder import encode_record
from sm_train.entrypoints.data_prep.streaming.companions import DeclaredColumns, NotYetError
from sm_train.entrypoints.data_prep.streaming.stream_state import (
    DONE,
    LEASES,
    MANIFESTS,
    RESTORE,
    S3_REQUESTS,
    SEEN,
    STAGED,
    advance_first,
    is_seen,
    numbered,
    read_numbers,
    record_name,
    sample_key,
)
from sm_train.entrypoints.data_prep.work.plan_documents import PlanError, one_line
from sm_train.entrypoints.images.stored_color import image_facts
from sm_train.entrypoints.job_interface.index_location import SHARDS_FOLDER, streamed_shard
from sm_train.entrypoints.sample_metadata.column_types import SOURCE, ColumnTypes, as_type
from sm_train.entrypoints.shards.shard_format import Shard
from sm_train.entrypoints.shards.shard_writer import ShardWriter, member_parts
from sm_train.entrypoints.shards.tar_reader import sample_members
from sm_train.entrypoints.storage.lease import Holder, Lease, LeaseHeldError, Renewal
from sm_train.entrypoints.storage.storage import S3Prefix, write_file
from sm_train.entrypoints.storage.stream_upload import BytesLike

ABANDONED_AFTER = timedelta(days=1)
"""Age at which an unfinished upload is aborted; a Lambda function runs for at most 15 minutes."""


@dataclass(frozen=True)
class Sealer:
    """Builds shards of at least ``target_bytes`` in ``destination``; samples have ``columns``."""

    destination: S3Prefix
    target_bytes: int
    columns: DeclaredColumns = field(default_factory=DeclaredColumns)

    def seal(self, *, flush: bool = False, may_continue: Callable[[], bool] = lambda: True) -> int:
        """Finish interrupted shards, then build shards while enough samples are staged.

        ``flush`` also builds a shard of the remainder. ``may_continue`` is called before each
        shard. Return the number of finished shards.

        Raises:
            PlanError: a stored object is damaged. Shards that do not need it are finished before.
        """
        finished = 0
        problems: list[PlanError] = []
        holder = Holder.of_this_process()
        try:
            with Renewal() as renewal:
                for number in sorted(read_numbers(self.destination).unfinished):
                    if may_continue():
                        finished += self._finish_alone(number, holder, renewal, problems)
                while may_continue() and (claimed := self._claim(flush)) is not None:
                    finished += self._finish_alone(claimed, holder, renewal, problems)
            if finished:
                advance_first(self.destination)
        finally:
            holder.close()
        if problems:
            raise problems[0]
        return finished

    def abort_abandoned_uploads(self, now: datetime) -> int:
        """Abort uploads of shards and indexes that killed functions left; return their number."""
        return self.destination.abort_uploads(started_before=now - ABANDONED_AFTER)

    def _finish_alone(
        self, number: int, holder: Holder, renewal: Renewal, problems: list[PlanError]
    ) -> bool:
        """Finish a shard unless another sealer is at it; return whether this one did.

        The lease only saves work: a sealer that was suspended writes the same bytes. What makes the
        shard impossible is added to ``problems``.
        """
        name = f"{numbered(LEASES, number)}.json"
        lease = Lease(self.destination.lease_files, name, holder)
        try:
            lease.acquire()
        except LeaseHeldError:
            return False
        renewal.add(name, lease)
        try:
            if self.destination.size(numbered(DONE, number)) is not None:
                return False  # since it was listed
            return self._finish(number)
        except PlanError as error:
            problems.append(error)
            return False
        finally:
            renewal.discard(name)
            lease.release()

    def _claim(self, flush: bool) -> int | None:
        """Claim the samples of the next shard; return its number, or None if too few are staged."""
        while True:
            numbers = read_numbers(self.destination)
            claimed = {
                name for number in numbers.unfinished for name in self._read_manifest(number)
            }
            chosen, size = self._choose_unseen(claimed)
            if not chosen or (size < self.target_bytes and not flush):
                return None
            manifest = json.dumps(chosen).encode()
            if self.destination.create_if_absent(numbered(MANIFESTS, numbers.next), manifest):
                return numbers.next
            # A concurrent sealer created this manifest: choose again without its samples.

    def _choose_unseen(self, claimed: set[str]) -> tuple[list[str], int]:
        """Return the first unclaimed samples that fill a shard, and their size in bytes.

        The listing ends with the first page that fills it, however many samples are staged.
        """
        listed = self.destination.objects(STAGED)
        unclaimed = ((name, size) for name, size in listed if name not in claimed)
        chosen: list[str] = []
        size = 0
        with ThreadPoolExecutor(S3_REQUESTS) as pool:
            while size < self.target_bytes and (group := list(islice(unclaimed, S3_REQUESTS))):
                seen = pool.map(self._is_seen, (name for name, _ in group))
                for (name, sample_bytes), was_seen in zip(group, seen, strict=True):
                    if was_seen:
                        # Its message was delivered again after the sample had been packed.
                        self.destination.remove(f"{STAGED}/{name}")
                    elif size < self.target_bytes:
                        chosen.append(name)
                        size += sample_bytes
        return chosen, size

    def _is_seen(self, name: str) -> bool:
        return is_seen(self.destination, name)

    def _read_manifest(self, number: int) -> list[str]:
        """Return the staged samples of a claimed shard.

        Raises:
            PlanError: what is stored is damaged.
        """
        name = numbered(MANIFESTS, number)
        content = self.destination.read(name)
        try:
            return list_of(text)(json.loads(content))
        except (ValueError, RecursionError) as error:
            fix = "delete it, and its samples go into another shard"
            if self.destination.size(record_name(number)) is not None:
                fix = RESTORE  # its shard has been written, with samples that are marked as seen
            raise PlanError(
                f"{self.destination.address(name)}: damaged: {one_line(error)}; {fix}"
            ) from None

    def _finish(self, number: int) -> bool:
        """Write a claimed shard and its record, then mark its samples as seen."""
        names = self._read_manifest(number)
        record = record_name(number)
        if self.destination.size(record) is None:
            try:
                shard = self._write_shard(number, names)
            except FileNotFoundError:
                # A concurrent sealer has finished the shard and removed the staged samples.
                return False
            write_file(self.destination, record, encode_record(shard, columns=self._types))
        with ThreadPoolExecutor(S3_REQUESTS) as pool:
            list(pool.map(self._mark_seen, names))
        self.destination.create_if_absent(numbered(DONE, number), b"")
        return True

    def _mark_seen(self, name: str) -> None:
        self.destination.create_if_absent(f"{SEEN}/{name}", b"")
        self.destination.remove(f"{STAGED}/{name}")

    def _write_shard(self, number: int, names: Sequence[str]) -> Shard:
        file_name = streamed_shard(number)
        widths, heights = [], []
        colors: list[str | None] = []
        columns: dict[str, list[Any]] = {name: [] for name in self._types}
        with (
            self.destination.atomic_writer(f"{SHARDS_FOLDER}/{file_name}") as sink,
            ShardWriter(sink, file_name) as writer,
        ):
            for position, encoded in enumerate(self._read_staged(names)):
                members, values = self._parse(names[position], encoded)
                key = sample_key(number, position)
                writer.append(key, *_with_key(key, members))
                (height, width), color = image_facts(next(iter(members.values())))
                colors.append(color)
                heights.append(height)
                widths.append(width)
                for column, value in values.items():
                    columns[column].append(value)
            return writer.finish(widths, heights, colors, columns)

    @property
    def _types(self) -> ColumnTypes:
        """The columns of a shard's record."""
        return {SOURCE: "text", **self.columns.types}

    def _parse(self, name: str, encoded: bytes) -> tuple[dict[str, memoryview], dict[str, Any]]:
        """Return the files of a staged sample, and its values of the columns.

        Raises:
            PlanError: it is damaged, or was staged with columns of other types.
        """
        address = self.destination.address(f"{STAGED}/{name}")
        try:
            _, members = sample_members(memoryview(encoded))
            content = json.loads(bytes(members["json"]))
            document = record_of({SOURCE: text})(content)
            found = content.get("columns", {})
            cells = self.columns.cells(found, address)
            others = found.keys() - cells
            if removed := [name for name in others if found[name] is not None]:
                raise NotYetError(f"{address}: {min(removed)}: the stack declares no such column")
        except NotYetError as error:
            fix = "declare it as it was, or as text, flush the stack, and change it then"
            raise PlanError(f"{error}; {fix}") from None
        except (tarfile.TarError, ValueError, LookupError, RecursionError, AttributeError) as error:
            raise PlanError(f"{address}: damaged: {one_line(error)}; {RESTORE}") from None
        values = {SOURCE: document[SOURCE], **cells}
        return members, {name: as_type(values[name], kind) for name, kind in self._types.items()}

    def _read_staged(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the staged samples in order; groups of them are read in parallel."""
        with ThreadPoolExecutor(S3_REQUESTS) as pool:
            for first in range(0, len(names), S3_REQUESTS):
                group = names[first : first + S3_REQUESTS]
                yield from pool.map(lambda name: self.destination.read(f"{STAGED}/{name}"), group)


def _with_key(key: str, members: dict[str, memoryview]) -> list[BytesLike]:
    """Return a sample's tar members under another key."""
    return [
        part
        for extension, content in members.items()
        for part in member_parts(f"{key}.{extension}", bytes(content))
    ]
