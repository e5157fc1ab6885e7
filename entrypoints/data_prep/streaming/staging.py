"""Stages images that arrive one by one: each becomes a sample in S3, and waits there for a shard.

See :mod:`sm_train.entrypoints.data_prep.streaming.stream_state` for what is stored.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data_prep.packing.packed_sources import PackedSources, rows_with_samples
from sm_train.entrypoints.data_prep.packing.plan import DEFAULT_OPTIONS, PackInput, PackOptions
from sm_train.entrypoints.data_prep.packing.plan_files import HEADER_FILE
from sm_train.entrypoints.data_prep.packing.shard_builder import (
    InputReader,
    encode_input,
    read_index,
)
from sm_train.entrypoints.data_prep.packing.stored_plan import (
    inputs_folder,
    is_streamed_part,
    unfinished_inputs,
)
from sm_train.entrypoints.data_prep.streaming.arrivals import Arrival
from sm_train.entrypoints.data_prep.streaming.companions import (
    DeclaredColumns,
    NotYetError,
    read_companions,
)
from sm_train.entrypoints.data_prep.streaming.stream_state import (
    REJECTED,
    S3_REQUESTS,
    STAGED,
    is_seen,
    read_numbers,
    record_name,
)
from sm_train.entrypoints.images.decoder_pool import Decoders, InProcessDecoders
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.job_interface.index_location import INDEX_NAME, removal_list
from sm_train.entrypoints.sample_metadata.column_types import SOURCE
from sm_train.entrypoints.shards.removal_list import RemovalList, decode_list
from sm_train.entrypoints.shards.shard_index import RejectedInput, ShardIndex, read_header
from sm_train.entrypoints.shards.tar_reader import sample_members
from sm_train.entrypoints.storage.storage import S3Prefix
from sm_train.entrypoints.storage.store import ObjectHead, open_store


class RetryLaterError(Exception):
    """An image cannot be packed yet; its message should be delivered again."""


@dataclass(frozen=True)
class Stager:
    """Stages arrivals in ``destination``, but for images that were ``removed`` from it.

    ``packed`` are those that `sm-train pack` has put there, ``columns`` what each must have.
    """

    destination: S3Prefix
    options: PackOptions = DEFAULT_OPTIONS
    decoders: Decoders = field(default_factory=InProcessDecoders)
    removed: Container[str] = ()
    packed: PackedImages | None = None
    columns: DeclaredColumns = field(default_factory=DeclaredColumns)

    def stage(self, arrival: Arrival) -> str:
        """Stage an image as a sample, or reject it.

        Return ``staged``, ``rejected``, ``known``, ``overwritten`` or ``removed``.

        Raises:
            RetryLaterError: the caption or a column is missing, or access is denied.
        """
        if arrival.address in self.removed:
            return "removed"
        if arrival.version is None and (head := self._head(arrival)) is not None:
            arrival = replace(arrival, version=_version(head), bytes=head.bytes)
        if is_seen(self.destination, arrival.id) or self._is_packed(arrival):
            return "known"
        try:
            result = self._encode(arrival)
        except NotYetError as error:
            # An image that can never be packed does not wait.
            result = self._encoded(arrival, caption="none yet", fields=None)
            if not isinstance(result, RejectedInput):
                raise RetryLaterError(f"{arrival.address}: {error}") from None
        missing = isinstance(result, RejectedInput) and result.reason == "image-missing"
        if not missing and not self._is_current(arrival):
            return "overwritten"  # another version was read, which has its own message
        if isinstance(result, RejectedInput):
            if result.reason.endswith("-unreadable"):  # a role or a KMS key that is not set up yet
                raise RetryLaterError(f"{arrival.address}: {result.detail}")
            return "rejected" if self.reject(arrival.id, result) else "known"
        created = self.destination.create_if_absent(f"{STAGED}/{arrival.id}", result)
        return "staged" if created else "known"

    def _encode(self, arrival: Arrival) -> bytes | RejectedInput:
        """Return the sample of an image, or why it is rejected.

        Raises:
            NotYetError: its caption or its columns are missing.
        """
        try:
            caption, fields = read_companions(arrival, self.columns, self.destination.access)
        except DecodeError as error:
            return RejectedInput(arrival.address, error.reason, error.detail)
        return self._encoded(arrival, caption, fields)

    def _encoded(self, arrival: Arrival, caption: str, fields: str | None) -> bytes | RejectedInput:
        address = arrival.address
        item = PackInput(0, address, address, arrival.bytes, caption, table_fields=fields)
        reader = InputReader(self.destination.access, self.decoders)
        return encode_input(item, arrival.id, self.options, reader)

    def _is_packed(self, arrival: Arrival) -> bool:
        """Return whether `sm-train pack` has packed this version of an image.

        Raises:
            RetryLaterError: a pack that is not finished will.
        """
        found = [] if self.packed is None else self.packed.find(arrival.address)
        head = self._head(arrival) if found else None
        if head is None:
            return False
        # An object that was written later is a new version.
        listed = [image for image in found if image.listed >= head.modified]
        if any(image.is_finished for image in listed):
            return True
        if listed:
            raise RetryLaterError(f"{arrival.address}: `sm-train pack --append` has not finished")
        return False

    def _is_current(self, arrival: Arrival) -> bool:
        """Return whether the object still has the version of the message. Call after reading it."""
        head = self._head(arrival)
        return head is not None and arrival.version in (head.version, head.etag.strip('"'))

    def _head(self, arrival: Arrival) -> ObjectHead | None:
        from botocore.exceptions import ClientError

        try:
            return open_store(self.destination.access).head(arrival.bucket, arrival.key)
        except ClientError as error:
            raise RetryLaterError(f"{arrival.address}: {error}") from None

    def reject(self, name: str, rejected: RejectedInput) -> bool:
        """Record a rejected input, unless that was done before; return whether."""
        if is_seen(self.destination, name):
            return False
        content = json.dumps(vars(rejected)).encode()
        return self.destination.create_if_absent(f"{REJECTED}/{name}", content)


def _version(head: ObjectHead) -> str:
    """Return what S3's messages name as the version of an object."""
    # An object without a version has the id "null" once versioning is suspended.
    if head.version is None or head.version == "null":
        return head.etag.strip('"')
    return head.version


