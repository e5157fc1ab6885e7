"""Helpers of the tests of silence, which other tests use as well."""

from __future__ import annotations

from typing import Any

from sm_train.entrypoints.clusters.node_record import (
    StoredNode,
)

from tests.entrypoints.clusters.node_recorder_support import record

NOW = 1_700_010_000.0


def node(name: str, age: float, **values: Any) -> StoredNode:
    """Return a node whose newest heartbeat is ``age`` seconds old."""
    seen, started = NOW - age, values.pop("started", NOW - 3600)
    fields = {"ran": seen - started, "state": "training"} | values
    return StoredNode(record(name, **fields), (), seen)


def ended(name: str, age: float, code: int, **values: Any) -> StoredNode:
    return node(name, age, state="ended", exit_code=code, **values)
