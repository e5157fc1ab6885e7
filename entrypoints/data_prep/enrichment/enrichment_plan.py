"""The plan of an enrichment, stored in the destination: all that a node needs to do its part.

The images of a source, in the order of their paths, are divided into parts, each of which becomes a
Parquet file of a table. Shards become shards of the same names. Either is stored as a whole, so a
file that exists is finished, and each image has its columns exactly once.

If shards were added to the source of a finished enrichment, only these are made: the shards that
the destination has are kept.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet
from sm_train.entrypoints.base.stored_fields import (
    anything,
    list_of,
    mapping_of,
    one_of,
    optional,
    positive,
    record_of,
    size,
    text,
)
from sm_train.entrypoints.data_prep.packing.plan_files import (
    INPUTS,
    PlanFiles,
    PlannedInputs,
    partition_names,
)
from sm_train.entrypoints.data_prep.packing.stored_plan import copy_partitions
from sm_train.entrypoints.data_prep.work.plan_documents import read_checked
from sm_train.entrypoints.data_prep.work.work_stages import (
    ENDED_NAME,
    LEASES_FOLDER,
    PLAN_NAME,
    STATE_FOLDER,
)
from sm_train.entrypoints.job_interface.index_location import INDEX_NAME
from sm_train.entrypoints.sample_metadata.column_types import COLUMN_TYPES, ColumnType, MadeBy
from sm_train.entrypoints.shards.removal_list import RemovalList, decode_list
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.storage import Storage, open_storage, write_file
from sm_train.entrypoints.storage.store import S3Access

TABLE_FOLDER = "table"
"""Folder in the destination with the Parquet files of a table."""

RESULT_NAME = "enriched.json"
"""Says what a finished enrichment has made, and by what; the last file to be written."""

INPUTS_FOLDER = f"{STATE_FOLDER}/inputs"
SOURCE_INDEX = f"{STATE_FOLDER}/source-{INDEX_NAME}"
SOURCE_REMOVALS = f"{STATE_FOLDER}/source-removals"
"""Copies of what describes the source, as it was when the work began."""

KEPT_SHARDS = f"{STATE_FOLDER}/kept-shards.parquet"
KEPT_RESULT = f"{STATE_FOLDER}/kept-result.json"
"""Copies of what describes the finished enrichment to which shards are added."""

ENRICHED_SHARDS = "enriched-shards.parquet"
"""The shards of the source of a finished enrichment, with the BLAKE3 hashes of their bytes."""

_MIN_ROWS, _MAX_ROWS = 1024, 8192
"""Images of a Parquet file. A file is made by one process; its rows are in memory."""

_MAX_FILES = 10_000
"""Parquet files of a table, unless each of them would have too many images."""


@dataclass(frozen=True)
class TableSource:
    """Images of a source, in files of a plan below ``root``; the table has their column ``image``.

    ``part_rows`` are the images of a part, and ``made`` the columns of the source that functions
    have made before, with what made each. ``types`` are those of the columns of a table, as
    conditions on it have them.
    """

    images: int
    root: str
    image_column: str
    part_rows: int
    made: dict[str, MadeBy] = field(default_factory=dict)
    types: dict[str, ColumnType] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        images: int,
        root: str,
        image_column: str,
        made: dict[str, MadeBy],
        types: dict[str, ColumnType],
    ) -> TableSource:
        """Return the source with a sensible number of parts."""
        rows = min(max(-(-images // _MAX_FILES), _MIN_ROWS), _MAX_ROWS)
        return cls(images, root, image_column, rows, made, types)

    @property
    def parts(self) -> list[str]:
        """The names of the Parquet files."""
        return [f"part-{number:06d}.parquet" for number in range(-(-self.images // self.part_rows))]

    def inputs(self, part: str, files: PlanFiles) -> PlannedInputs:
        """Return the images of a Parquet file."""
        first = int(part.split("-")[1].split(".")[0]) * self.part_rows
        return PlannedInputs(files, self.root, first, min(self.part_rows, self.images - first))


@dataclass(frozen=True)
class ShardSource:
    """Shards in the folder ``name`` of the storage at ``address``.

    ``index_columns`` are new columns that the index of the result keeps.
    """

    address: str
    name: str
    images: int
    index_columns: tuple[str, ...]


@dataclass(frozen=True)
class EnrichmentPlan:
    """What is enriched, and with what.

    ``source`` is what the user named, ``inputs`` a digest of what was in it. ``function`` says how
    the columns are made (:meth:`ColumnMaker.as_dict`), ``code`` are digests of the module of the
    function, of several if it changed while the work was unfinished, and ``model`` is one of the
    files of the model.
    """

    source: str
    inputs: str
    function: dict[str, Any]
    code: tuple[str, ...]
    model: str | None
    origin: TableSource | ShardSource = field(kw_only=True)
    destination: Storage = field(kw_only=True, compare=False)
    access: S3Access = field(kw_only=True, compare=False)

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the work: with the same identity it is resumed."""
        return {
            "work": "enrich",
            "source": self.source,
            "inputs": self.inputs,
            "function": self.function,
            "model": self.model,
            "origin": vars(self.origin) | {"kind": type(self.origin).__name__},
        }

    @property
    def files(self) -> PlanFiles:
        """The stored files with the images of a table."""
        return PlanFiles(self.destination.address(INPUTS_FOLDER), self.access)

    @cached_property
    def parts(self) -> list[str]:
        """The names of the files that are made: Parquet files or shards."""
        if isinstance(self.origin, TableSource):
            return self.origin.parts
        return [name for name in source_index(self).names if name not in self.kept]

    @cached_property
    def kept(self) -> Collection[str]:
        """The shards of the source that the destination has from an earlier enrichment."""
        try:
            return decode_hashes(self.destination.read(KEPT_SHARDS)).keys()
        except FileNotFoundError:
            return ()

    @property
    def images(self) -> int:
        """The number of images of the parts that are made."""
        if isinstance(self.origin, TableSource) or not self.kept:
            return self.origin.images
        index = source_index(self)
        counts = zip(index.names, index.samples.tolist(), strict=True)
        return sum(count for name, count in counts if name not in self.kept)

    @cached_property
    def removals(self) -> RemovalList:
        """The samples that were removed from the shards."""
        content = self.destination.read(SOURCE_REMOVALS)
        return decode_list(content, self.destination.address(SOURCE_REMOVALS))


