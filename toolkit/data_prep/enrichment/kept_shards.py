"""Finds the shards that a finished enrichment has already, when others were added to its source."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pyarrow as pa
from sm_train.entrypoints.data_prep.enrichment.enrichment_plan import (
    ENRICHED_SHARDS,
    KEPT_RESULT,
    KEPT_SHARDS,
    RESULT_NAME,
    EnrichmentPlan,
    ShardSource,
    decode_hashes,
)
from sm_train.entrypoints.data_prep.packing.shard_builder import read_index
from sm_train.entrypoints.job_interface.index_location import (
    INDEX_NAME,
    SHARDS_FOLDER,
    removal_list,
)
from sm_train.entrypoints.sample_metadata.column_types import ENRICHED
from sm_train.entrypoints.shards.removal_list import RemovalList
from sm_train.entrypoints.shards.shard_format import ShardError
from sm_train.entrypoints.shards.shard_index import ShardIndex
from sm_train.entrypoints.storage.storage import Storage
from sm_train.toolkit.base.errors import UserError

_ANOTHER = "enrich into another folder"
_OF_SOURCE = ("inputs", "images")
"""What changes when shards are added to the source."""


def is_grown(plan: EnrichmentPlan, document: dict[str, Any]) -> bool:
    """Return whether a stored document is of the same work on earlier shards of the source."""
    if not isinstance(plan.origin, ShardSource) or document.get("inputs") == plan.inputs:
        return False
    own, stored = (
        {name: value for name, value in _flat(described).items() if name not in _OF_SOURCE}
        for described in (json.loads(json.dumps(plan.identity)), document)
    )
    return all(stored.get(name) == value for name, value in own.items())


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    origin = document.get("origin")
    return document | (origin if isinstance(origin, dict) else {}) | {"origin": None}


def find_kept(
    plan: EnrichmentPlan,
    index: ShardIndex,
    removals: RemovalList,
    index_columns: tuple[str, ...],
) -> dict[str, bytes]:
    """Return the files on the finished enrichment that the plan extends, by their names in a plan.

    ``index`` and ``removals`` are those of the source. There are no files if the destination has
    no finished enrichment of the same work.

    Raises:
        UserError: shards that it has are not in the source any more, or samples were removed.
    """
    try:
        content = plan.destination.read(RESULT_NAME)
        document = json.loads(content)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}  # a damaged one is reported when it is read
    if not isinstance(document, dict) or not is_grown(plan, document):
        return {}
    hashes = _read_hashes(plan.destination)
    present = dict(zip(index.names, index.content_hashes().to_pylist(), strict=True))
    address = plan.destination.address("")
    gone = [name for name, content_hash in hashes.items() if present.get(name) != content_hash]
    if gone:
        raise UserError(
            f"{address}: was enriched from shards that {plan.source} no longer has, such as "
            f"{gone[0]}; {_ANOTHER}"
        )
    if removals.keys_by_shard(pa.array(hashes, pa.string())):
        raise UserError(
            f"{plan.source}: samples were removed from it since {address} was enriched; {_ANOTHER}"
        )
    if plan.destination.size(removal_list(INDEX_NAME)) is not None:
        raise UserError(f"{address}: samples were removed from it; {_ANOTHER}")
    enriched = _read_enriched(plan.destination)
    _require_shards(plan.destination, enriched, hashes)
    columns = enriched.header.columns
    before = {name: kind for name, kind in columns.items() if name not in index_columns}
    if before != dict(index.header.columns):
        raise UserError(f"{address}: was enriched from an index with other columns; {_ANOTHER}")
    return {KEPT_SHARDS: plan.destination.read(ENRICHED_SHARDS), KEPT_RESULT: content}


def _read_enriched(destination: Storage) -> ShardIndex:
    """Return the index of the finished enrichment."""
    address = destination.address(INDEX_NAME)
    try:
        index = read_index(destination, INDEX_NAME)
    except (FileNotFoundError, ShardError):
        raise UserError(f"{address}: missing or damaged; {_ANOTHER}") from None
    if not index.header.options.get(ENRICHED):
        raise UserError(f"{address}: not the index that `sm-train enrich` wrote; {_ANOTHER}")
    return index


def _require_shards(destination: Storage, index: ShardIndex, hashes: Collection[str]) -> None:
    """Require that the shards of the enrichment are as its index says, by their sizes."""
    expected = dict(zip(index.names, index.bytes.tolist(), strict=True))
    stored = destination.list_sizes(SHARDS_FOLDER)
    for name in hashes:
        if name in expected and stored.get(name) != expected[name]:
            address = destination.address(f"{SHARDS_FOLDER}/{name}")
            raise UserError(f"{address}: missing, or not as in the index; {_ANOTHER}")


def _read_hashes(destination: Storage) -> dict[str, bytes]:
    try:
        return decode_hashes(destination.read(ENRICHED_SHARDS))
    # PyArrow raises OSError for some kinds of damage.
    except (OSError, ValueError):
        address = destination.address(ENRICHED_SHARDS)
        raise UserError(f"{address}: missing or damaged; {_ANOTHER}") from None
