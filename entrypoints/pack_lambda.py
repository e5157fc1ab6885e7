"""The Lambda function that packs images as they arrive in S3: SQS → here → shards in S3.

Its messages are S3's event notifications. A message that cannot be packed *yet* (its caption is not
there, S3 is slow) is named in ``batchItemFailures`` and comes again, and after some times goes to
the queue's dead letters. One that never can (no picture, no S3 event) is refused with its reason
and does not come again. The rest is in :mod:`sm_train.entrypoints.pack_trickle`.

An event ``{"flush": true}``, from a schedule, makes a shard of what is staged, however little.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote_plus

from sm_train.entrypoints.pack_trickle import READERS, Arrival, LaterError, Trickle, is_image
from sm_train.entrypoints.shard_index import Refused
from sm_train.entrypoints.storage import Access, Prefix, place

TARGET_BYTES = 2 * 10**9
SPARE_SECONDS = 300.0
"""A shard is begun only when so much is left of the function's time: of 2 GB it takes a minute."""


def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """What Lambda calls: a batch of messages, or a flush."""
    trickle = _trickle()
    if event.get("flush"):
        sealed = trickle.seal(all_of_it=True, may_go_on=lambda: _time_left(context))
        return {"sealed": sealed}
    messages = event.get("Records", [])
    with ThreadPoolExecutor(READERS) as pool:
        outcomes = list(pool.map(lambda message: _take(trickle, message), messages))
    trickle.seal(may_go_on=lambda: _time_left(context))
    failed = [
        {"itemIdentifier": message["messageId"]}
        for message, done in zip(messages, outcomes, strict=True)
        if not done
    ]
    return {"batchItemFailures": failed}


def _trickle() -> Trickle:
    address = os.environ["SM_TRAIN_DESTINATION"]
    destination = place(address, Access())
    if not isinstance(destination, Prefix):
        raise ValueError(f"SM_TRAIN_DESTINATION: {address}: must be an S3 prefix")
    return Trickle(destination, int(os.environ.get("SM_TRAIN_SHARD_BYTES", TARGET_BYTES)))


def _time_left(context: Any) -> bool:
    left: float = context.get_remaining_time_in_millis() / 1000
    return left > SPARE_SECONDS


def _take(trickle: Trickle, message: dict[str, Any]) -> bool:
    """Pack what a message tells of; whether it is done with."""
    try:
        arrivals = list(_arrivals(json.loads(message["body"])))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # A retry would find the same body.
        name = message["messageId"]
        trickle.refuse(name, Refused(f"message {name}", "message-unreadable", repr(error)[:200]))
        return True
    done = True
    for arrival in arrivals:
        try:
            outcome = trickle.stage(arrival)
            print(f"{outcome}: s3://{arrival.bucket}/{arrival.key}")
        except (LaterError, OSError) as error:
            print(f"later: {error}")
            done = False
    return done


def _arrivals(body: dict[str, Any]) -> Iterator[Arrival]:
    """The images of an S3 event; S3's test event and other objects are none."""
    if body.get("Event") == "s3:TestEvent":
        return
    for record in body["Records"]:
        if not record["eventName"].startswith("ObjectCreated:"):
            continue
        thing = record["s3"]["object"]
        key = unquote_plus(thing["key"])
        if is_image(key):
            version = thing.get("versionId") or thing["eTag"]
            yield Arrival(record["s3"]["bucket"]["name"], key, version, int(thing.get("size", 0)))
