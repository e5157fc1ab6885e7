"""Sends notifications for images that were in a bucket before S3 sent any.

A message is one of S3's event notifications for up to 20 images, but without their versions, which
the function looks up. An image that was staged before is known by its version, so nothing is packed
twice, whatever is sent again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from sm_train.entrypoints.data_prep.packing.plan import PackInput
from sm_train.entrypoints.data_prep.packing.plan_files import PlannedInputs, PlannedRejections
from sm_train.entrypoints.data_prep.packing.shard_builder import read_index
from sm_train.entrypoints.data_prep.packing.stored_plan import PackedInputs, read_packed_inputs
from sm_train.entrypoints.data_prep.work.work_stages import in_groups
from sm_train.entrypoints.data_prep.work.worker_pool import WorkProgress
from sm_train.entrypoints.job_interface.index_location import INDEX_NAME, SHARDS_FOLDER
from sm_train.entrypoints.storage.storage import Storage, open_storage
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.inputs import InputSource, PackInputs, find_inputs
from sm_train.toolkit.data_prep.packing.s3_listing import listing_root
from sm_train.toolkit.data_prep.packing.shard_set import ShardSet
from sm_train.toolkit.data_prep.packing.tables import TableOptions
from sm_train.toolkit.data_prep.streaming.given_metadata import GivenImages, MetadataTable
from sm_train.toolkit.data_prep.streaming.stack import StreamStack
from sm_train.toolkit.data_prep.streaming.streaming_price import streaming_usd

MESSAGE_IMAGES = 20
"""Images of a message: about 5 KB. A function receives up to 100 messages."""

BATCH_MESSAGES = 10
"""Messages of a request, the most that SQS takes."""

_SENDERS = 8
"""Requests to SQS at the same time."""


@dataclass(frozen=True)
class Notifications:
    """What to send: a notification for each image, which is iterated over.

    ``known`` images of the source are in the pack already. ``usd`` is the price of packing the
    others. ``given`` are the images of a table, whose captions and columns are written before.
    ``unused`` are columns of the table that the stack takes from elsewhere, ``absent`` its images
    that are no objects yet.
    """

    inputs: PackInputs
    known: int
    usd: Decimal
    given: GivenImages | None = None
    unused: tuple[str, ...] = ()
    absent: Sequence[str] = ()

    @property
    def images(self) -> int:
        """The number of images to pack."""
        return self.inputs.images - len(self.absent)

    @property
    def rejected(self) -> PlannedRejections:
        """The inputs that are left out: removed images, and rows that cannot be read."""
        return PlannedRejections(self.inputs.files, self.inputs.rejected)

    def __iter__(self) -> Iterator[PackInput]:
        return iter(_planned(self.inputs)) if self.given is None else self.given.present()


def _planned(inputs: PackInputs) -> PlannedInputs:
    return PlannedInputs(inputs.files, inputs.root, 0, inputs.images)


@contextmanager
def plan_notifications(
    stack: StreamStack, source: str, access: S3Access, table: MetadataTable | None = None
) -> Iterator[Notifications]:
    """List the images of ``source``, an S3 prefix or the manifest of an S3 inventory.

    With a ``table``, those that it names below the prefix.

    Raises:
        UserError: there are none, they are not in the bucket whose images the stack packs, or the
            table is not valid.
    """
    destination = open_storage(stack.destination, access)
    with translate_aws_errors(source), TemporaryDirectory(prefix="sm-train-plan-") as folder:
        packed = _read_packed(destination, access)
        removed = _removed_below(ShardSet(destination, SHARDS_FOLDER, access), source)
        options, location = TableOptions(), None
        unused: tuple[str, ...] = ()
        if table is not None:
            options, unused = table.options(stack.columns, access)
            location = table.location
        is_partial = table is not None
        images = InputSource(
            source, location, options, access=access, removed=removed, is_partial=is_partial
        )
        inputs = find_inputs(images, Path(folder), packed)
        root = inputs.root if table is None else listing_root(source)
        if not root.startswith(f"s3://{stack.raw_bucket}/"):
            raise UserError(
                f"--add: {source}: the stack {stack.name} packs images of "
                f"s3://{stack.raw_bucket}/; name a prefix of it or an inventory of it"
            )
        given, absent = None, list[str]()
        if table is not None:
            given = GivenImages(_planned(inputs), root, stack.columns, access)
            absent = given.absent()
        usd = streaming_usd(
            inputs.images - len(absent),
            inputs.image_bytes,
            stack.shard_bytes,
            has_columns=bool(stack.columns.types),
            given_files=bool(options.caption_columns) + bool(options.keep) if given else 0,
        )
        known = 0 if inputs.comparison is None else inputs.comparison.known
        if stack.columns.types and stack.columns.origin == "sidecar":
            skipped = {kind: files for kind, files in inputs.skipped.items() if kind != "json"}
            inputs = replace(inputs, skipped=skipped)
        yield Notifications(inputs, known, usd, given, unused, absent)


def _read_packed(destination: Storage, access: S3Access) -> PackedInputs | None:
    """Return the images that the pack has; None if they are not known."""
    try:
        header = read_index(destination, INDEX_NAME).header
    except FileNotFoundError:
        return None
    if header.inputs is None:
        return None
    return read_packed_inputs(destination, access, header.fingerprints)


def _removed_below(shards: ShardSet, source: str) -> frozenset[str]:
    """Return the names below ``source`` of images that were removed from the pack.

    A pack knows its images by these names, a streaming pack by their addresses.
    """
    root = listing_root(source)
    removed = shards.read_list().sources
    return removed | {name.removeprefix(root) for name in removed}


def send_notifications(
    stack: StreamStack,
    notifications: Notifications,
    on_progress: Callable[[WorkProgress], None],
) -> int:
    """Send them; return the number of images.

    Raises:
        UserError: SQS denies access or rejects a message.
    """
    total, done = notifications.images, 0
    messages = (_message(group) for group in in_groups(notifications, MESSAGE_IMAGES))
    with translate_aws_errors(stack.queue), ThreadPoolExecutor(_SENDERS) as pool:
        sqs: Any = stack.session.client("sqs")

        def send(batch: list[tuple[str, int]]) -> int:
            entries = [
                {"Id": str(number), "MessageBody": body} for number, (body, _) in enumerate(batch)
            ]
            answer = sqs.send_message_batch(QueueUrl=stack.queue, Entries=entries)
            if failed := answer.get("Failed"):
                raise UserError(f"{stack.queue}: {failed[0].get('Message', failed[0]['Code'])}")
            return sum(images for _, images in batch)

        # A group of requests at a time, so that an hour of messages is not in memory.
        batches = in_groups(messages, BATCH_MESSAGES)
        for group in in_groups(batches, _SENDERS):
            for images in pool.map(send, group):
                done += images
                on_progress(WorkProgress(done, total, 0, 0, "sending notifications"))
    return done


def _message(images: list[PackInput]) -> tuple[str, int]:
    """Return the message for images, and their number."""
    return json.dumps({"Records": [_record(item) for item in images]}), len(images)


def _record(item: PackInput) -> dict[str, Any]:
    """Return the record of an S3 event notification, without the object's version."""
    bucket, _, key = item.address.removeprefix("s3://").partition("/")
    return {
        "eventName": "ObjectCreated:Put",
        "eventSource": "aws:s3",
        "s3": {"bucket": {"name": bucket}, "object": {"key": quote(key), "size": item.bytes}},
    }
