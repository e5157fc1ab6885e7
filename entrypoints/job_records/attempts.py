"""Groups the starts of nodes into attempts, and selects the nodes that failed: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sm_train.entrypoints.common.node_description import STOPPED
from sm_train.entrypoints.job_records.node_record import NodeRecord, StoredNode

_NAMED = 3
"""Nodes that a message names; the others are counted."""


def attempts(nodes: Sequence[StoredNode]) -> list[list[StoredNode]]:
    """Group the starts of a stage's nodes, oldest first, by attempts.

    A node that starts again begins a new attempt. One that runs on while another restarts belongs
    to the newest attempt.
    """
    groups: list[dict[str, StoredNode]] = [{}]
    for start in nodes:
        if start.record.node in groups[-1]:
            groups.append({})
        groups[-1][start.record.node] = start
    *earlier, newest = groups
    begin = min((start.record.started for start in newest.values()), default=0.0)
    for group in earlier:
        for name, start in list(group.items()):
            runs_on = start.record.state != "ended" and start.record.seen >= begin
            if runs_on and name not in newest:
                newest[name] = group.pop(name)
    return [list(group.values()) for group in groups if group]


def failed(records: Iterable[NodeRecord]) -> list[NodeRecord]:
    """Return the nodes that ended with a failure; a node that SIGTERM stopped has not failed."""
    return [record for record in records if record.exit_code not in (None, 0, STOPPED)]


def named(records: Sequence[NodeRecord]) -> str:
    """Return the nodes with their machines; of many the first, and the number of the others."""
    labels = [record.label for record in records[:_NAMED]]
    others = len(records) - len(labels)
    return ", ".join(labels) + (f" and {others} others" if others else "")