def encode_hashes(index: ShardIndex) -> bytes:
    """Return the shards of an index with their hashes, as :data:`ENRICHED_SHARDS` stores them."""
    content = io.BytesIO()
    hashes = index.content_hashes().cast(pa.binary())
    parquet.write_table(pa.table({"shard": index.name_column(), "blake3": hashes}), content)
    return content.getvalue()


def decode_hashes(content: bytes) -> dict[str, bytes]:
    """Return the hash of each shard.

    Raises:
        ValueError: the content is damaged.
    """
    table = parquet.read_table(io.BytesIO(content), columns=["shard", "blake3"])
    return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))


@lru_cache(maxsize=1)
def _open_index(
    address: str, access: S3Access, _: str
) -> tuple[tempfile.TemporaryDirectory[str], ShardIndex]:
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / INDEX_NAME
    path.write_bytes(open_storage(address, access).read(SOURCE_INDEX))
    return folder, ShardIndex(path)


def source_index(plan: EnrichmentPlan) -> ShardIndex:
    """Return the index of the shards, as it was when the work began; one copy in each process."""
    return _open_index(plan.destination.address(""), plan.access, plan.inputs)[1]


def store_sources(plan: EnrichmentPlan, files: dict[str, bytes], folder: Path | None) -> None:
    """Store what a plan refers to: ``files`` by their names, or the files of images in ``folder``.

    It comes before the plan.
    """
    if folder is not None:
        assert isinstance(plan.origin, TableSource)
        names = partition_names(INPUTS, plan.origin.images)
        copy_partitions(folder, names, plan.destination, INPUTS_FOLDER)
    for name, content in files.items():
        write_file(plan.destination, name, content)


def store_plan(plan: EnrichmentPlan, started_ns: int) -> None:
    """Store a plan in the destination."""
    document = plan.identity | {"code": list(plan.code), "started_ns": started_ns}
    write_file(plan.destination, PLAN_NAME, json.dumps(document).encode())


def read_enrichment(destination: Storage, access: S3Access) -> EnrichmentPlan:
    """Return the plan in the destination.

    Raises:
        FileNotFoundError: there is none.
        PlanError: it is damaged, or of another version of sm-train.
    """
    document = read_checked(destination, PLAN_NAME, PLAN_FIELDS, "use another destination")
    return EnrichmentPlan(
        document["source"],
        document["inputs"],
        document["function"],
        tuple(document["code"]),
        document["model"],
        origin=document["origin"],
        destination=destination,
        access=access,
    )


def _origin(value: Any) -> TableSource | ShardSource:
    """Return the source that a stored object describes; ValueError for another one."""
    kind = record_of({"kind": one_of(TableSource.__name__, ShardSource.__name__)})(value)["kind"]
    if kind == TableSource.__name__:
        return TableSource(**record_of(_TABLE_FIELDS)(value))
    fields = record_of(_SHARD_FIELDS)(value)
    return ShardSource(**fields | {"index_columns": tuple(fields["index_columns"])})


_TABLE_FIELDS = {
    "images": size,
    "root": text,
    "image_column": text,
    "part_rows": positive,
    "made": mapping_of(mapping_of(text)),
    "types": mapping_of(one_of(*COLUMN_TYPES)),
}
_SHARD_FIELDS = {"address": text, "name": text, "images": size, "index_columns": list_of(text)}

PLAN_FIELDS = {
    "source": text,
    "inputs": text,
    "function": mapping_of(anything),
    "code": list_of(text),
    "model": optional(text),
    "origin": _origin,
    "started_ns": size,
}
"""The fields of a stored plan."""


def remove_state(plan: EnrichmentPlan, records: Sequence[str]) -> None:
    """Remove what the work is resumed from; the plan comes last.

    Only the sign that the work has ended stays longer, for nodes that look for these files.
    """
    for name in (*records, SOURCE_INDEX, SOURCE_REMOVALS, KEPT_SHARDS, KEPT_RESULT):
        plan.destination.remove(name)
    for folder in (INPUTS_FOLDER, LEASES_FOLDER):
        plan.destination.remove_folder(folder)
    plan.destination.remove(PLAN_NAME)
    plan.destination.remove(ENDED_NAME)
