"""Finds the rank that a timed out collective waits for.

A rank that reports a timeout waited: the failure is in the rank that did not report one, or whose
collective is an earlier one. Ranks are compared within their process group only: the numbers of
different groups' collectives mean nothing to each other.

PyTorch prints the rank in the group in the message, and the global rank in the prefix ``[rank12]:``
(2.1 and later). Messages name the group since 2.3: ``[PG 3 Rank 1]``, later
``[PG ID 3 PG GUID 5(mesh_replicate) Rank 1]`` (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sm_train.entrypoints.common.sagemaker_paths import host_name
from sm_train.toolkit.diagnose.matches import Match, ScanReport
from sm_train.toolkit.diagnose.origins import FirstFailing

TIMEOUT = "nccl-timeout"

# "[Rank 12] Watchdog caught …", "[PG ID 3 PG GUID 5(mesh_replicate) Rank 1] Watchdog caught …"
_REPORTER = re.compile(
    r"\[(?:PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\s(\]]+))?(?:\((?P<name>[^)]*)\))? )?"
    r"Rank (?P<rank>\d+)\]"
)
# "… WorkNCCL(SeqNum=1579, OpType=ALLREDUCE, …"
_COLLECTIVE = re.compile(r"SeqNum=(\d+), OpType=(\w+)")
_DEFAULT_GROUPS = ("0", "default_pg")


@dataclass(frozen=True)
class _Timeout:
    """A timeout that a rank reports; ``rank`` is global, ``group`` None for the default group."""

    rank: int
    group: str | None
    name: str
    sequence: int | None
    operation: str | None
    match: Match


@dataclass(frozen=True)
class CollectiveTimeout:
    """``first`` is the rank that the others wait for; its rank is None if that is not certain.

    ``notes`` name the ranks that have not reported, and those in another collective.
    """

    first: FirstFailing
    notes: tuple[str, ...]


def judge_timeouts(
    symptoms: Sequence[Match], reports: Sequence[ScanReport]
) -> CollectiveTimeout | None:
    """Return what the timeouts of collectives show; None if the first symptom is another one."""
    if not symptoms or symptoms[0].code != TIMEOUT:
        return None
    groups: dict[str | None, dict[int, _Timeout]] = {}
    for timeout in filter(None, map(_parse, symptoms)):
        # The first collective of each rank counts: the others follow from it.
        groups.setdefault(timeout.group, {}).setdefault(timeout.rank, timeout)
    earliest = symptoms[0]
    suspects: dict[int, str] = {}
    notes: list[str] = []
    for group, timeouts in groups.items():
        members = _members(group, reports)
        suspect, found = _judge_group(timeouts, members, several=len(groups) > 1)
        notes += found
        suspects |= suspect
    if len(suspects) != 1:
        return CollectiveTimeout(
            FirstFailing(None, None, earliest.time, earliest.text), tuple(notes)
        )
    [(rank, reason)] = suspects.items()
    own = next(
        (
            timeouts_of_group[rank].match
            for timeouts_of_group in groups.values()
            if rank in timeouts_of_group and f"rank {rank}" in reason
        ),
        None,
    )
    node = own.node if own is not None else _node(rank, reports)
    time = own.time if own is not None else None
    return CollectiveTimeout(FirstFailing(node, rank, time, reason), tuple(notes))


def _parse(match: Match) -> _Timeout | None:
    """Return the timeout that a line reports; None if it names no rank."""
    reporter = _REPORTER.search(match.text)
    collective = _COLLECTIVE.search(match.text)
    in_group = int(reporter["rank"]) if reporter else None
    # Without the prefix, which is older than groups in messages, there is one group.
    rank = match.rank if match.rank is not None else in_group
    if match.code != TIMEOUT or rank is None:
        return None
    group = reporter and (reporter["guid"] or reporter["id"])
    name = (reporter and reporter["name"]) or group or ""
    return _Timeout(
        rank,
        None if group in (None, "0") or name in _DEFAULT_GROUPS else group,
        name,
        int(collective[1]) if collective else None,
        collective[2] if collective else None,
        match,
    )


def _members(group: str | None, reports: Sequence[ScanReport]) -> frozenset[int] | None:
    """Return the ranks of the default group, which are all of the job's; None if unknown."""
    sizes = {report.world_size for report in reports if report.world_size}
    return frozenset(range(max(sizes))) if group is None and sizes else None


def _judge_group(
    timeouts: dict[int, _Timeout], members: frozenset[int] | None, *, several: bool
) -> tuple[dict[int, str], list[str]]:
    """Return the rank that a group waits for, with the reason, and notes about the group."""
    first_timeout = next(iter(timeouts.values()))
    prefix = f"group {first_timeout.name}: " if several and first_timeout.group is not None else ""
    suspects: dict[int, str] = {}
    notes = []
    absent = _absent(timeouts, members)
    if absent:
        notes.append(f"{prefix}no timeout from {_rank_list(absent)}: check there first")
        if members is not None and len(absent) == 1 and len(members) > 2:
            waiting = f"the other {len(timeouts)} ranks wait in {_collective(first_timeout)}"
            suspects[absent[0]] = f"rank {absent[0]} reported no timeout, and {waiting}"
    known = [timeout for timeout in timeouts.values() if timeout.sequence is not None]
    waits: dict[tuple[int, str], list[int]] = {}
    for timeout in sorted(known, key=lambda timeout: timeout.rank):
        waits.setdefault((timeout.sequence or 0, timeout.operation or ""), []).append(timeout.rank)
    if len(waits) > 1:
        waiting = "; ".join(
            f"{_rank_list(ranks)} in {operation} {sequence}"
            for (sequence, operation), ranks in sorted(waits.items())
        )
        notes.append(f"{prefix}the ranks wait in different collectives: {waiting}")
        lowest = min(waits)
        behind = waits[lowest]
        if not absent and len(behind) == 1 and len({name for _, name in waits}) == 1:
            [rank] = behind
            text = f"rank {rank} waits in {lowest[1]} {lowest[0]}, and the others in a later one"
            suspects[rank] = text
    return suspects, notes


def _absent(timeouts: dict[int, _Timeout], members: frozenset[int] | None) -> list[int]:
    """Return the ranks of the group that have reported nothing, as far as they are known."""
    if members is not None:
        return sorted(members - timeouts.keys())
    if next(iter(timeouts.values())).group is None:
        # Its ranks are numbered from 0.
        return sorted(set(range(max(timeouts) + 1)) - timeouts.keys())
    return []


def _collective(timeout: _Timeout) -> str:
    if timeout.sequence is None:
        return "a collective"
    return f"{timeout.operation} {timeout.sequence}"


def _node(rank: int, reports: Iterable[ScanReport]) -> str | None:
    """Return the node of a rank; None if the ranks of a node are not known."""
    for report in reports:
        if report.ranks_per_node and report.nodes:
            index = rank // report.ranks_per_node
            return report.hosts.get(index) or host_name(index, report.nodes)
    return None


def _rank_list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
