"""Reads an S3 Inventory: the list of a bucket's objects that S3 writes every day or week.

A ``manifest.json`` names the files of the list (S3 user guide, "Locating your inventory list",
storage-inventory-location.html). They are CSV with gzip, without a header and with URL-encoded
keys, or Parquet. One file is read at a time, so memory does not depend on the number of objects.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

from sm_train.entrypoints.storage.storage import read_uri
from sm_train.entrypoints.storage.store import S3Access, open_store
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.file_kinds import FileSelection
from sm_train.toolkit.data_prep.packing.input_sorter import InputSorter
from sm_train.toolkit.data_prep.packing.s3_listing import ObjectCollector
from sm_train.toolkit.data_prep.packing.table_files import TableFile
from sm_train.toolkit.data_prep.packing.tables import open_parquet

MANIFEST_NAME = "/manifest.json"

_ROWS = 2**13
"""Rows of a Parquet file that are decoded at once."""

_COLUMNS = {
    "key": "Key",
    "size": "Size",
    "last_modified_date": "LastModifiedDate",
    "is_latest": "IsLatest",
    "is_delete_marker": "IsDeleteMarker",
}
"""The columns that are read, as Parquet and as CSV files name them."""


@dataclass(frozen=True)
class Inventory:
    """A manifest: the bucket that it lists, and the files of the list."""

    uri: str
    bucket: str
    files_bucket: str
    file_format: str
    csv_columns: tuple[str, ...]
    keys: tuple[str, ...]


def read_manifest(uri: str, access: S3Access) -> Inventory:
    """Read the manifest of an inventory.

    Raises:
        UserError: it is not one, or its files have another format than CSV and Parquet.
    """
    try:
        with translate_aws_errors(uri):
            content = json.loads(read_uri(uri, access))
        inventory = Inventory(
            uri,
            content["sourceBucket"],
            content["destinationBucket"].rpartition(":")[2],
            content["fileFormat"],
            tuple(column.strip() for column in content["fileSchema"].split(",")),
            tuple(file["key"] for file in content["files"]),
        )
    except FileNotFoundError:
        raise UserError(f"{uri}: no such object") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{uri}: is not the manifest of an S3 Inventory") from None
    if inventory.file_format not in ("CSV", "Parquet"):
        raise UserError(
            f"{uri}: the inventory has the format {inventory.file_format}; configure CSV or Parquet"
        )
    return inventory


def list_inventory(
    inventory: Inventory, access: S3Access, selection: FileSelection, sorter: InputSorter
) -> None:
    """Add the images in an inventory, each with the ``.txt`` object of the same name.

    Of several versions of an object only the latest counts.

    Raises:
        UserError: a file is missing or invalid, or the inventory has no sizes.
    """
    root = f"s3://{inventory.bucket}/"
    collector = ObjectCollector(root, selection, sorter)
    read = _read_csv if inventory.file_format == "CSV" else _read_parquet
    for key in inventory.keys:
        with translate_aws_errors(f"s3://{inventory.files_bucket}/{key}"):
            for row in read(inventory, key, access):
                if row.get("IsLatest") in (False, "false"):
                    continue
                if row.get("IsDeleteMarker") in (True, "true"):
                    continue
                if row.get("Size") in (None, ""):
                    raise UserError(
                        f"{inventory.uri}: has no sizes; add Size to the fields of the inventory"
                    )
                collector.add(root + row["Key"], int(row["Size"]), _time_ns(row))


def _time_ns(row: dict[str, Any]) -> int:
    """Return when an object was last modified, Unix nanoseconds; 0 if the inventory lacks it."""
    time = row.get("LastModifiedDate")
    if not time:
        return 0
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    return int(time.timestamp() * 1e9)


def _read_csv(inventory: Inventory, key: str, access: S3Access) -> Iterator[dict[str, Any]]:
    body = open_store(access).stream(inventory.files_bucket, key)
    try:
        with gzip.open(body) as file:
            for cells in csv.reader(io.TextIOWrapper(file, encoding="utf-8", newline="")):
                row: dict[str, Any] = dict(zip(inventory.csv_columns, cells, strict=True))
                yield row | {"Key": unquote_plus(row["Key"])}
    except (EOFError, gzip.BadGzipFile, csv.Error, ValueError, KeyError) as error:
        raise UserError(f"s3://{inventory.files_bucket}/{key}: not CSV: {error}") from None


def _read_parquet(inventory: Inventory, key: str, access: S3Access) -> Iterator[dict[str, Any]]:
    with open_parquet(TableFile(f"s3://{inventory.files_bucket}/{key}", Path(), access)) as file:
        names = [name for name in _COLUMNS if name in file.schema_arrow.names]
        for batch in file.iter_batches(_ROWS, columns=names, use_threads=False):
            for row in batch.to_pylist():
                yield {_COLUMNS[name]: value for name, value in row.items()}
