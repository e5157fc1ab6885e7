"""Lists the images of a stack's dead letters, and why each is not packed, as S3 is now."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sm_train.entrypoints.data_prep.streaming.arrivals import (
    Arrival,
    InvalidMessageError,
    is_image,
    parse_arrival,
    parse_records,
)
from sm_train.entrypoints.data_prep.streaming.companions import (
    DeclaredColumns,
    NotYetError,
    read_companions,
)
from sm_train.entrypoints.data_prep.streaming.staging import PackedImages, RemovedImages
from sm_train.entrypoints.data_prep.streaming.stream_state import S3_REQUESTS, STAGED, is_seen
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.storage.storage import S3Prefix, open_storage
from sm_train.entrypoints.storage.store import S3Access, open_store
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.data_prep.streaming.stack import StreamStack

_DONE = "; --redrive lets its message go"


@dataclass(frozen=True)
class DeadLetter:
    """An image of a dead letter, by its address, and why it is not packed.

    A message that announces none has the address ``message ID``.
    """

    address: str
    reason: str


def read_dead_letters(stack: StreamStack, access: S3Access) -> list[DeadLetter]:
    """Return the images of all dead letters, sorted; the messages stay in their queue.

    Raises:
        UserError: access is denied.
    """
    with translate_aws_errors(stack.destination):
        destination = open_storage(stack.destination, access)
        assert isinstance(destination, S3Prefix)
        observer = _Observer(
            destination, RemovedImages(destination), PackedImages(destination), stack.columns
        )
        arrivals: dict[str, Arrival] = {}
        found = []
        for message_id, body in stack.peek_dead_letters():
            problems = []
            images_of_message = []
            try:
                records = parse_records(body)
            except InvalidMessageError as error:
                records, problems = [], [f"no event of S3: {error}"]
            for record in records:
                try:
                    arrival = parse_arrival(record)
                except InvalidMessageError as error:
                    problems.append(f"a record is no event of S3: {error}")
                    continue
                if arrival is not None and is_image(arrival.key):
                    images_of_message.append(arrival)
            arrivals |= {arrival.address: arrival for arrival in images_of_message}
            if not images_of_message and not problems:
                problems = ["it announces no image"]
            found += [DeadLetter(f"message {message_id}", problem) for problem in problems]
        images = list(arrivals.values())
        with ThreadPoolExecutor(S3_REQUESTS) as pool:
            reasons = pool.map(observer.reason, images)
            found += [
                DeadLetter(arrival.address, reason)
                for arrival, reason in zip(images, reasons, strict=True)
            ]
    return sorted(found, key=lambda letter: letter.address)


@dataclass(frozen=True)
class _Observer:
    """Finds out why an image is not packed."""

    destination: S3Prefix
    removed: RemovedImages
    packed: PackedImages
    columns: DeclaredColumns

    def reason(self, arrival: Arrival) -> str:
        store = open_store(self.destination.access)
        head = store.head(arrival.bucket, arrival.key)
        if head is None:
            return "the image does not exist any more"
        if arrival.address in self.removed:
            return "it was removed from the pack"
        listed = [
            image for image in self.packed.find(arrival.address) if image.listed >= head.modified
        ]
        if any(image.is_finished for image in listed):
            return f"it is packed: `sm-train pack --append` has added it{_DONE}"
        if arrival.version is not None:
            if is_seen(self.destination, arrival.id):
                return f"it is packed, or its rejection is in the index{_DONE}"
            if self.destination.size(f"{STAGED}/{arrival.id}") is not None:
                return f"it is staged{_DONE}"
        if listed:
            return "`sm-train pack --append`, which adds it, has not finished"
        try:
            read_companions(arrival, self.columns, self.destination.access)
        except NotYetError as error:
            return str(error)
        except DecodeError as error:
            return f"{error.reason}: {error.detail}"
        return "nothing is missing now: --redrive delivers it again"


def dead_letter_lines(letters: list[DeadLetter]) -> Iterator[str]:
    """Yield a line for each image."""
    for letter in letters:
        yield f"{letter.address}: {letter.reason}"


def dead_letter_documents(letters: list[DeadLetter]) -> list[dict[str, Any]]:
    """Return what ``stream --dead --json`` prints."""
    return [{"address": letter.address, "reason": letter.reason} for letter in letters]
