"""Lambda functions that pack images as they arrive in S3: SQS → stage → seal → shards and an index.

One function receives messages, which are S3 event notifications, and stages their images. Another
one runs on schedules and seals staged samples into shards, or writes the index.

A message that cannot be packed *yet* (a caption or a column is missing, S3 is slow, the time is up)
is reported in ``batchItemFailures``: SQS delivers it again, and after several attempts moves it to
the dead-letter queue. So a message that fails always does not hold up the others. A message that
can never be packed (not an image, not an S3 event) is rejected with a reason and not delivered
again. :mod:`sm_train.entrypoints.data_prep.streaming.stream_state` describes the exactly-once
protocol.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, TypedDict

from botocore.exceptions import BotoCoreError, ClientError
from sm_train.entrypoints.data_prep.streaming.arrivals import (
    InvalidMessageError,
    is_image,
    parse_arrival,
    parse_records,
)
from sm_train.entrypoints.data_prep.streaming.companions import COMPANION_SUFFIXES, DeclaredColumns
from sm_train.entrypoints.data_prep.streaming.sealing import Sealer
from sm_train.entrypoints.data_prep.streaming.staging import (
    PackedImages,
    RemovedImages,
    RetryLaterError,
    Stager,
)
from sm_train.entrypoints.data_prep.streaming.stream_index import StreamIndexer
from sm_train.entrypoints.data_prep.streaming.stream_state import S3_REQUESTS
from sm_train.entrypoints.images.decoder_pool import DecoderPool
from sm_train.entrypoints.shards.shard_index import RejectedInput
from sm_train.entrypoints.storage.storage import S3Prefix, open_storage
from sm_train.entrypoints.storage.store import S3Access

TARGET_BYTES = 2 * 10**9
MIN_REMAINING_SECONDS = 300.0
"""A shard is started only if the function has this much time left; 2 GB take about a minute."""

REPORT_SECONDS = 20.0
"""Time that is kept to report which messages are not staged, before Lambda ends the function."""


class LambdaContext(Protocol):
    """The part of Lambda's context object that is used here."""

    def get_remaining_time_in_millis(self) -> int: ...


class SqsMessage(TypedDict):
    """The keys of an SQS message that are used here."""

    messageId: str
    body: str


def stage(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Stage the images of a batch of messages; Lambda calls this function."""
    messages: list[SqsMessage] = event.get("Records", [])
    destination = _destination()
    stager = Stager(
        destination,
        decoders=_decoders(),
        removed=RemovedImages(destination),
        packed=PackedImages(destination),
        columns=DeclaredColumns.of_function(),
    )
    pool = ThreadPoolExecutor(S3_REQUESTS)
    staged = {pool.submit(_pack_message, stager, message): message for message in messages}
    done, late = wait(staged, timeout=max(0.0, _remaining(context) - REPORT_SECONDS))
    # A thread that hangs must not keep the function from reporting the others.
    pool.shutdown(wait=False, cancel_futures=True)
    for future in late:
        _log(f"retry later: message {staged[future]['messageId']} takes too long")
    failed = {staged[future]["messageId"] for future in done if not future.result()}
    failed |= {staged[future]["messageId"] for future in late}
    return {
        "batchItemFailures": [
            {"itemIdentifier": message["messageId"]}
            for message in messages
            if message["messageId"] in failed
        ]
    }


def seal(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Seal staged samples into shards, or write the index; Lambda calls this function.

    The event ``{}`` seals shards that are full, ``{"flush": true}`` also the remainder, which then
    is in the index, and ``{"index": true}`` writes the index.

    Raises:
        PlanError: a stored object is damaged. What does not need it is sealed and indexed before.
    """
    destination = _destination()
    target_bytes = int(os.environ.get("SM_TRAIN_SHARD_BYTES", TARGET_BYTES))
    result: dict[str, Any] = {}

    def may_continue() -> bool:
        return _remaining(context) > MIN_REMAINING_SECONDS

    with ExitStack() as later:  # leaving it raises what the sealer has raised
        if event.get("index") or event.get("flush"):
            indexer = StreamIndexer(destination, target_bytes)
            later.callback(lambda: result.update(indexed=indexer.update(may_continue)))
        if not event.get("index"):
            sealer = Sealer(destination, target_bytes, DeclaredColumns.of_function())
            flush = bool(event.get("flush"))
            result["sealed"] = sealer.seal(flush=flush, may_continue=may_continue)
            if flush:
                result["uploads_aborted"] = sealer.abort_abandoned_uploads(datetime.now(UTC))
    return result


def _log(line: str) -> None:
    """Write a line to the function's log; threads do not mix theirs."""
    sys.stdout.write(f"{line}\n")


def _remaining(context: LambdaContext) -> float:
    """Return the seconds until Lambda ends the function."""
    return context.get_remaining_time_in_millis() / 1000


def _destination() -> S3Prefix:
    address = os.environ["SM_TRAIN_DESTINATION"]
    destination = open_storage(address, S3Access())
    if not isinstance(destination, S3Prefix):
        raise ValueError(f"SM_TRAIN_DESTINATION: {address}: must be an S3 prefix")
    return destination


_start_lock = threading.Lock()
_pool: DecoderPool | None = None


def _decoders() -> DecoderPool:
    """Return the decoders of this instance of the function, which later invocations reuse."""
    global _pool
    with _start_lock:
        if _pool is None:
            _pool = DecoderPool(os.cpu_count() or 1)
        return _pool


def _pack_message(stager: Stager, message: SqsMessage) -> bool:
    """Stage the images of a message; return False if it should be delivered again."""
    message_id = message["messageId"]
    try:
        records = parse_records(message["body"])
    except InvalidMessageError as error:
        return _succeeds(partial(_reject, stager, message_id, error))
    succeeded = [
        _succeeds(partial(_pack_record, stager, f"{message_id}-{number}", record))
        for number, record in enumerate(records)
    ]
    return all(succeeded)


def _succeeds(action: Callable[[], None]) -> bool:
    try:
        action()
    except (RetryLaterError, OSError, BotoCoreError, ClientError) as error:
        _log(f"retry later: {error}")
        return False
    return True


def _pack_record(stager: Stager, name: str, record: Any) -> None:
    try:
        arrival = parse_arrival(record)
    except InvalidMessageError as error:
        _reject(stager, name, error)
    else:
        if arrival is not None and is_image(arrival.key):
            _log(f"{stager.stage(arrival)}: {arrival.address}")
        elif arrival is not None and not arrival.key.endswith(COMPANION_SUFFIXES):
            _log(f"skipped: not a JPEG, PNG or WebP: {arrival.key}")


def _reject(stager: Stager, name: str, error: Exception) -> None:
    """Record an invalid message; a retry would fail the same way."""
    stager.reject(name, RejectedInput(f"message {name}", "message-unreadable", str(error)))
