"""Reads what belongs to an image that arrives: its caption, and its columns.

A caption is a file next to the image. Columns, such as a license and the day on which it expires,
are those that the stack declares with their types. They are the fields of a JSON file next to the
image, or the tags of its object.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from sm_train.entrypoints.data_prep.packing.plan import CAPTION_SUFFIXES, PackInput, next_to
from sm_train.entrypoints.data_prep.packing.shard_builder import read_caption
from sm_train.entrypoints.data_prep.streaming.arrivals import Arrival
from sm_train.entrypoints.images.image_header import DecodeError
from sm_train.entrypoints.sample_metadata.column_types import (
    SOURCE,
    ColumnType,
    ColumnTypes,
    as_type,
    common_type,
    type_of,
)
from sm_train.entrypoints.sample_metadata.text_columns import fits, is_missing, typed
from sm_train.entrypoints.storage.store import S3Access, open_store

SIDECAR_SUFFIX = ".json"
"""The extension of the file with the columns of the image of its name."""

COMPANION_SUFFIXES = (*CAPTION_SUFFIXES, SIDECAR_SUFFIX)
"""The extensions of files that belong to an image."""

Origin = Literal["sidecar", "tags"]

_TYPES: tuple[ColumnType, ...] = ("text", "integer", "number", "boolean", "date", "timestamp")
_COLUMN = re.compile(rf"([A-Za-z_][A-Za-z0-9_]*) ({'|'.join(_TYPES)})")
_RESERVED = (SOURCE, "caption")

_MOST_BYTES = 1_000_000
"""Size of a file of columns, of which several are in memory at a time."""


class NotYetError(Exception):
    """A file of an image is missing, or a column has a wrong value; either may be fixed later."""


@dataclass(frozen=True)
class DeclaredColumns:
    """The columns of arriving images, with their types, and where they come from."""

    types: ColumnTypes = field(default_factory=dict)
    origin: Origin = "sidecar"

    @classmethod
    def of(cls, columns: str, origin: str) -> DeclaredColumns:
        """Return what ``license text, expiry date`` declares.

        Raises:
            ValueError: it declares nothing of that form.
        """
        if origin not in ("sidecar", "tags"):
            raise ValueError(f"ColumnsFrom: {origin!r} is neither sidecar nor tags")
        types: dict[str, ColumnType] = {}
        for part in filter(None, map(str.strip, columns.split(","))):
            found = _COLUMN.fullmatch(part)
            if found is None:
                raise ValueError(f"Columns: {part!r}: write NAME TYPE, of {', '.join(_TYPES)}")
            name, kind = found.groups()
            is_reserved = name.lower() in _RESERVED
            if is_reserved or name.lower() in map(str.lower, types):
                taken = "is a name of sm-train's" if is_reserved else "is there twice"
                raise ValueError(f"Columns: {name} {taken}; choose another name")
            types[name] = cast("ColumnType", kind)
        return cls(types, cast("Origin", origin))

    @classmethod
    def of_function(cls) -> DeclaredColumns:
        """Return what the environment of a Lambda function declares.

        Raises:
            ValueError: it declares nothing of that form.
        """
        names = (("SM_TRAIN_COLUMNS", ""), ("SM_TRAIN_COLUMNS_FROM", "sidecar"))
        return cls.of(*(os.environ.get(name, default) for name, default in names))

    def cells(self, found: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return a value of JSON for each column, None for those that are not in ``found``.

        Raises:
            NotYetError: a value is not of its column's type.
        """
        cells = {}
        for name, kind in self.types.items():
            try:
                cells[name] = _cell(found.get(name), kind)
            except ValueError:
                shown = json.dumps(found[name])[:60]
                raise NotYetError(f"{place}: {name}: {shown} is no {kind}") from None
        return cells


def _cell(value: Any, kind: ColumnType) -> Any:
    """Return a value as a sample's JSON file has it.

    Raises:
        ValueError: it is not of this type.
    """
    if value is None or value == "" or (kind != "text" and is_missing(str(value))):
        return None
    if isinstance(value, str) and kind != "text":
        if not fits(value, kind):
            raise ValueError(value)
        found = typed(value, kind)
    elif common_type(kind, type_of(value)) != kind:
        raise ValueError(value)
    else:
        found = as_type(value, kind)
    if isinstance(found, float) and not math.isfinite(found):  # JSON has no infinity
        raise ValueError(value)
    return found


def read_companions(
    arrival: Arrival, declared: DeclaredColumns, access: S3Access
) -> tuple[str, str | None]:
    """Return an image's caption, and the JSON object with its columns; None without columns.

    Raises:
        NotYetError: the caption or the columns are missing, or a column has another type.
        DecodeError: the caption is blank, is not UTF-8, or cannot be read.
        OSError, ClientError: S3 failed.
    """
    caption = _find_caption(arrival, access)
    if not declared.types:
        return caption, None
    read = _read_tags if declared.origin == "tags" else _read_sidecar
    place, found = read(arrival, access)
    return caption, json.dumps({"columns": declared.cells(found, place)})


def _find_caption(arrival: Arrival, access: S3Access) -> str:
    for suffix in CAPTION_SUFFIXES:
        address = next_to(arrival.address, suffix)
        item = PackInput(0, arrival.address, arrival.address, 0, caption_address=address)
        try:
            return read_caption(item, access)
        except DecodeError as error:
            if error.reason != "caption-missing":
                raise
    first = next_to(arrival.address)
    raise NotYetError(f"no caption: {first} does not exist")


def _read_sidecar(arrival: Arrival, access: S3Access) -> tuple[str, Mapping[str, Any]]:
    key = next_to(arrival.key, SIDECAR_SUFFIX)
    address = f"s3://{arrival.bucket}/{key}"
    content = open_store(access).start(arrival.bucket, key, _MOST_BYTES + 1)
    if content is None:
        raise NotYetError(f"no columns: {address} does not exist")
    if len(content) > _MOST_BYTES:
        raise NotYetError(f"no columns: {address} has more than {_MOST_BYTES:,} bytes")
    try:
        # JSON has no NaN, but Python writes it for a missing number.
        document = json.loads(content.decode("utf-8-sig"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise NotYetError(f"no columns: {address} is not a JSON object")
    return address, document


def _read_tags(arrival: Arrival, access: S3Access) -> tuple[str, Mapping[str, Any]]:
    tags = open_store(access).tags(arrival.bucket, arrival.key)
    if tags is None:
        raise NotYetError(f"no columns: {arrival.address} does not exist")
    return f"tags of {arrival.address}", tags
