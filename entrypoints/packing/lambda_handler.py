"""Lambda function that packs images as they arrive in S3: SQS → this function → shards in S3.

Its messages are S3 event notifications. A message that cannot be packed *yet* (its caption is
missing, S3 is slow) is reported in ``batchItemFailures``: SQS delivers it again, and after several
attempts moves it to the dead-letter queue. A message that can never be packed (not an image, not an
S3 event) is rejected with a reason and not delivered again. For the exactly-once protocol see
:mod:`sm_train.entrypoints.packing.streaming`.

A scheduled event ``{"flush": true}`` seals all staged samples into a shard.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, TypedDict
from urllib.parse import unquote_plus

from botocore.exceptions import BotoCoreError, ClientError
from sm_train.entrypoints.data.shard_index import RejectedInput
from sm_train.entrypoints.images.decoder_pool import DecoderPool
from sm_train.entrypoints.object_store.store import S3Access
from sm_train.entrypoints.packing.streaming import (
    S3_REQUESTS,
    Arrival,
    RetryLaterError,
    StreamingPacker,
    is_image,
)
from sm_train.entrypoints.shared_work.storage import S3Prefix, open_storage

TARGET_BYTES = 2 * 10**9
MIN_REMAINING_SECONDS = 300.0
"""A shard is started only if the function has this much time left; 2 GB take about a minute."""


class LambdaContext(Protocol):
    """The part of Lambda's context object that is used here."""

    def get_remaining_time_in_millis(self) -> int: ...


class SqsMessage(TypedDict):
    """The keys of an SQS message that are used here."""

    messageId: str
    body: str


class _InvalidMessageError(Exception):
    """A message, or one of its records, is not an S3 event."""


def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Handle a batch of messages or a flush; Lambda calls this function."""
    packer = _create_packer()
    may_continue = partial(_has_time_left, context)
    if event.get("flush"):
        sealed = packer.seal(flush=True, may_continue=may_continue)
        return {
            "sealed": sealed,
            "uploads_aborted": packer.abort_abandoned_uploads(datetime.now(UTC)),
        }
    messages: list[SqsMessage] = event.get("Records", [])
    with ThreadPoolExecutor(S3_REQUESTS) as pool:
        succeeded = list(pool.map(partial(_pack_message, packer), messages))
    try:
        packer.seal(may_continue=may_continue)
    except (OSError, BotoCoreError, ClientError) as error:
        # No message needs to be delivered again: its sample is staged, and the next invocation
        # resumes the shard. The daily flush raises the error.
        print(f"could not build a shard: {error}")
    failed = [
        {"itemIdentifier": message["messageId"]}
        for message, success in zip(messages, succeeded, strict=True)
        if not success
    ]
    return {"batchItemFailures": failed}


def _create_packer() -> StreamingPacker:
    address = os.environ["SM_TRAIN_DESTINATION"]
    destination = open_storage(address, S3Access())
    if not isinstance(destination, S3Prefix):
        raise ValueError(f"SM_TRAIN_DESTINATION: {address}: must be an S3 prefix")
    shard_bytes = int(os.environ.get("SM_TRAIN_SHARD_BYTES", TARGET_BYTES))
    return StreamingPacker(destination, shard_bytes, decoders=_decoders())


_start_lock = threading.Lock()
_pool: DecoderPool | None = None


def _decoders() -> DecoderPool:
    """Return the decoders of this instance of the function, which later invocations reuse."""
    global _pool
    with _start_lock:
        if _pool is None:
            _pool = DecoderPool(os.cpu_count() or 1)
        return _pool


def _has_time_left(context: LambdaContext) -> bool:
    return context.get_remaining_time_in_millis() / 1000 > MIN_REMAINING_SECONDS


def _pack_message(packer: StreamingPacker, message: SqsMessage) -> bool:
    """Pack the images of a message; return False if it should be delivered again."""
    message_id = message["messageId"]
    try:
        records = _parse_records(message["body"])
    except _InvalidMessageError as error:
        return _succeeds(partial(_reject, packer, message_id, error))
    succeeded = [
        _succeeds(partial(_pack_record, packer, f"{message_id}-{number}", record))
        for number, record in enumerate(records)
    ]
    return all(succeeded)


def _succeeds(action: Callable[[], None]) -> bool:
    try:
        action()
    except (RetryLaterError, OSError, BotoCoreError, ClientError) as error:
        print(f"retry later: {error}")
        return False
    return True


def _pack_record(packer: StreamingPacker, name: str, record: Any) -> None:
    try:
        arrival = _parse_arrival(record)
    except _InvalidMessageError as error:
        _reject(packer, name, error)
    else:
        if arrival is not None:
            print(f"{packer.stage(arrival)}: s3://{arrival.bucket}/{arrival.key}")


def _reject(packer: StreamingPacker, name: str, error: Exception) -> None:
    """Record an invalid message; a retry would fail the same way."""
    packer.reject(name, RejectedInput(f"message {name}", "message-unreadable", str(error)))


def _parse_records(body: str) -> list[Any]:
    """Return the records of an S3 event; S3's test event has none.

    Raises:
        _InvalidMessageError: it is not an S3 event.
    """
    try:
        document = json.loads(body)
        return [] if document.get("Event") == "s3:TestEvent" else list(document["Records"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _InvalidMessageError(repr(error)[:200]) from None


def _parse_arrival(record: Any) -> Arrival | None:
    """Return the image that a record announces; None for other objects and other events.

    Raises:
        _InvalidMessageError: it is not a record of an S3 event.
    """
    try:
        s3_object = record["s3"]["object"]
        key = unquote_plus(s3_object["key"])
        if not record["eventName"].startswith("ObjectCreated:"):
            return None
        if not is_image(key):
            if not key.endswith(".txt"):
                print(f"skipped: not a JPEG, PNG or WebP: {key}")
            return None
        version = s3_object.get("versionId") or s3_object["eTag"]
        size = int(s3_object.get("size", 0))
        return Arrival(record["s3"]["bucket"]["name"], key, version, size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _InvalidMessageError(repr(error)[:200]) from None
