"""Stages images that arrive one by one: each becomes a sample in S3, and waits there for a shard.

See :mod:`sm_train.entrypoints.streaming.stream_state` for what is stored.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Container
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm_train.entrypoints.common.index_location import INDEX_NAME, removal_list
from sm_train.entrypoints.data.shard_index import RejectedInput
from sm_train.entrypoints.images.decoder_pool import Decoders, InProcessDecoders
from sm_train.entrypoints.object_store.store import ObjectHead, open_store
from sm_train.entrypoints.packing.plan import PackInput, PackOptions
from sm_train.entrypoints.packing.shard_builder import InputReader, encode_input
from sm_train.entrypoints.removal.removal_list import decode_list
from sm_train.entrypoints.shared_work.storage import S3Prefix
from sm_train.entrypoints.streaming.stream_state import REJECTED, STAGED, is_seen


class RetryLaterError(Exception):
    """An image cannot be packed yet; its message should be delivered again."""


@dataclass(frozen=True)
class Arrival:
    """An image that arrived: its location and its size.

    ``version`` is its version id, or its ETag in a bucket without versions; None if the message
    does not tell, and then it is that of the object as it is now.
    """

    bucket: str
    key: str
    version: str | None
    bytes: int

    @property
    def address(self) -> str:
        """The image's URI."""
        return f"s3://{self.bucket}/{self.key}"

    @property
    def id(self) -> str:
        """Name of the sample; the same for each delivery of a message about the same version."""
        content = json.dumps([self.bucket, self.key, self.version])
        return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Stager:
    """Stages arrivals in ``destination``, but for images that were ``removed`` from it."""

    destination: S3Prefix
    options: PackOptions = field(default_factory=PackOptions)
    decoders: Decoders = field(default_factory=InProcessDecoders)
    removed: Container[str] = ()

    def stage(self, arrival: Arrival) -> str:
        """Stage an image as a sample, or reject it.

        Return ``staged``, ``rejected``, ``known``, ``overwritten`` or ``removed``.

        Raises:
            RetryLaterError: the caption is missing, or access is denied.
        """
        if arrival.address in self.removed:
            return "removed"
        if arrival.version is None and (head := self._head(arrival)) is not None:
            arrival = replace(arrival, version=_version(head), bytes=head.bytes)
        if is_seen(self.destination, arrival.id):
            return "known"
        caption = f"{arrival.address.rpartition('.')[0]}.txt"
        item = PackInput(
            0, arrival.address, arrival.address, arrival.bytes, caption_address=caption
        )
        reader = InputReader(self.destination.access, self.decoders)
        result = encode_input(item, arrival.id, self.options, reader)
        missing = isinstance(result, RejectedInput) and result.reason == "image-missing"
        if not missing and not self._is_current(arrival):
            return "overwritten"  # another version was read, which has its own message
        if isinstance(result, RejectedInput):
            if result.reason == "caption-missing":
                raise RetryLaterError(f"{arrival.address}: no caption yet")
            if result.reason.endswith("-unreadable"):  # a role or a KMS key that is not set up yet
                raise RetryLaterError(f"{arrival.address}: {result.detail}")
            return "rejected" if self.reject(arrival.id, result) else "known"
        created = self.destination.create_if_absent(f"{STAGED}/{arrival.id}", result)
        return "staged" if created else "known"

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
                self._sources = self._read()
        return address in self._sources

    def _read(self) -> frozenset[str]:
        name = removal_list(INDEX_NAME)
        try:
            content = self._destination.read(name)
        except FileNotFoundError:
            return frozenset()
        return decode_list(content, self._destination.address(name)).sources


def is_image(key: str) -> bool:
    """Return whether an object's key has the extension of an image."""
    return Path(key).suffix.lower() in {".jpg", ".jpeg", ".png", ".webp"}
