"""The plan of an index, stored next to it: the shards to describe, and what is known already.

A shard is known by its name, size and version: the index has described it. Every other one gets a
record, an index of this shard alone. All records together with what is known make the index.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sm_train.entrypoints.base.stored_fields import (
    amount,
    anything,
    flag,
    list_of,
    mapping_of,
    optional,
    record_of,
    size,
    text,
)
from sm_train.entrypoints.data_prep.packing.unusable_samples import (
    IMAGE_AND_TEXT,
    SampleFiles,
    Unusable,
    UnusableSamples,
)
from sm_train.entrypoints.data_prep.work.plan_documents import read_checked
from sm_train.entrypoints.data_prep.work.work_stages import PLAN_NAME, STATE_FOLDER
from sm_train.entrypoints.job_interface.index_location import index_listing, index_name
from sm_train.entrypoints.job_interface.job_config import CaptionSource
from sm_train.entrypoints.shards.shard_format import ListedShard
from sm_train.entrypoints.storage.storage import Storage, open_storage, write_file
from sm_train.entrypoints.storage.store import S3Access

STATE = ".indexing"
"""Folder next to the shards that holds the plans of unfinished indices."""

INDEX_OPTIONS = frozenset({"samples", "compressed", "versions", "headers_only", "unusable"})
"""Options of an index that `sm-train index` has written, also into that of a pack."""

_LISTING_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("bytes", pa.int64()),
        pa.field("version", pa.string()),
        pa.field("unusable", pa.string()),
    ]
)
"""Shards of an index, and their unusable samples as a JSON object."""


@dataclass(frozen=True)
class SampleCheck:
    """Which samples can be trained on: those with ``files``.

    ``find_missing`` is false if a function of the user makes files of a sample.
    """

    files: SampleFiles = IMAGE_AND_TEXT
    find_missing: bool = True

    def options(self) -> dict[str, Any]:
        """Return what an index depends on, as JSON values."""
        return {
            "image": list(self.files.image),
            "caption": [asdict(source) for source in self.files.caption],
            "find_missing": self.find_missing,
        }

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SampleCheck:
        """Return what :meth:`options` has returned."""
        caption = tuple(CaptionSource(**source) for source in options["caption"])
        return cls(SampleFiles(tuple(options["image"]), caption), options["find_missing"])


@dataclass(frozen=True)
class IndexPlan:
    """The shards ``listed`` in the folder ``name`` of the storage at ``parent``.

    ``known`` are the names of those that the index has described already, which has ``version``,
    None if there is none. ``options`` are those of the index. With ``headers_only`` nothing is read
    of a tar but its headers and the heads of its images, and the digest of a shard is made of its
    version. With ``is_pack`` the index is one of `sm-train pack` or of a streaming pack, and keeps
    what these wrote.
    """

    parent: str
    name: str
    check: SampleCheck
    headers_only: bool
    options: dict[str, Any]
    listed: tuple[ListedShard, ...]
    known: frozenset[str]
    version: str | None
    access: S3Access = field(compare=False)
    is_pack: bool = False

    @property
    def storage(self) -> Storage:
        """Where the shards and their index are."""
        return open_storage(self.parent, self.access)

    @property
    def state(self) -> Storage:
        """Where the plan and the records are."""
        return state_storage(self.parent, self.name, self.access)

    @property
    def index_file(self) -> str:
        """The index's name in the storage."""
        return index_name(self.name)

    @cached_property
    def by_name(self) -> dict[str, ListedShard]:
        """The shards by their names."""
        return {shard.name: shard for shard in self.listed}

    @cached_property
    def unknown(self) -> list[str]:
        """The names of the shards to describe."""
        return [shard.name for shard in self.listed if shard.name not in self.known]

    def store(self) -> None:
        """Store the plan."""
        document = {
            "parent": self.parent,
            "name": self.name,
            "check": self.check.options(),
            "headers_only": self.headers_only,
            "options": self.options,
            "listed": [list(vars(shard).values()) for shard in self.listed],
            "known": sorted(self.known),
            "version": self.version,
            "is_pack": self.is_pack,
        }
        write_file(self.state, PLAN_NAME, json.dumps(document).encode())


def _listed_shard(value: Any) -> ListedShard:
    """Return a shard of a stored list.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{value!r} is no shard")
    return ListedShard(text(value[0]), size(value[1]), text(value[2]))


_CAPTION = {"member": text, "field": optional(text), "weight": amount}
_PLAN_FIELDS = {
    "parent": text,
    "name": text,
    "check": record_of(
        {"image": list_of(text), "caption": list_of(record_of(_CAPTION)), "find_missing": flag}
    ),
    "headers_only": flag,
    "options": mapping_of(anything),
    "listed": list_of(_listed_shard),
    "known": list_of(text),
    "version": optional(text),
    "is_pack": flag,
}


def state_storage(parent: str, name: str, access: S3Access) -> Storage:
    """Return where the plan of an index of the shards ``name`` is."""
    return open_storage(f"{parent.rstrip('/')}/{STATE}/{name}", access)


def read_index_plan(state: Storage, access: S3Access) -> IndexPlan:
    """Return the stored plan.

    Raises:
        FileNotFoundError: there is none.
        PlanError: it is damaged, or of another version of sm-train.
    """
    folder = state.address(STATE_FOLDER)
    rebuild = f"delete {folder} and run `sm-train index` again"
    document = read_checked(state, PLAN_NAME, _PLAN_FIELDS, rebuild)
    return IndexPlan(
        document["parent"],
        document["name"],
        SampleCheck.from_options(document["check"]),
        document["headers_only"],
        document["options"],
        tuple(document["listed"]),
        frozenset(document["known"]),
        document["version"],
        access,
        document["is_pack"],
    )


def write_listing(plan: IndexPlan, unusable: Sequence[Unusable]) -> None:
    """Store the versions of all shards, and the unusable samples of each in order."""
    rows = [
        vars(shard) | {"unusable": encode_unusable(samples)}
        for shard, samples in zip(plan.listed, unusable, strict=True)
    ]
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, _LISTING_SCHEMA), content, compression="zstd")
    write_file(plan.storage, index_listing(plan.index_file), content.getvalue())


def read_listing(storage: Storage, index_file: str) -> dict[str, tuple[ListedShard, Unusable]]:
    """Return the shards that an index describes; none if that is not known."""
    try:
        content = storage.read(index_listing(index_file))
        rows = pq.read_table(io.BytesIO(content)).cast(_LISTING_SCHEMA).to_pylist()
        return {
            row["name"]: (
                ListedShard(row["name"], row["bytes"], row["version"]),
                decode_unusable(row["unusable"]),
            )
            for row in rows
        }
    except (FileNotFoundError, NotADirectoryError, pa.ArrowException, ValueError, TypeError):
        return {}  # damaged, or of another version: all shards are described again


def encode_unusable(unusable: Unusable) -> str:
    """Return unusable samples as JSON."""
    return json.dumps({reason: asdict(samples) for reason, samples in unusable.items()})


def decode_unusable(content: str) -> Unusable:
    """Return what :func:`encode_unusable` has encoded.

    Raises:
        ValueError: it has another type or range.
    """
    document = mapping_of(record_of({"count": size, "first": list_of(text)}))(json.loads(content))
    return {reason: UnusableSamples(**samples) for reason, samples in document.items()}
