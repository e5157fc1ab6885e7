"""Reads S3's event messages: which objects have arrived."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

from sm_train.entrypoints.data_prep.packing.plan import IMAGE_SUFFIXES


class InvalidMessageError(Exception):
    """A message, or one of its records, is not an S3 event."""


@dataclass(frozen=True)
class Arrival:
    """An object that arrived: its location and its size.

    ``version`` is its version id, or its ETag in a bucket without versions; None if the message
    does not tell, and then it is that of the object as it is now.
    """

    bucket: str
    key: str
    version: str | None
    bytes: int

    @property
    def address(self) -> str:
        """The object's URI."""
        return f"s3://{self.bucket}/{self.key}"

    @property
    def id(self) -> str:
        """Name of the sample; the same for each delivery of a message about the same version."""
        content = json.dumps([self.bucket, self.key, self.version])
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def is_image(key: str) -> bool:
    """Return whether an object's key has the extension of an image."""
    return Path(key).suffix.lower() in IMAGE_SUFFIXES


def parse_records(body: str) -> list[Any]:
    """Return the records of an S3 event; S3's test event has none.

    Raises:
        InvalidMessageError: it is not an S3 event.
    """
    try:
        document = json.loads(body)
        return [] if document.get("Event") == "s3:TestEvent" else list(document["Records"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidMessageError(repr(error)[:200]) from None


def parse_arrival(record: Any) -> Arrival | None:
    """Return the object that a record announces; None for other events.

    Raises:
        InvalidMessageError: it is not a record of an S3 event.
    """
    try:
        s3_object = record["s3"]["object"]
        key = unquote_plus(s3_object["key"])
        if not record["eventName"].startswith("ObjectCreated:"):
            return None
        # `sm-train stream --add` announces objects without their version.
        version = s3_object.get("versionId") or s3_object.get("eTag")
        size = int(s3_object.get("size", 0))
        return Arrival(record["s3"]["bucket"]["name"], key, version, size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidMessageError(repr(error)[:200]) from None
