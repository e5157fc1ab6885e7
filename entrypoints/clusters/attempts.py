"""Groups the starts of nodes into attempts, and selects the nodes that failed: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sm_train.entrypoints.clusters.node_record import StoredNode
from sm_train.entrypoints.job_interface.node_description import STOPPED

CLOCK_SECONDS = 60.0
"""Difference from the storage's clock above which a node's clock is reported."""

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
    begin = min((start.started for start in newest.values()), default=0.0)
    for group in earlier:
        for name, start in list(group.items()):
            runs_on = start.record.state != "ended" and start.seen >= begin
            if runs_on and name not in newest:
                newest[name] = group.pop(name)
    return [list(group.values()) for group in groups if group]


def newest_attempt(nodes: Sequence[StoredNode]) -> list[StoredNode]:
    """Return the starts of nodes of a stage's newest attempt; none without any."""
    return attempts(nodes)[-1] if nodes else []


def failed(starts: Iterable[StoredNode]) -> list[StoredNode]:
    """Return the nodes that ended with a failure; a node that SIGTERM stopped has not failed."""
    return [start for start in starts if start.record.exit_code not in (None, 0, STOPPED)]


def clock_findings(starts: Sequence[StoredNode]) -> list[str]:
    """Return a line for nodes of an attempt whose clocks differ from the storage's."""
    wrong = [start for start in starts if abs(start.clock_offset) > CLOCK_SECONDS]
    if not wrong:
        return []
    worst = max((start.clock_offset for start in wrong), key=abs)
    direction = "ahead of" if worst > 0 else "behind"
    each = "its clock is" if len(wrong) == 1 else "their clocks are up to"
    return [
        f"{named(wrong)}: {each} {abs(worst):,.0f} s {direction} that of the storage; the times in "
        "logs are wrong by that, so synchronize it (chrony)"
    ]


def named(starts: Sequence[StoredNode]) -> str:
    """Return the nodes with their machines; of many the first, and the number of the others."""
    labels = [start.record.label for start in starts[:_NAMED]]
    others = len(starts) - len(labels)
    return ", ".join(labels) + (f" and {others} others" if others else "")
