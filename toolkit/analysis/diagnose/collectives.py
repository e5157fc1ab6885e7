"""Finds the rank that a timed out collective waits for.

A rank that reports a timeout waited: the failure is in the rank that did not report one, or whose
collective of the same process group is an earlier one. The numbers of different groups' collectives
mean nothing to each other, and a timeout whose group no line names is compared with no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sm_train.entrypoints.base.sagemaker_paths import host_name
from sm_train.toolkit.analysis.diagnose.matches import Match, ScanReport
from sm_train.toolkit.analysis.diagnose.origins import FirstFailing
from sm_train.toolkit.analysis.diagnose.watchdog_lines import CollectiveTimeout, Group

TIMEOUT = "nccl-timeout"


@dataclass(frozen=True)
class TimeoutOrigin:
    """``first`` is the rank that the others wait for; its rank is None if that is not certain.

    ``notes`` name the ranks that have not reported, and those in another collective.
    """

    first: FirstFailing
    notes: tuple[str, ...]


def judge_timeouts(
    symptoms: Sequence[Match], reports: Sequence[ScanReport]
) -> TimeoutOrigin | None:
    """Return what the timeouts of collectives show; None if the first symptom is another one."""
    if not symptoms or symptoms[0].code != TIMEOUT:
        return None
    reported = _timeouts(reports)
    timeouts = _first_of_each_rank(reported)
    unknown = FirstFailing(None, None, symptoms[0].time, symptoms[0].text)
    ranks = sorted({_rank(timeout) for timeout in timeouts})
    absent = _absent(ranks, reports) if _are_global(reported) else []
    suspects, notes = _compare_groups(timeouts)
    if absent:
        notes = [f"no timeout from {_rank_list(absent)}: check there first", *notes]
        if len(absent) > 1 or len(ranks) < 2 or not _world_size(reports):
            return TimeoutOrigin(unknown, tuple(notes))
        [rank] = absent
        waiting = f"the other {len(ranks)} ranks wait in {_common_collective(timeouts)}"
        line = f"rank {rank} reported no timeout, and {waiting}"
        return TimeoutOrigin(FirstFailing(_node(rank, reports), rank, None, line), tuple(notes))
    if len(suspects) != 1:
        return TimeoutOrigin(unknown, tuple(notes))
    [(rank, line)] = suspects.items()
    own = next(timeout for timeout in timeouts if _rank(timeout) == rank)
    node = own.node or _node(rank, reports)
    return TimeoutOrigin(FirstFailing(node, rank, own.time, line), tuple(notes))


def _timeouts(reports: Iterable[ScanReport]) -> list[CollectiveTimeout]:
    """Return the timeouts after which training did not continue."""
    found = []
    for report in reports:
        orders = [match.order for match in report.matches if match.code == TIMEOUT]
        found += [each for each in report.timeouts if orders and each.order >= min(orders)]
    return found


def _first_of_each_rank(timeouts: Iterable[CollectiveTimeout]) -> list[CollectiveTimeout]:
    """Return the first timeout of each rank in each group; the others follow from it."""
    found: dict[tuple[int, Group | None], CollectiveTimeout] = {}
    for timeout in timeouts:
        found.setdefault((_rank(timeout), timeout.group), timeout)
    return list(found.values())


def _rank(timeout: CollectiveTimeout) -> int:
    """Return the number of a rank among all; without a prefix it is older than groups in logs."""
    return timeout.group_rank if timeout.rank is None else timeout.rank


def _are_global(timeouts: Sequence[CollectiveTimeout]) -> bool:
    """Return whether the ranks are numbers among all of the job.

    A line without a prefix has the number in a group. Where none names the group, a rank that
    waits in two collectives may be two ranks of two groups.
    """
    waits: dict[int, set[tuple[str | None, int | None]]] = {}
    for timeout in timeouts:
        if timeout.group is None:
            waits.setdefault(_rank(timeout), set()).add((timeout.operation, timeout.sequence))
        elif timeout.rank is None and not timeout.group.is_default:
            return False
    return all(len(collectives) == 1 for collectives in waits.values())


def _world_size(reports: Iterable[ScanReport]) -> int:
    return max(report.world_size for report in reports)


def _absent(ranks: Sequence[int], reports: Sequence[ScanReport]) -> list[int]:
    """Return the ranks of the job that have reported nothing, as far as they are known."""
    if not ranks:
        return []
    return sorted(set(range(_world_size(reports) or ranks[-1] + 1)).difference(ranks))


def _compare_groups(timeouts: Iterable[CollectiveTimeout]) -> tuple[dict[int, str], list[str]]:
    """Return the ranks that lag behind the others of their group, with the reason, and notes."""
    groups: dict[Group, dict[int, CollectiveTimeout]] = {}
    for timeout in timeouts:
        if timeout.group is not None and timeout.sequence is not None:
            groups.setdefault(timeout.group, {})[_rank(timeout)] = timeout
    suspects: dict[int, str] = {}
    notes = []
    for group, members in groups.items():
        numbers = {timeout.group_rank for timeout in members.values()}
        if len(numbers) < len(members) or any(t.rank is None for t in members.values()):
            continue  # older versions number groups on each rank: these are several
        waits: dict[tuple[int, str], list[int]] = {}
        for rank, timeout in sorted(members.items()):
            waits.setdefault((timeout.sequence or 0, timeout.operation or ""), []).append(rank)
        if len(waits) < 2:
            continue
        waiting = "; ".join(
            f"{_rank_list(ranks)} in {operation} {sequence}"
            for (sequence, operation), ranks in sorted(waits.items())
        )
        prefix = "" if group.is_default else f"group {group.name or group.id}: "
        notes.append(f"{prefix}the ranks wait in different collectives: {waiting}")
        number, operation = min(waits)
        behind = waits[number, operation]
        if len(behind) == 1 and len({name for _, name in waits}) == 1:
            line = f"rank {behind[0]} waits in {operation} {number}, and the others in a later one"
            suspects[behind[0]] = line
    return suspects, notes


def _common_collective(timeouts: Iterable[CollectiveTimeout]) -> str:
    waits = {(timeout.operation, timeout.sequence) for timeout in timeouts}
    [(operation, sequence), *others] = waits
    if others:
        return "collectives"
    return "a collective" if sequence is None else f"{operation} {sequence}"


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
