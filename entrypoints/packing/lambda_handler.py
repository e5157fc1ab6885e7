"""The Lambda function that packs images as they arrive in S3: SQS → here → shards in S3.

Its messages are S3's event notifications. A message that cannot be packed *yet* (its caption is not
there, S3 is slow) is named in ``batchItemFailures`` and comes again, and after some times goes to
the queue's dead letters. One that never can (no picture, no S3 event) is rejected with its reason
and does not come again. The rest is in :mod:`sm_train.entrypoints.packing.streaming`.

An event ``{"flush": true}``, from a schedule, makes a shard of what is staged, however little.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import unquote_plus

from botocore.exceptions import BotoCoreError, ClientError
from sm_train.entrypoints.data.shard_index import RejectedInput
from sm_train.entrypoints.packing.storage import S3Access, S3Prefix, open_storage
from sm_train.entrypoints.packing.streaming import (
    READERS,
    Arrival,
    RetryLaterError,
    StreamingPacker,
    is_image,
)

TARGET_BYTES = 2 * 10**9
SPARE_SECONDS = 300.0
"""A shard is begun only when so much is left of the function's time: of 2 GB it takes a minute."""


class _UnreadableError(Exception):
    """A message, or a record of one, that tells of nothing in S3."""


def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """What Lambda calls: a batch of messages, or a flush."""
    trickle = _trickle()
    if event.get("flush"):
        sealed = trickle.seal(all_of_it=True, may_go_on=lambda: _time_left(context))
        return {"sealed": sealed, "uploads_given_up": trickle.tidy(datetime.now(UTC))}
    messages = event.get("Records", [])
    with ThreadPoolExecutor(READERS) as pool:
        outcomes = list(pool.map(lambda message: _take(trickle, message), messages))
    try:
        trickle.seal(may_go_on=lambda: _time_left(context))
    except (OSError, BotoCoreError, ClientError) as error:
        # No message has to come again for that: what is staged stays, and the next invocation
        # goes on. The flush of the day raises it.
        print(f"no shard for now: {error}")
    failed = [
        {"itemIdentifier": message["messageId"]}
        for message, done in zip(messages, outcomes, strict=True)
        if not done
    ]
    return {"batchItemFailures": failed}


def _trickle() -> StreamingPacker:
    address = os.environ["SM_TRAIN_DESTINATION"]
    destination = open_storage(address, S3Access())
    if not isinstance(destination, S3Prefix):
        raise ValueError(f"SM_TRAIN_DESTINATION: {address}: must be an S3 prefix")
    return StreamingPacker(destination, int(os.environ.get("SM_TRAIN_SHARD_BYTES", TARGET_BYTES)))


def _time_left(context: Any) -> bool:
    left: float = context.get_remaining_time_in_millis() / 1000
    return left > SPARE_SECONDS


def _take(trickle: StreamingPacker, message: dict[str, Any]) -> bool:
    """Pack what a message tells of; whether it is done with."""
    name: str = message["messageId"]
    try:
        records = _records(message["body"])
    except _UnreadableError as error:
        return _tried(partial(_reject, trickle, name, error))
    done = [
        _tried(partial(_take_record, trickle, f"{name}-{number}", record))
        for number, record in enumerate(records)
    ]
    return all(done)


def _tried(act: Callable[[], None]) -> bool:
    try:
        act()
    except (RetryLaterError, OSError, BotoCoreError, ClientError) as error:
        print(f"later: {error}")
        return False
    return True


def _take_record(trickle: StreamingPacker, name: str, record: Any) -> None:
    try:
        arrival = _arrival(record)
    except _UnreadableError as error:
        _reject(trickle, name, error)
    else:
        if arrival is not None:
            print(f"{trickle.stage(arrival)}: s3://{arrival.bucket}/{arrival.key}")


def _reject(trickle: StreamingPacker, name: str, error: Exception) -> None:
    """A retry would find the same."""
    trickle.reject(name, RejectedInput(f"message {name}", "message-unreadable", str(error)))


def _records(body: str) -> list[Any]:
    """What an S3 event tells of; S3's test event tells of nothing.

    Raises:
        _UnreadableError: it is no S3 event.
    """
    try:
        document = json.loads(body)
        return [] if document.get("Event") == "s3:TestEvent" else list(document["Records"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _UnreadableError(repr(error)[:200]) from None


def _arrival(record: Any) -> Arrival | None:
    """The image that a record tells of; None of a removal, or of another object.

    Raises:
        _UnreadableError: it is no record of an S3 event.
    """
    try:
        thing = record["s3"]["object"]
        key = unquote_plus(thing["key"])
        if not (record["eventName"].startswith("ObjectCreated:") and is_image(key)):
            return None
        version = thing.get("versionId") or thing["eTag"]
        return Arrival(record["s3"]["bucket"]["name"], key, version, int(thing.get("size", 0)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _UnreadableError(repr(error)[:200]) from None
