"""Helpers of the tests of node recorder, which other tests use as well."""

from __future__ import annotations

import time

from sm_train.entrypoints.clusters.node_record import (
    NodeRecord,
)


def record(node: str = "algo-1", **values: object) -> NodeRecord:
    """Return the record of a node that has just started."""
    now = time.time()
    defaults: dict[str, object] = {"started": now, "seen": now, "machine": None}
    return NodeRecord(
        run="art",
        stage="256px",
        platform="kubernetes",
        node=node,
        nodes=2,
        instance_type="ml.p4d.24xlarge",
        host="pod",
        **(defaults | values),  # type: ignore[arg-type]
    )