class RemovedImages:
    """The images that were removed from a pack, which must not return; read when first needed."""

    def __init__(self, destination: S3Prefix) -> None:
        self._destination = destination
        self._lock = threading.Lock()
        self._sources: frozenset[str] | None = None

    def __contains__(self, address: object) -> bool:
        with self._lock:
            if self._sources is None:
                self._sources = _read_removals(self._destination).sources
        return address in self._sources


@dataclass(frozen=True)
class PackedImage:
    """An image that `sm-train pack` has listed, and when, by S3's clock."""

    listed: datetime
    is_finished: bool


class PackedImages:
    """The images that `sm-train pack` has put into a pack; read when first needed.

    An append that is not finished counts. Images that it has rejected do not.
    """

    def __init__(self, destination: S3Prefix) -> None:
        self._destination = destination
        self._lock = threading.Lock()
        self._packs: list[_ListedPack] | None = None

    def find(self, address: str) -> list[PackedImage]:
        """Return when the image at an address was listed; nothing if the pack does not have it."""
        with self._lock:
            if self._packs is None:
                self._packs = list(self._read())
            return [
                PackedImage(pack.listed[place], pack.is_finished)
                for pack in self._packs
                for place, number in pack.sources.numbers_at(address)
                if not pack.is_finished or self._is_packed(pack, number)
            ]

    def _is_packed(self, pack: _ListedPack, number: int) -> bool:
        """Return whether an input is in a shard, or was until it was removed."""
        if pack.has_sample is None:
            with self._destination.open(INDEX_NAME) as file:
                index = ShardIndex(self._destination.address(INDEX_NAME), file)
                pack.has_sample = rows_with_samples(index, pack.sources.rows)
            for key in _read_removals(self._destination).samples["key"].to_pylist():
                if key.isdecimal() and int(key) < len(pack.has_sample):
                    pack.has_sample[int(key)] = True
        return bool(pack.has_sample[number])

    def _read(self) -> Iterator[_ListedPack]:
        destination = self._destination
        try:
            with destination.open(INDEX_NAME) as file:
                fingerprints = read_header(file, destination.address(INDEX_NAME)).fingerprints
        except FileNotFoundError:
            fingerprints = ()
        finished = [each for each in fingerprints if not is_streamed_part(each)]
        unfinished = unfinished_inputs(destination)
        for parts in (finished, [unfinished] if unfinished and unfinished not in finished else []):
            sources = PackedSources.read(destination, destination.access, parts) if parts else None
            if sources is not None:
                listed = [self._listed(fingerprint) for fingerprint in parts]
                yield _ListedPack(sources, listed, parts is finished)

    def _listed(self, fingerprint: str) -> datetime:
        name = f"{inputs_folder(fingerprint)}/{HEADER_FILE}"
        return datetime.fromtimestamp(self._destination.modified_ns(name) / 1e9, UTC)


@dataclass
class _ListedPack:
    """The inputs of a pack and of all appends to it, and when each was listed, by S3's clock.

    ``has_sample`` says which inputs are in shards, bool (num_inputs,); None until it is needed.
    """

    sources: PackedSources
    listed: list[datetime]
    is_finished: bool
    has_sample: NDArray[np.bool_] | None = None


def _read_removals(destination: S3Prefix) -> RemovalList:
    name = removal_list(INDEX_NAME)
    try:
        content = destination.read(name)
    except FileNotFoundError:
        return RemovalList()
    return decode_list(content, destination.address(name))


def arriving_addresses(destination: S3Prefix) -> list[str]:
    """Return the addresses of images that are staged, or in shards that no index has yet, sorted.

    Each is read. Call it before the index is read: images go from one to the other in this order.
    """

    def of_staged(name: str) -> list[str]:
        try:
            _, members = sample_members(memoryview(destination.read(f"{STAGED}/{name}")))
        except FileNotFoundError:
            return []  # sealed since
        return [json.loads(bytes(members["json"]))["source"]]

    def of_record(number: int) -> list[str]:
        try:
            shard = read_index(destination, record_name(number)).shard(0)
        except FileNotFoundError:
            return []  # in the index since
        return list(shard.columns.get(SOURCE, ()))

    with ThreadPoolExecutor(S3_REQUESTS) as pool:
        staged = pool.map(of_staged, [name for name, _ in destination.objects(STAGED)])
        found = {address for part in staged for address in part}
        sealed = pool.map(of_record, read_numbers(destination).records)
        found |= {address for part in sealed for address in part}
    return sorted(found)
